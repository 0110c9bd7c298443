"""Verdicts follow from data: the same rule gives each of the three verdicts, depending on its numbers."""

from __future__ import annotations

import numpy as np
import pytest

from roundelay.papers import Finding, large_batches, stragglers
from roundelay.papers.large_batches import ALLREDUCE, CLAIMED, CONTROLS, SCALED, STEPS, WAYS

LOOKS = STEPS // large_batches.LOOK_EVERY


def straggling(asynchronous: float, synchronous: float) -> Finding:
    """Every strategy takes 30 s without a straggler; with the slowest one it takes the given factor longer, on three seeds."""
    slowest = dict.fromkeys(stragglers.ASYNCHRONOUS, asynchronous) | dict.fromkeys(stragglers.SYNCHRONOUS, synchronous)
    seconds = {
        (name, size): [[30.0, 30.0, 30.0, 30.0 * factor]] * 3 for name, factor in slowest.items() for size in (16, 64)
    }
    return stragglers._finding(seconds, {factor: [0.5, 0.5, 0.5] for factor in stragglers.FACTORS})


@pytest.mark.parametrize(
    ("asynchronous", "synchronous", "verdict"),
    [
        (1.1, 95.0, "reproduced"),
        (1.1, 1.2, "not reproduced"),  # the synchronous strategies do not stall
        (80.0, 95.0, "not reproduced"),  # ADPSGD does not cope
        (5.0, 95.0, "inconclusive"),
    ],
)
def test_stragglers(asynchronous, synchronous, verdict):
    assert straggling(asynchronous, synchronous).verdict == verdict


def batches(area_of) -> Finding:
    """A finding from `area_of(way, setting)` on three seeds; the seeds shift all areas equally."""
    runs = {
        (name, setting): [
            large_batches._Run([area_of(name, setting) + shift] * LOOKS, 0.5) for shift in (0.0, 0.1, 0.2)
        ]
        for name in WAYS
        for setting in SCALED
    }
    return large_batches._finding(runs)


def test_large_batches_holds_when_decentralised_learners_beat_every_remedy():
    finding = batches(lambda name, setting: 1.0 if name in CLAIMED and setting == SCALED[1] else 2.0)
    assert finding.verdict == "reproduced"
    assert "survives every control at: batch 1024, 1 x" in finding.sentence


def test_large_batches_fails_when_a_remedy_does_as_well():
    finding = batches(lambda name, setting: 2.0 if name == ALLREDUCE else 1.0)
    assert finding.verdict == "not reproduced"
    assert "Nowhere does that survive the controls" in finding.sentence


def test_large_batches_fails_when_allreduce_is_ahead_everywhere():
    assert batches(lambda name, setting: 1.0 if name in (ALLREDUCE, *CONTROLS) else 2.0).verdict == "not reproduced"


def test_large_batches_is_inconclusive_when_seeds_disagree():
    rng = np.random.default_rng(0)
    runs = {
        (name, setting): [large_batches._Run([5.0 + rng.normal()] * LOOKS, 0.5) for _ in range(3)]
        for name in WAYS
        for setting in SCALED
    }
    finding = large_batches._finding(runs)
    assert finding.verdict == "inconclusive"
    assert "Nowhere is it certain" in finding.sentence
