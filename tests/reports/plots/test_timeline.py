"""The timelines of the documentation say what the strategies do."""

from __future__ import annotations

import itertools

import pytest

from roundelay.reports.plots.timeline import plot_timeline, timeline
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne
from roundelay.topology import random_ring

STEP_S = [3.0, 1.0, 1.0, 1.0]


def steps_done(strategy_of, until_s=12.0):
    return [sum(end <= until_s for _, end in bars) for bars in timeline(strategy_of, STEP_S, until_s)]


def test_adpsgd_waits_for_nobody():
    assert steps_done(lambda: ADPSGD(random_ring(4))) == [4, 12, 12, 12]


@pytest.mark.parametrize("strategy_of", [Allreduce, DelayByOne, lambda: DPSGD(random_ring(4))])
def test_synchronous_strategies_end_up_at_the_pace_of_the_slowest(strategy_of):
    slowest, *others = steps_done(strategy_of)
    assert slowest <= 4
    assert max(others) <= slowest + 2


def test_bars_of_a_learner_do_not_overlap():
    for bars in timeline(DelayByOne, STEP_S, 12.0):
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(bars))


def test_the_picture(tmp_path):
    plot_timeline(Allreduce, STEP_S, tmp_path / "timeline.svg")
    text = (tmp_path / "timeline.svg").read_text()
    assert text.count("<!-- learner") == 4 or "learner 3" in text
