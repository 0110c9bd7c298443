"""Where a learner is in a run, and what it does at checkpoint boundaries."""

from __future__ import annotations

from hypothesis import given, strategies as st
from runs import tiny_config

from roundelay.cluster.environment import World
from roundelay.training.data import Draw
from roundelay.training.partition import Partition, Position


def partition_of(rank, size):
    world = World(rank, size, rank, size)
    return Partition.of(tiny_config(learners=4, data={"batch": 20}), world, 1300, rank, synchronous=True)


@given(start=st.integers(0, 500), steps=st.integers(0, 60), learners=st.integers(1, 5), more=st.integers(1, 80))
def test_after_a_meeting_learners_with_any_past_reach_the_same_boundaries_in_lockstep(start, steps, learners, more):
    """One learner has trained and is ahead, one has just joined and knows nothing of the run."""
    ahead, newcomer = (Position(partition_of(0, 4)) for _ in range(2))
    for number in range(steps):
        ahead.advance(Draw(number, number))
    for position in (ahead, newcomer):
        position.partition = partition_of(0, learners)
        position.restart_at(start)
    chunk = Draw(0, 0)
    passed = [[position.advance(chunk) for _ in range(more)] for position in (ahead, newcomer)]
    assert passed[0] == passed[1]
    assert ahead.samples_before_step(chunk) == newcomer.samples_before_step(chunk)
    assert ahead.done == newcomer.done == start + more * learners


def test_a_learner_that_restarts_passes_no_boundary_that_lies_before_its_start():
    position = Position(partition_of(0, 4))  # 65 chunks an epoch, one checkpoint an epoch
    position.restart_at(64)
    assert position.advance(Draw(64, 64)) == 68
    position.restart_at(68)
    assert position.advance(Draw(68, 68)) is None
