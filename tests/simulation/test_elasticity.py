"""ADPSGD on the virtual clock while learners die, are cut off, come back and join; the test tells them the membership."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from exchanges import calling
from hypothesis import given, settings, strategies as st
from worlds import Quadratic, problem, weights, world

from roundelay.cluster.membership import Membership
from roundelay.simulation.learners import VirtualLearner
from roundelay.strategies import ADPSGD
from roundelay.topology import family

TOLD_S = 0.05  # from a change of the membership until the learners are told


def jitter(rank, step):
    """Unequal step times: in lockstep every learner is called while it calls, and a ring of pairs does not contract."""
    return random.Random(f"{rank} {step}").uniform(0.6, 1.4)


class Training:
    """Learners on quadratics; a learner may join, be killed or be cut off at any time."""

    def __init__(self, size, topology="random-ring", *, lr=0.05, compute_s=jitter, seed=0):
        self.topology, self.lr, self.compute_s = topology, lr, compute_s
        strategies = [self.strategy() for _ in range(size)]
        self.clock, self.network, self.learners = world(strategies, compute_s=compute_s, lr=lr, momentum=0.0, seed=seed)
        self.living, self.processes, self.dead_sum = set(range(size)), {}, np.zeros(12)
        self.joined_sum = np.zeros(12)
        self.updates = np.zeros(12)

    def strategy(self):
        return ADPSGD(family(self.topology, seed=1), max_lead=4)

    def start(self, steps):
        self.steps = steps
        for learner in self.learners:
            self._spawn(learner)

    def _spawn(self, learner):
        rank = learner.transport.rank
        self._count_updates(learner)
        process = learner.process(self.steps)
        self.processes[rank] = self.clock.spawn(process, f"learner {rank}"), process

    def _count_updates(self, learner):
        taken, module = learner.gradient, learner.module

        def gradient(step):
            taken(step)
            self.updates -= self.lr * np.concatenate([weight.grad.numpy() for weight in module.parameters()])

        learner.gradient = gradient

    def kill(self, rank, at):
        def dies():
            if rank not in self.living or self.processes[rank][0].done():
                return
            self.living.discard(rank)
            self.dead_sum += vector(self.learners[rank].strategy.weights())
            self.clock.kill(*self.processes[rank])
            self.network.lose(rank, "its process ended")
            self.clock.call_later(TOLD_S, self.tell)

        self.clock.call_later(at, dies)

    def tell(self):
        """Tell all living learners the membership, as a rendezvous does."""
        membership = Membership(tuple(sorted(self.living)), 1)
        for rank in self.living:
            if not self.processes[rank][0].done():
                self.learners[rank].strategy.reform(membership)

    def join(self, at):
        """Add a learner with the weights of a living one, then tell all learners."""

        def comes():
            donors = [rank for rank in sorted(self.living) if not self.processes[rank][0].done()]
            if not donors:
                return
            start = vector(self.learners[donors[0]].strategy.weights())
            transport = self.network.add()
            self.living.add(transport.rank)
            H, targets = problem(transport.rank + 1)
            module = Quadratic(torch.tensor(H[-1]), torch.tensor(targets[-1]))
            fill(module, start)
            optimizer = torch.optim.SGD(module.parameters(), lr=self.lr)

            def gradient(step):
                optimizer.zero_grad()
                module().backward()

            learner = VirtualLearner(
                module,
                optimizer,
                self.strategy(),
                transport,
                gradient,
                lambda step: jitter(transport.rank, step),
                Membership(tuple(sorted(self.living)), 1),
            )
            self.learners.append(learner)
            self.joined_sum += start
            self._spawn(learner)
            self.clock.call_later(TOLD_S, self.tell)

        self.clock.call_later(at, comes)


def vector(flat):
    return np.concatenate([view.numpy().ravel() for view in flat.views]).astype(float)


def fill(module, values):
    at = 0
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.from_numpy(values[at : at + weight.numel()]).view_as(weight))
            at += weight.numel()


def between_sides(learners):
    X = weights(learners)
    return float(np.linalg.norm(X[:2].mean(axis=0) - X[2:].mean(axis=0)))


def test_the_neighbours_of_a_dead_learner_on_a_ring_become_neighbours():
    training = Training(5, "ring")
    training.start(60)
    training.kill(2, at=5.5)
    training.clock.run()
    survivors = [training.learners[rank] for rank in (0, 1, 3, 4)]
    for rank, other in ((1, 3), (3, 1)):  # 1 and 3 were not neighbours before
        assert training.learners[rank].strategy.metrics()[f"exchanges_with_{other}"] > 0
    assert all(learner.strategy._counts.steps == 60 for learner in survivors)


def test_after_a_partition_both_sides_converge_to_one_consensus():
    training = Training(4, "ring", lr=0.02)
    training.start(400)
    across = [(a, b) for a in (0, 1) for b in (2, 3)]
    for a, b in across:
        training.network.cut(a, b, at=5.0)
        training.network.mend(a, b, at=200.0)
    apart = []
    training.clock.call_later(190.0, lambda: apart.append(between_sides(training.learners)))
    training.clock.call_later(200.0 + TOLD_S, training.tell)
    training.clock.run()
    assert apart[0] > 5 * between_sides(training.learners)  # two means before, one mean after
    lost = [learner.strategy.metrics()["exchanges_failed"] for learner in training.learners]
    assert sum(lost) > 0


def test_a_joining_learner_knows_which_learners_are_lost():
    training = Training(3)
    training.network.lose(1, "its process ended")
    new = training.network.add()
    assert new.call(1, calling(torch.zeros(4))).exception().peer == 1


def test_a_learner_that_joins_starts_and_serves_exchanges():
    training = Training(3, "ring")
    training.start(40)
    training.join(at=10.2)
    training.clock.run()
    new = training.learners[3].strategy.metrics()
    assert new["exchanges_finished"] > 10
    assert new["exchanges_served"] > 10
    assert training.learners[3].strategy._counts.steps == 40


FAULTS = st.lists(st.tuples(st.sampled_from(["kill", "join"]), st.floats(0.5, 18.0), st.integers(0, 7)), max_size=6)


@settings(max_examples=25)
@given(size=st.integers(2, 5), topology=st.sampled_from(["ring", "random-ring", "complete"]), faults=FAULTS)
def test_all_living_learners_finish_whichever_learners_die_or_join(size, topology, faults):
    training = Training(size, topology)
    training.start(15)
    for kind, at, which in faults:
        training.kill(which % size, at) if kind == "kill" else training.join(at)
    training.clock.run()  # DeadlockError if a learner waits forever
    for rank in training.living:
        assert training.learners[rank].strategy._counts.steps == 15


@pytest.mark.parametrize("seed", range(20))
def test_the_sum_of_weights_changes_only_by_updates_joins_and_exchanges_that_a_death_cuts(seed):
    """Living + dead at death = initial + updates + joined (sums of weights), except for exchanges cut by a death."""
    draw = random.Random(seed)
    size = draw.randint(3, 6)
    training = Training(size)
    training.start(25)
    for _ in range(draw.randint(0, 2)):
        training.join(draw.uniform(2.0, 15.0))
    deaths = draw.sample(range(size), draw.randint(0, size - 2))
    for victim in deaths:
        training.kill(victim, draw.uniform(2.0, 20.0))
    training.clock.run()
    living = sum(vector(training.learners[rank].strategy.weights()) for rank in training.living)
    balance = np.abs(living + training.dead_sum - training.joined_sum - training.updates).max()
    cut = sum(learner.strategy.metrics()["exchanges_failed"] for learner in training.learners) + len(deaths)
    # An exchange that a death cuts leaves half of a difference behind; a difference is smaller than the targets.
    assert balance <= (1e-9 if not deaths else 2.0 * cut)
