"""Speakers of validation and test do not occur in training."""

from __future__ import annotations

from itertools import combinations

from roundelay.speech.synth.speakers import SPEAKERS, VARIANTS, speaker


def test_voices_of_the_splits_are_disjoint():
    for one, other in combinations(VARIANTS, 2):
        assert not set(VARIANTS[one]) & set(VARIANTS[other])
    for split, count in SPEAKERS.items():
        people = [speaker(split, number, seed=1) for number in range(count)]
        assert len({person.voice for person in people}) == count
        assert {person.voice.name.split("+")[1] for person in people} == set(VARIANTS[split])


def test_a_speaker_is_the_same_whenever_asked_for_and_another_with_another_seed():
    assert speaker("train", 3, seed=1) == speaker("train", 3, seed=1)
    assert speaker("train", 3, seed=1) != speaker("train", 3, seed=2)
