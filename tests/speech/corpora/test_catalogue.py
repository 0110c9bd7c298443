"""Corpora by name."""

from __future__ import annotations

import pytest
from sounds import noise, save

from roundelay.errors import DataError
from roundelay.speech.corpora.catalogue import NAMES, corpus


def test_a_manifest_is_loaded_by_name(tmp_path):
    save(tmp_path / "a.wav", noise())
    (tmp_path / "manifest.tsv").write_text("path\ttext\na.wav\tone\n")
    assert corpus("manifest", tmp_path).utterances[0].text == "one"
    assert corpus("synth", tmp_path).name == "synth"


def test_mistakes_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("ROUNDELAY_DATA", raising=False)
    with pytest.raises(DataError, match="did you mean 'kaldi'"):
        corpus("kadli")
    with pytest.raises(DataError, match="a kaldi corpus needs its folder"):
        corpus("kaldi")
    for name in ("an4", "fsdd", "switchboard"):
        assert name in NAMES
        with pytest.raises(DataError, match=f"{name} is not found"):
            corpus(name)
