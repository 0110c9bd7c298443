"""States of phones: numbering, labels from times, durations."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from roundelay.errors import SpeechError
from roundelay.speech.hmm import (
    Monophones,
    Occurrences,
    frame_labels,
    log_priors,
    occurrences,
    phone_segments,
    phones_in,
    self_loops,
    state_labels,
)
from roundelay.speech.segments import segments

TYING = Monophones(("SIL", "A", "B", "C"))


def test_state_numbers_phones_and_positions_agree():
    chains = TYING.chains(0, np.arange(4), 0)
    assert sorted(chains.ravel().tolist()) == list(range(TYING.num_states))
    assert (TYING.phone_of_state[chains] == np.arange(4)[:, None]).all()
    assert (TYING.position_of_state[chains] == np.arange(3)).all()


def test_every_frame_takes_the_phone_at_its_centre_and_gaps_are_silence():
    found = occurrences(segments([("A", 0.02, 0.03), ("B", 0.07, 0.02)]), 10, TYING)
    assert found.phones.tolist() == [0, 1, 0, 2, 0]
    assert found.starts.tolist() == [0, 2, 5, 7, 9]


def test_silence_given_and_silence_filled_in_are_one():
    assert occurrences(segments([("SIL", 0.0, 0.02), ("A", 0.05, 0.02)]), 7, TYING).phones.tolist() == [0, 1]


def test_repeated_phones_stay_two():
    labels = frame_labels(segments([("A", 0.0, 0.03), ("A", 0.03, 0.03)]), 6, TYING)
    assert labels.tolist() == [3, 4, 5, 3, 4, 5]


def test_an_utterance_without_phones_or_frames_is_silence_or_nothing():
    assert set(frame_labels(segments([]), 7, TYING)) == {0, 1, 2}
    assert frame_labels(segments([]), 0, TYING).shape == (0,)


@given(
    phones=st.lists(st.integers(1, 3), min_size=1, max_size=8),
    durations=st.lists(st.integers(3, 9), min_size=8, max_size=8),
    states=st.integers(2, 3),
)
def test_phones_survive_the_way_to_labels_and_back(phones, durations, states):
    tying = Monophones(TYING.phones, states)
    ends = np.cumsum(durations[: len(phones)])
    starts = ends - durations[: len(phones)]
    found = Occurrences(np.array(phones), starts, int(ends[-1]))
    labels = state_labels(found, tying)
    again = phones_in(labels, tying)
    assert again.phones.tolist() == phones
    assert again.starts.tolist() == starts.tolist()
    assert frame_labels(phone_segments(labels, tying), len(labels), tying).tolist() == labels.tolist()


def test_mean_duration_gives_the_self_loop():
    labels = [np.repeat([3, 4, 5], [99, 9, 1])]
    loops = self_loops(labels, TYING.num_states)
    # (visits + 1) / (frames + 2) leave; 1 − that stay.
    assert loops[3:6] == pytest.approx([1 - 2 / 101, 1 - 2 / 11, 1 - 2 / 3])
    assert loops[0] == pytest.approx(0.5)


def test_priors_are_relative_frequencies_that_sum_to_one():
    priors = np.exp(log_priors([[3, 3, 3], [4]], 6))
    assert priors == pytest.approx(np.array([1, 1, 1, 4, 2, 1]) / 10)


def test_unknown_phones_are_named_with_a_guess():
    with pytest.raises(SpeechError, match=r"unknown phone 'SILL'; did you mean 'SIL'\?"):
        frame_labels(segments([("SILL", 0, 1)]), 100, TYING)


def test_one_state_per_phone_is_refused_with_the_reason():
    with pytest.raises(SpeechError, match="a phone said twice"):
        Monophones(("SIL", "A"), 1)
