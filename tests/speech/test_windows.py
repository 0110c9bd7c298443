"""Windows tile utterances: every frame counts once, and none comes from a neighbour."""

import numpy as np
from hypothesis import given, strategies as st

from roundelay.speech.windows import windows_of

LENGTHS = st.lists(st.integers(0, 70), min_size=1, max_size=8)


def spans(lengths):
    ends = np.cumsum(lengths)
    return list(zip((ends - lengths).tolist(), ends.tolist(), strict=True))


@given(LENGTHS, st.integers(1, 21))
def test_every_frame_counts_exactly_once(lengths, size):
    windows = windows_of(spans(lengths), size)
    rows, counts = windows.rows(np.arange(len(windows)))
    assert sorted(rows[counts].tolist()) == list(range(sum(lengths)))


@given(LENGTHS, st.integers(1, 21), st.integers(0, 40), st.integers(0, 10**6))
def test_shifted_windows_stay_inside_their_utterance(lengths, size, most, seed):
    windows = windows_of(spans(lengths), size)
    shift = np.random.default_rng(seed).integers(-most, most + 1, len(windows))
    rows, counts = windows.rows(np.arange(len(windows)), shift)
    assert (rows >= windows.begin_W[:, None]).all()
    assert (rows < windows.end_W[:, None]).all()
    long = windows.end_W - windows.begin_W >= size
    assert counts[long].all()
    assert (np.diff(rows[long], axis=1) == 1).all()


def test_an_utterance_shorter_than_a_window_repeats_its_last_frame_without_counting_it():
    rows, counts = windows_of([(5, 8)], 6).rows(np.array([0]))
    assert rows.tolist() == [[5, 6, 7, 7, 7, 7]]
    assert counts.tolist() == [[True] * 3 + [False] * 3]
