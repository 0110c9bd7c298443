"""Phone times become labels of frames; CTM files keep them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from roundelay.speech.cache import DataError
from roundelay.speech.segments import Segments, frame_labels, read_ctm, segments, write_ctm

IDS = {"SIL": 0, "A": 1, "B": 2}


def test_a_phone_of_n_frames_is_split_into_thirds():
    for frames, thirds in [(1, [1]), (2, [0, 2]), (3, [0, 1, 2]), (4, [0, 1, 1, 2]), (6, [0, 0, 1, 1, 2, 2])]:
        labels = frame_labels(segments([("A", 0.0, frames / 100)]), frames, IDS)
        assert labels.third_T.tolist() == thirds


def test_decimal_times_of_an_aligner_are_its_frame_numbers():
    """0.29 / 0.01 is 28.999… in floating point; every boundary must still be where the aligner put it."""
    starts = np.arange(500)
    rows = [("A" if t % 2 else "B", round(t * 0.01, 2), 0.01) for t in starts]
    labels = frame_labels(segments(rows), 500, IDS)
    assert labels.segment_T.tolist() == starts.tolist()
    assert labels.phone_T.tolist() == [1 if t % 2 else 2 for t in starts]


@given(
    st.lists(st.tuples(st.sampled_from("AB"), st.integers(0, 5), st.integers(1, 8)), max_size=12), st.integers(1, 150)
)
def test_every_frame_has_the_phone_that_a_table_of_frames_gives_it(pieces, frames):
    table, rows, now = ["SIL"] * 400, [], 0
    for symbol, gap, length in pieces:
        rows.append((symbol, (now + gap) / 100, length / 100))
        table[now + gap : now + gap + length] = [symbol] * length
        now += gap + length
    labels = frame_labels(segments(rows), frames, IDS)
    assert labels.phone_T.tolist() == [IDS[symbol] for symbol in table[:frames]]
    assert labels.phones_S[labels.segment_T].tolist() == labels.phone_T.tolist()
    assert (np.diff(labels.segment_T) >= 0).all()
    for segment in np.unique(labels.segment_T):
        thirds = labels.third_T[labels.segment_T == segment]
        assert (np.diff(thirds) >= 0).all()
        counts = np.bincount(thirds, minlength=3)
        assert counts.max() - counts.min() <= 1


def test_gaps_become_one_silence_with_the_silence_beside_them():
    full = segments([("SIL", 0.1, 0.1), ("A", 0.2, 0.1), ("B", 0.302, 0.1), ("SIL", 0.5, 0.1)]).covering(1.0)
    assert full.symbols == ("SIL", "A", "B", "SIL")
    assert full.starts_s == pytest.approx((0.0, 0.2, 0.302, 0.402))
    assert full.durations_s == pytest.approx((0.2, 0.1, 0.1, 0.598))


def test_an_unknown_phone_is_named():
    with pytest.raises(DataError, match="phone 'Q' that the phone set lacks"):
        frame_labels(segments([("Q", 0.0, 0.1)]), 10, IDS)


def test_what_is_written_as_ctm_is_read_again(tmp_path):
    alignments = {"u1": segments([("A", 0.0, 0.1234), ("B", 0.1234, 0.5)]), "u2": segments([("SIL", 0.0, 1.0)])}
    write_ctm(tmp_path / "a.ctm", alignments)
    assert read_ctm(tmp_path / "a.ctm") == alignments


def test_ctm_comments_confidences_and_disorder_are_understood(tmp_path):
    (tmp_path / "a.ctm").write_text(";; made by hand\n# utt chan start dur\n\nu A 0.5 0.1 B 0.99\nu A 0.1 0.4 A 0.9\n")
    assert read_ctm(tmp_path / "a.ctm") == {"u": Segments(("A", "B"), (0.1, 0.5), (0.4, 0.1))}


@pytest.mark.parametrize("line", ["u 1 0.1 A", "u 1 zero 0.1 A"])
def test_a_broken_line_is_named_with_its_number(tmp_path, line):
    (tmp_path / "a.ctm").write_text(f"u 1 0.0 0.1 A\n{line}\n")
    with pytest.raises(DataError, match=f"a.ctm:2 is no line of a CTM: '{line}'"):
        read_ctm(tmp_path / "a.ctm")


def test_faster_speech_has_shorter_segments():
    fast = segments([("A", 0.2, 0.4)]).faster(2.0)
    assert (fast.starts_s, fast.durations_s, fast.end_s) == ((0.1,), (0.2,), pytest.approx(0.3))
