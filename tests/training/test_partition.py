"""Where a learner is in a run, and what it does at checkpoint boundaries."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from runs import tiny_config

from roundelay.cluster.environment import World
from roundelay.errors import ConfigError
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


@pytest.mark.parametrize(
    ("batch", "members", "message"),
    [
        (1301, 1, "data.batch 1301 is more than the 1300 samples of the task; use at most 1300"),
        (
            400,
            4,
            "data.batch 400 of each of 4 learners in a group is more than the 1300 samples of the task; use at most 325",
        ),
    ],
)
def test_a_batch_that_is_larger_than_the_data_is_refused(batch, members, message):
    config = tiny_config(learners=4, group_size=members, strategy="dpsgd", data={"batch": batch})
    with pytest.raises(ConfigError, match=message):
        Partition.of(config, World(0, 4, 0, 4), 1300, 0, synchronous=True)


def test_a_batch_of_all_samples_is_one_chunk():
    part = Partition.of(tiny_config(data={"batch": 1300}), World(0, 4, 0, 4), 1300, 0, synchronous=True)
    assert part.chunks.per_epoch == 1
