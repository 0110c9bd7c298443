"""Phone times from the events of espeak-ng."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roundelay.errors import DataError
from roundelay.speech.synth.espeak import Event, Sound

SHORTEST_S = 0.03  # the three states of a phone need three frames
QUIET = 20  # of 32768; the closure of a stop is silent except for ringing filters
LINKING = (";", "r-")  # sounds that espeak-ng inserts between two vowels; they belong to the first vowel


def phone_spans(sound: Sound, events: Sequence[Event], phones: int, rate_Hz: int) -> list[tuple[float, float]]:
    """Start and end of each phone in seconds, with possible pauses between phones.

    Events are given for audible onsets. The silent closure of a stop, which comes before its event, belongs to the stop.
    Raises DataError if espeak-ng spoke another number of phonemes.
    """
    spans: list[tuple[int, int]] = []
    open_at: int | None = None  # start of the current phone
    bound, paused = 0, True  # the next phone cannot begin before `bound`
    for event in events:
        if event.name == "":
            bound = event.sample if paused else bound
        elif event.name not in LINKING:
            silence = event.name == "end" or event.name.startswith("_")
            onset = event.sample if silence else _before_silence(sound, bound, event.sample)
            if open_at is not None:
                spans.append((open_at, onset))
            open_at, bound, paused = (None if silence else onset), event.sample, silence
    if len(spans) != phones:
        raise DataError(f"espeak-ng spoke {len(spans)} phonemes where {phones} were written")
    return [(start / rate_Hz, end / rate_Hz) for start, end in _lengthened(spans, round(SHORTEST_S * rate_Hz))]


def _before_silence(sound: Sound, first: int, last: int) -> int:
    """The beginning of the silence that ends at `last`, at the earliest `first`."""
    loud = np.flatnonzero(np.abs(sound[first:last].astype(np.int32)) > QUIET)
    return first + int(loud[-1]) + 1 if len(loud) else first


def _lengthened(spans: list[tuple[int, int]], shortest: int) -> list[tuple[int, int]]:
    """Spans of at least `shortest`. A shorter one takes from its longer neighbour: a final l is often part of its vowel."""
    starts, ends = [span[0] for span in spans], [span[1] for span in spans]
    for i in range(len(spans)):
        lack = shortest - (ends[i] - starts[i])
        if lack <= 0:
            continue
        spare_before = ends[i - 1] - starts[i - 1] - shortest if i and ends[i - 1] == starts[i] else 0
        after = i + 1 < len(spans) and starts[i + 1] == ends[i]
        spare_after = ends[i + 1] - starts[i + 1] - shortest if after else 0
        if spare_before >= spare_after and spare_before > 0:
            starts[i] -= min(lack, spare_before)
            ends[i - 1] = starts[i]
        elif spare_after > 0:
            ends[i] += min(lack, spare_after)
            starts[i + 1] = ends[i]
    return list(zip(starts, ends, strict=True))
