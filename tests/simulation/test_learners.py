import numpy as np
import pytest
from worlds import problem, weights, world

from roundelay.simulation import run
from roundelay.simulation.learners import seconds_per_step
from roundelay.simulation.network import Links
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne
from roundelay.topology import ring


def test_gradients_are_computed_at_the_start_of_the_compute_time_and_applied_at_its_end():
    clock, _, learners = world([DPSGD(ring(1))], compute_s=lambda rank, step: 2.0, momentum=0.0, lr=0.1)
    clock.spawn(learners[0].process(3))
    H, targets = problem(1)
    X = np.zeros_like(targets)
    for step in range(3):
        clock.run(until=2.0 * step + 1.9)
        np.testing.assert_allclose(weights(learners), X, rtol=0, atol=1e-12)
        X = X - 0.1 * H * (X - targets)
    clock.run()
    np.testing.assert_allclose(weights(learners), X, rtol=0, atol=1e-12)


def test_a_synchronous_run_takes_as_long_as_its_slowest_learner():
    clock, _, learners = world([DPSGD(ring(3)) for _ in range(3)], compute_s=lambda r, _: 1.0 + r, latency_s=0.0)
    run(clock, learners, 10)
    assert clock.now() == pytest.approx(30.0)


def test_asynchronous_learners_do_not_wait_for_slower_ones():
    ends = {}
    clock, _, learners = world([ADPSGD(ring(3)) for _ in range(3)], compute_s=lambda r, _: 1.0 + r, latency_s=0.01)
    for rank, learner in enumerate(learners):
        ended = clock.spawn(learner.process(10))
        ended.add_done_callback(lambda _, rank=rank: ends.setdefault(rank, clock.now()))
    clock.run()
    assert [ends[rank] for rank in range(3)] == [pytest.approx(10.0 * (1 + rank), abs=0.05) for rank in range(3)]


def test_a_step_takes_as_long_as_that_of_the_slowest_learner_plus_the_communication_that_is_not_hidden():
    links = Links(bandwidth_Bps=1.0)
    assert seconds_per_step(DelayByOne, links, 0.3, [1.0, 2.0, 1.0]) == pytest.approx(2.0)
    assert seconds_per_step(Allreduce, links, 0.3, [1.0, 2.0, 1.0]) == pytest.approx(2.0 + 2 * 2 * 0.1)
