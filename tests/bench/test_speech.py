"""The benchmark of speech on small cases."""

import pytest

pytest.importorskip("kaldi_decoder")

import numpy as np

from roundelay.bench import speech
from roundelay.bench.speech import made_up_speech, measure
from roundelay.speech.flat_start import flat_start


def test_made_up_speech_has_the_hours_and_transcripts_that_a_flat_start_can_align(tmp_path):
    features, transcripts = made_up_speech(0.02, tmp_path)
    assert sum(len(features[name]) for name in features) == pytest.approx(0.02 * 360_000, rel=0.1)
    assert set(features) == set(transcripts.texts)
    assert len(flat_start(features, transcripts, workers=1).alignments.labels) == len(features)
    assert np.isfinite(features.frames_NF).all()


def test_every_row_has_a_figure(monkeypatch):
    monkeypatch.setattr(speech, "MODELS", {"small": (8, 9, speech.ModelConfig(width=4, bottleneck=4))})
    monkeypatch.setattr(speech, "_flat_start_memory_MB", lambda hours: 100 * hours)
    rows = list(measure(0.01, [1.0, 2.0], None))
    assert [row.what for row in rows] == [
        "features: log-mel, derivatives",
        "training: small",
        "flat start on 1 h",
        "flat start on 2 h",
    ]
    assert all(row.hours_per_hour > 1 for row in rows[:2])
    assert [row.memory_MB for row in rows[2:]] == [100, 200]


@pytest.mark.slow
def test_the_memory_of_a_flat_start_does_not_grow_with_hours():
    small, large = (speech._flat_start_memory_MB(hours) for hours in (0.2, 0.8))
    assert large < small + 15  # labels take 1.4 MB an hour, features 29 MB
