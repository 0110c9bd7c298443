"""Phone times of a signal whose sounds and silences are known to the sample."""

from __future__ import annotations

import numpy as np
import pytest

from roundelay.errors import DataError
from roundelay.speech.synth.espeak import Event
from roundelay.speech.synth.timing import phone_spans

RATE_Hz = 1000


def sound(*pieces):
    """(length, loud?) pieces at one sample per millisecond."""
    return np.concatenate([np.full(length, 5000 if loud else 0, np.int16) for length, loud in pieces])


def spans_ms(samples, events, phones):
    spans = phone_spans(samples, [Event(*event) for event in events], phones, RATE_Hz)
    return [(round(start * 1000), round(end * 1000)) for start, end in spans]


def test_a_closure_belongs_to_the_stop_that_follows_it():
    heard = sound((100, True), (40, False), (60, True))
    assert spans_ms(heard, [(0, ""), (0, "'I"), (140, "k"), (200, "end")], 2) == [(0, 100), (100, 200)]


def test_a_pause_belongs_to_no_phone_but_the_closure_after_it_does():
    heard = sound((100, True), (90, False), (60, True))
    events = [(0, ""), (0, "s"), (100, ""), (100, "_:"), (150, ""), (190, "t"), (250, "_"), (250, "end")]
    assert spans_ms(heard, events, 2) == [(0, 100), (150, 250)]


def test_a_word_event_inside_running_speech_changes_nothing():
    heard = sound((100, True), (30, False), (70, True))
    assert spans_ms(heard, [(0, ""), (0, "s"), (110, ""), (130, "t"), (200, "end")], 2) == [(0, 100), (100, 200)]


def test_the_first_stop_has_its_closure():
    heard = sound((48, False), (52, True))
    assert spans_ms(heard, [(0, ""), (48, "t"), (100, "end")], 1) == [(0, 100)]


def test_a_phone_without_time_gets_thirty_milliseconds_from_its_longer_neighbour():
    heard = sound((200, True))
    assert spans_ms(heard, [(0, ""), (0, "@"), (120, "l"), (120, "z"), (200, "end")], 3) == [
        (0, 90),
        (90, 120),
        (120, 200),
    ]
    assert spans_ms(heard, [(0, ""), (0, "b"), (10, "i:"), (200, "end")], 2) == [(0, 30), (30, 200)]


@pytest.mark.parametrize("linking", [";", "r-"])
def test_a_linking_sound_belongs_to_the_vowel_before_it(linking):
    events = [(0, ""), (0, "i:"), (80, linking), (100, "eI"), (200, "end")]
    assert spans_ms(sound((200, True)), events, 2) == [(0, 100), (100, 200)]


def test_another_number_of_phonemes_than_was_written_is_an_error():
    with pytest.raises(DataError, match="spoke 1 phonemes where 2 were written"):
        spans_ms(sound((100, True)), [(0, ""), (0, "s"), (100, "end")], 2)
