"""CTM files keep phone times."""

from __future__ import annotations

import numpy as np
import pytest

from roundelay.errors import DataError
from roundelay.speech.segments import Segments, read_ctm, segments, write_ctm


def test_a_written_ctm_is_read_back(tmp_path):
    alignments = {"u1": segments([("A", 0.0, 0.1234), ("B", 0.1234, 0.5)]), "u2": segments([("SIL", 0.0, 1.0)])}
    write_ctm(tmp_path / "a.ctm", alignments)
    assert read_ctm(tmp_path / "a.ctm") == alignments


def test_segments_that_touch_still_touch_in_a_ctm(tmp_path):
    ends = np.cumsum(np.random.default_rng(0).uniform(0.03, 0.2, 200))
    rows = [("A", end - length, length) for end, length in zip(ends, np.diff(ends, prepend=0.0), strict=True)]
    write_ctm(tmp_path / "a.ctm", {"u": segments(rows)})
    read = read_ctm(tmp_path / "a.ctm")["u"]
    stops = [round(start + length, 4) for _, start, length in read]
    assert stops[:-1] == list(read.starts_s[1:])


def test_ctm_comments_confidences_and_disorder_are_understood(tmp_path):
    (tmp_path / "a.ctm").write_text(";; made by hand\n# utt chan start dur\n\nu A 0.5 0.1 B 0.99\nu A 0.1 0.4 A 0.9\n")
    assert read_ctm(tmp_path / "a.ctm") == {"u": Segments(("A", "B"), (0.1, 0.5), (0.4, 0.1))}


@pytest.mark.parametrize("line", ["u 1 0.1 A", "u 1 zero 0.1 A"])
def test_a_broken_line_is_named_with_its_number(tmp_path, line):
    (tmp_path / "a.ctm").write_text(f"u 1 0.0 0.1 A\n{line}\n")
    with pytest.raises(DataError, match=f"a.ctm:2 is not a line of a CTM file: '{line}'"):
        read_ctm(tmp_path / "a.ctm")


def test_faster_speech_has_shorter_segments():
    fast = segments([("A", 0.2, 0.4)]).faster(2.0)
    assert (fast.starts_s, fast.durations_s, fast.end_s) == ((0.1,), (0.2,), pytest.approx(0.3))
