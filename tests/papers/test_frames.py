"""AN4 as a classification problem, on a small corpus in its place: every phone is a tone."""

import pytest
from tones import write_tones

from roundelay.errors import DataError
from roundelay.papers.frames import CONTEXT, an4_frames


@pytest.fixture
def an4_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ROUNDELAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ROUNDELAY_DATA", str(tmp_path))
    return tmp_path / "an4"


def test_frames_have_their_neighbours_and_the_phone_at_their_centre(an4_folder):
    write_tones(an4_folder, counts={"train": 6, "valid": 2, "test": 1})
    problem = an4_frames((8,))
    (frames, labels), (held_out, held_out_labels) = problem.train, problem.held_out
    assert frames.shape == (len(labels), 40 * (2 * CONTEXT + 1))
    assert len(held_out) == len(held_out_labels) < len(frames)
    assert set(labels.tolist()) == {0, 1, 2, 3}  # SIL, A, B, C
    centre = frames.view(len(frames), 40, -1)[:, :, CONTEXT]
    loudest_bin = [centre[labels == phone].mean(dim=0).argmax().item() for phone in (1, 2, 3)]
    assert loudest_bin == sorted(loudest_bin)  # 400, 1200 and 3000 Hz
    assert len(set(loudest_bin)) == 3


def test_a_copy_without_phone_times_is_refused(an4_folder):
    write_tones(an4_folder, alignments=False, counts={"train": 2, "valid": 1})
    with pytest.raises(DataError, match="no phone times"):
        an4_frames((8,))
