"""A function that needs an optional library says which extra installs it."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from sounds import noise, save

from roundelay.errors import MissingExtraError
from roundelay.speech.audio import read_audio
from roundelay.speech.corpora.arks import load
from roundelay.speech.corpora.switchboard import switchboard
from roundelay.speech.decode import Decoder
from roundelay.speech.fst import arcs, to_kaldi
from roundelay.speech.parallel import in_processes
from roundelay.speech.score import score
from roundelay.speech.synth.espeak import Espeak


@pytest.mark.parametrize(
    ("module", "extra", "use"),
    [
        ("soundfile", "speech", lambda folder: read_audio(folder / "sw02001.sph")),
        ("kaldiio", "speech", lambda folder: load(folder / "feats.scp", "u")),
        ("lhotse.audio.backend", "switchboard", switchboard),
        ("kaldialign", "speech", lambda _: score({"u": "a"}, {"u": "b"})),
        ("kaldifst", "speech", lambda _: to_kaldi(arcs([(0, 0, 1, 1, 0.0)], [0.0]))),
        ("kaldi_decoder", "speech", lambda _: Decoder(None)(np.zeros((1, 1)))),
        ("joblib", "speech", lambda _: in_processes(dict, {"a": 1, "b": 2}, 2)),
        ("espeakng_loader", "synth", lambda _: Espeak(seed=1)),
    ],
)
def test_a_missing_library_names_its_extra(tmp_path, monkeypatch, module, extra, use):
    save(tmp_path / "sw02001.sph", noise(0.1, 8000), 8000)
    (tmp_path / "sw2001A-ms98-a-trans.text").write_text("sw2001A-ms98-a-0001 0.0 0.1 hi\n")
    (tmp_path / "feats.scp").write_text("u feats.ark:2\n")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"roundelay\[{extra}\]"):
        use(tmp_path)
