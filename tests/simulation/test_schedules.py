"""Random interleavings of steps, exchanges and deaths: what must hold for every strategy under every schedule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from worlds import train, weights, world

from roundelay.errors import PeerLostError
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne, SuperLearner
from roundelay.topology import named

STEPS = st.integers(1, 6)
TOPOLOGY = st.sampled_from(["ring", "random-ring", "complete", "random-matching", "base-graph"])


@st.composite
def schedules(draw, sizes=(2, 3, 4, 6)):
    """The number of learners, the steps of each, the time of every step, and the latency of the network."""
    size = draw(st.sampled_from(sizes))
    pace = draw(st.lists(st.floats(0.01, 3.0), min_size=size * 6, max_size=size * 6))
    return {
        "size": size,
        "steps": draw(st.lists(STEPS, min_size=size, max_size=size)),
        "compute_s": lambda rank, step: pace[rank * 6 + step % 6],
        "latency_s": draw(st.sampled_from([0.0, 0.01, 0.7, 5.0])),
    }


def strategy_of(name, size, topology):
    mixing = named(topology, size, seed=1)
    builders = {
        "allreduce": Allreduce,
        "dpsgd": lambda: DPSGD(mixing),
        "adpsgd": lambda: ADPSGD(mixing, max_lead=3),
        "delay-by-one": DelayByOne,
        "delay-by-one of gradients": lambda: DelayByOne(delayed="gradients"),
        "super-learner": lambda: SuperLearner(ADPSGD(named(topology, size // 2, seed=1), max_lead=3), group_size=2),
    }
    return builders[name]


def run(name, schedule, topology, *, lr=0.05, kill=None, steps=None):
    build = strategy_of(name, schedule["size"], topology)
    clock, network, learners = world(
        [build() for _ in range(schedule["size"])],
        compute_s=schedule["compute_s"],
        latency_s=schedule["latency_s"],
        lr=lr,
        momentum=0.0,
    )
    train(clock, network, learners, steps or schedule["steps"], kill)
    return clock, learners


@pytest.mark.parametrize("name", ["allreduce", "dpsgd", "adpsgd", "delay-by-one", "delay-by-one of gradients"])
@settings(max_examples=25)
@given(schedule=schedules(), topology=TOPOLOGY)
def test_unequal_learners_all_finish(name, schedule, topology):
    run(name, schedule, topology)  # DeadlockError if a learner waits forever


@settings(max_examples=25)
@given(schedule=schedules(sizes=(4, 6)), steps=STEPS, topology=TOPOLOGY)
def test_super_learners_all_finish_and_members_of_a_group_end_equal(schedule, steps, topology):
    _, learners = run("super-learner", schedule, topology, steps=[steps] * schedule["size"])
    X = weights(learners)
    np.testing.assert_array_equal(X[::2], X[1::2])


@settings(max_examples=60)
@given(schedule=schedules(), topology=TOPOLOGY)
def test_exchanges_conserve_the_sum_under_every_schedule(schedule, topology):
    # Sum of weights = sum of initial weights (zero) - lr * sum of all gradients.
    build = strategy_of("adpsgd", schedule["size"], topology)
    clock, network, learners = world(
        [build() for _ in range(schedule["size"])],
        compute_s=schedule["compute_s"],
        latency_s=schedule["latency_s"],
        momentum=0.0,
    )
    total = np.zeros(12)
    for learner in learners:
        taken = learner.gradient

        def gradient(step, taken=taken, module=learner.module):
            taken(step)
            total[:] += np.concatenate([weight.grad.numpy() for weight in module.parameters()])

        learner.gradient = gradient
    train(clock, network, learners, schedule["steps"])
    np.testing.assert_allclose(weights(learners).sum(axis=0), -0.05 * total, rtol=0, atol=1e-12)


@settings(max_examples=40)
@given(schedule=schedules(), topology=TOPOLOGY)
def test_no_learner_leads_by_more_than_max_lead_while_it_has_a_neighbour(schedule, topology):
    _, learners = run("adpsgd", schedule, topology)
    for learner in learners:
        metrics = learner.strategy.metrics()
        if not metrics["peers_lost"]:
            assert metrics["lead_max"] <= 3


@settings(max_examples=40)
@given(schedule=schedules(), topology=TOPOLOGY, victim=st.integers(0, 5), at=st.floats(0.0, 6.0))
def test_asynchronous_learners_finish_after_any_death(schedule, topology, victim, at):
    victim %= schedule["size"]
    _, learners = run("adpsgd", schedule, topology, kill={victim: at})
    for rank, learner in enumerate(learners):
        if rank != victim:
            assert learner.strategy._counts.steps == schedule["steps"][rank]


@pytest.mark.parametrize("name", ["allreduce", "dpsgd", "delay-by-one"])
@settings(max_examples=25)
@given(schedule=schedules(sizes=(3, 4)), victim=st.integers(0, 3), at=st.floats(0.0, 6.0))
def test_a_death_among_synchronous_learners_is_an_error_that_names_the_dead_learner_or_comes_too_late(
    name, schedule, victim, at
):
    victim %= schedule["size"]
    with pytest.raises(PeerLostError, match=f"lost learner {victim}:"):  # noqa: PT012
        run(name, schedule, "complete", kill={victim: at})
        raise PeerLostError(victim, "too late")


@pytest.mark.parametrize("name", ["allreduce", "dpsgd", "adpsgd", "delay-by-one"])
@settings(max_examples=10)
@given(schedule=schedules(), topology=TOPOLOGY)
def test_equal_schedules_give_equal_bits(name, schedule, topology):
    np.testing.assert_array_equal(weights(run(name, schedule, topology)[1]), weights(run(name, schedule, topology)[1]))
