"""Hidden Markov models of phones: states, state labels of frames, priors and transition probabilities.

A phone is a chain of n states, left to right, each with a self-loop. A state is one output of the network. A *tying* maps a
phone, its two neighbours and the position k in the chain to a state:

    monophones   state(left, phone, right, k) = n·phone + k
    triphones    a decision tree over left and right (`tree.py`)

>>> tying = Monophones(("SIL", "AH", "T"))
>>> tying.num_states, tying.chains(0, 2, 1).tolist()
(9, [6, 7, 8])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roundelay.errors import SpeechError, unknown
from roundelay.speech.segments import FRAME_SHIFT_S, Ints, Segments, segments

Floats = NDArray[np.float32]


class Tying(ABC):
    """The state of each position of a phone between its neighbours. Phones are given by number.

    Silence is phone 0. It is also the neighbour of the first and the last phone of an utterance. The states of silence do
    not depend on its neighbours.
    """

    context_width: int  # 1: states depend on the phone only; 3: also on its neighbours

    def __init__(self, phones: Sequence[str], states_per_phone: int = 3) -> None:
        if states_per_phone < 2:
            raise SpeechError(
                f"states_per_phone must be at least 2, got {states_per_phone}: "
                "with one state, a phone said twice and a long phone look the same"
            )
        if len(set(phones)) != len(phones) or not phones:
            raise SpeechError(f"phones must be distinct and begin with silence, got {tuple(phones)}")
        self.phones = tuple(phones)
        self.states_per_phone = states_per_phone
        self._number = {phone: i for i, phone in enumerate(self.phones)}

    @property
    @abstractmethod
    def num_states(self) -> int:
        """Number of states, which is the number of outputs of the network."""

    @property
    @abstractmethod
    def phone_of_state(self) -> Ints:
        """The phone of each state."""

    @property
    @abstractmethod
    def position_of_state(self) -> Ints:
        """The position 0 … n−1 of each state in its phone."""

    @abstractmethod
    def chains(self, left: ArrayLike, phone: ArrayLike, right: ArrayLike) -> Ints:
        """States of phones in context, shape (…, n)."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """A value for JSON; `tree.tying_from_json` is the inverse."""

    @property
    def silence(self) -> str:
        """The phone that may occur between words."""
        return self.phones[0]

    def number(self, phone: str) -> int:
        """The number of a phone. Raises SpeechError if it is unknown."""
        if phone not in self._number:
            raise SpeechError(unknown("phone", phone, self.phones))
        return self._number[phone]


class Monophones(Tying):
    """Every phone has its own n states, whatever its neighbours are."""

    context_width = 1

    @property
    def num_states(self) -> int:
        return len(self.phones) * self.states_per_phone

    @cached_property
    def phone_of_state(self) -> Ints:
        return np.arange(self.num_states, dtype=np.int32) // self.states_per_phone

    @cached_property
    def position_of_state(self) -> Ints:
        return np.arange(self.num_states, dtype=np.int32) % self.states_per_phone

    def chains(self, left: ArrayLike, phone: ArrayLike, right: ArrayLike) -> Ints:
        """States n·phone + (0 … n−1)."""
        n = self.states_per_phone
        chains: Ints = np.add.outer(np.asarray(phone) * n, np.arange(n)).astype(np.int32)
        return chains

    def to_json(self) -> dict[str, Any]:
        return {"kind": "monophones", "phones": list(self.phones), "states_per_phone": self.states_per_phone}


class Occurrences(NamedTuple):
    """The phones of one utterance in order: their numbers, and the first frame of each. They cover all frames."""

    phones: Ints
    starts: Ints
    num_frames: int

    @property
    def durations(self) -> Ints:
        """Number of frames of each phone."""
        return np.diff(self.starts, append=self.num_frames).astype(np.int32)

    @property
    def neighbours(self) -> tuple[Ints, Ints]:
        """The left and the right neighbour of each phone; silence outside the utterance."""
        padded = np.concatenate([[0], self.phones, [0]]).astype(np.int32)
        return padded[:-2], padded[2:]


def occurrences(phones: Segments, num_frames: int, tying: Tying) -> Occurrences:
    """Phone times in frames: frame t belongs to the segment that contains its centre (t + ½)·shift, else to silence."""
    start, duration = np.array(phones.starts_s), np.array(phones.durations_s)
    # The last element is for index −1: frames before the first segment, or in a gap.
    number = np.array([*(tying.number(phone) for phone in phones.symbols), 0], dtype=np.int32)
    centre = (np.arange(num_frames) + 0.5) * FRAME_SHIFT_S
    owner = np.searchsorted(start, centre, side="right") - 1
    if len(phones):
        owner[(owner >= 0) & (centre >= (start + duration)[owner])] = -1
    phone = number[owner]
    both_silent = (phone[1:] == 0) & (phone[:-1] == 0)
    begins = np.flatnonzero(np.concatenate([[num_frames > 0], (np.diff(owner) != 0) & ~both_silent]))
    return Occurrences(phone[begins], begins.astype(np.int32), num_frames)


def state_labels(found: Occurrences, tying: Tying) -> Ints:
    """The state of each frame. Frame i of the d frames of a phone gets position ⌊n(i + ½)/d⌋."""
    left, right = found.neighbours
    durations = found.durations
    which = np.repeat(np.arange(len(found.phones)), durations)
    frame_in_phone = np.arange(found.num_frames) - found.starts[which]
    position = tying.states_per_phone * (2 * frame_in_phone + 1) // (2 * durations[which])
    labels: Ints = tying.chains(left, found.phones, right)[which, position]
    return labels


def frame_labels(phones: Segments, num_frames: int, tying: Tying) -> Ints:
    """State labels of an utterance from its phone times. Frames outside all segments are silence.

    >>> alignment = Segments(("T", "AH"), (0.0, 0.03), (0.03, 0.04))
    >>> frame_labels(alignment, 10, Monophones(("SIL", "AH", "T"))).tolist()
    [6, 7, 8, 3, 4, 4, 5, 0, 1, 2]
    """
    return state_labels(occurrences(phones, num_frames, tying), tying)


def phones_in(labels_T: ArrayLike, tying: Tying) -> Occurrences:
    """The inverse of `state_labels`. A phone begins where the phone changes or the position decreases.

    >>> phones_in([6, 7, 8, 6, 8, 3, 4], Monophones(("SIL", "AH", "T"))).phones.tolist()
    [2, 2, 1]
    """
    labels = np.asarray(labels_T, dtype=np.int64)
    phone, position = tying.phone_of_state[labels], tying.position_of_state[labels]
    begins = np.flatnonzero(
        np.concatenate([[len(labels) > 0], (np.diff(phone) != 0) | (np.diff(position) < 0)]),
    )
    return Occurrences(phone[begins].astype(np.int32), begins.astype(np.int32), len(labels))


def phone_segments(labels_T: ArrayLike, tying: Tying) -> Segments:
    """Phone times, in seconds, of a state alignment."""
    found = phones_in(labels_T, tying)
    rows = zip(found.phones.tolist(), found.starts.tolist(), found.durations.tolist(), strict=True)
    return segments((tying.phones[i], round(t * FRAME_SHIFT_S, 6), round(d * FRAME_SHIFT_S, 6)) for i, t, d in rows)


def log_priors(labels: Iterable[ArrayLike], num_states: int) -> Floats:
    """ln p(s). One frame is added to each state, so that states without frames stay finite."""
    smoothed = np.ones(num_states)
    for labels_T in labels:
        smoothed += np.bincount(np.asarray(labels_T), minlength=num_states)
    priors: Floats = np.log(smoothed / smoothed.sum()).astype(np.float32)
    return priors


def self_loops(labels: Iterable[ArrayLike], num_states: int) -> Floats:
    """a_s, the probability of staying in state s, from the mean duration 1 / (1 − a_s) of its visits.

    One visit of two frames is added to each state, so that a_s is never 0 or 1, and ½ for a state without frames.
    """
    visits, frames = np.ones(num_states), np.full(num_states, 2.0)
    for labels_T in labels:
        states = np.asarray(labels_T)
        frames += np.bincount(states, minlength=num_states)
        first = np.concatenate([[True], np.diff(states) != 0])[: len(states)]
        visits += np.bincount(states[first], minlength=num_states)
    loops: Floats = (1 - visits / frames).astype(np.float32)
    return loops
