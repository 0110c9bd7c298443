"""Learners of an elastic run in their own loop: real sockets, one thread each, and learners that die, freeze, return and join."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from roundelay import ADPSGD, DPSGD, Allreduce, DelayByOne, Learner, LocalSGD, Rendezvous, join
from roundelay.errors import LaunchError, MissingLearnersError, StrategyError

STRATEGIES = {
    "adpsgd": ADPSGD,
    "dpsgd": DPSGD,
    "allreduce": Allreduce,
    "delay-by-one": DelayByOne,
    "delay-by-one-gradients": lambda: DelayByOne("gradients"),
    "local-sgd": lambda: LocalSGD(every=4),
    "local-sgd-pairs": lambda: LocalSGD("random-matching", every=3, overlap=True),
    "local-sgd-top-k": lambda: LocalSGD(every=4, compress="top-k"),
}
PATIENCE_S = 60.0
FOR_EVER = 10**9


class DeathError(Exception):
    """Ends a learner in the middle of its loop."""


def nothing(loop):
    pass


class Loop:
    """A user's loop in a thread: it steps until all have taken `steps`, then looks at the consensus."""

    def __init__(self, ticket, learner, strategy, *, steps=40, on_step=nothing, look=None, seed=None):
        self.ticket, self.id, self.strategy, self.total = ticket, learner, strategy, steps
        self.on_step, self.look, self.seed = on_step, look, learner if seed is None else seed
        self.error: BaseException | None = None
        self.own = self.mean = self.seen = None
        self.taken = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            self._train()
        except BaseException as error:
            self.error = error
            self.world.close("its process ended")

    def _train(self):
        world = self.world = join(self.ticket, self.id)
        torch.manual_seed(self.seed)
        self.module = nn.Linear(3, 2, dtype=torch.float64)
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)
        with Learner(self.module, optimizer, self.strategy(), world=world) as self.learner:
            rng = torch.Generator().manual_seed(self.id)
            self.first = flat(self.module)
            while self.learner.steps < self.total:
                x = torch.randn(8, 3, generator=rng, dtype=torch.float64)
                (self.module(x) - self.id).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                self.taken += 1
                time.sleep(0.01)
                self.on_step(self)
            self.learner.finish()
            live = self.learner.strategy.weights()
            self.own = flat(self.module) if live is None else live.parts[0].numpy().copy()
            self.weight = self.learner.strategy.consensus_weight
            with self.learner.consensus() as mean:
                self.mean, self.members = flat(mean), self.learner.members
            if self.look:
                self.look(self)

    def join(self):
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"learner {self.id} hangs"
        if self.error is not None and not isinstance(self.error, DeathError):
            raise self.error
        return self


def flat(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach().numpy().copy()


def dies_at(step):
    def look(loop):
        if loop.taken == step:
            raise DeathError

    return look


def end_after(loop, steps, loops):
    """Let all loops end, at the same step, some time after `loop` has taken so many."""
    deadline = time.monotonic() + PATIENCE_S
    while loop.taken < steps and time.monotonic() < deadline and loop.error is None:
        time.sleep(0.01)
    total = max(each.learner.steps for each in loops) + 20
    for each in loops:
        each.total = total
    for each in loops:
        each.join()


def check_consensus(loops):
    """All learners saw the same mean, and it is the mean of their own weights."""
    expected = np.mean([loop.own for loop in loops], axis=0)
    for loop in loops:
        np.testing.assert_array_equal(loop.mean, loops[0].mean)
    np.testing.assert_allclose(loops[0].mean, expected, rtol=1e-12)


@pytest.mark.parametrize("name", STRATEGIES)
def test_all_begin_with_the_weights_of_the_first_learner_and_the_consensus_is_their_mean(name):
    with Rendezvous(learners=3) as rendezvous:
        loops = [Loop(rendezvous.ticket, learner, STRATEGIES[name], steps=10) for learner in range(3)]
        for loop in loops:
            loop.join()
    for loop in loops:
        np.testing.assert_array_equal(loop.first, loops[0].first)
        assert not loop.learner.joined
    check_consensus(loops)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_learner_that_dies_is_left_out_and_one_that_joins_takes_the_state_of_the_others(name):
    with Rendezvous(learners=3) as rendezvous:
        loops = [Loop(rendezvous.ticket, learner, STRATEGIES[name], steps=FOR_EVER) for learner in (0, 2)]
        dead = Loop(rendezvous.ticket, 1, STRATEGIES[name], on_step=dies_at(15))
        dead.join()
        joined = Loop(rendezvous.ticket, 1, STRATEGIES[name], steps=FOR_EVER, seed=99)
        loops.append(joined)
        end_after(joined, 5, loops)
    assert isinstance(dead.error, DeathError)
    assert joined.learner.joined
    assert joined.learner.steps > joined.taken + 10  # it continued the count of the others
    check_consensus(loops)


@pytest.mark.parametrize("name", STRATEGIES)
def test_learner_zero_is_a_learner_like_any_other(name):
    with Rendezvous(learners=3) as rendezvous:
        dead = Loop(rendezvous.ticket, 0, STRATEGIES[name], on_step=dies_at(10))
        loops = [Loop(rendezvous.ticket, learner, STRATEGIES[name], steps=30) for learner in (1, 2)]
        for loop in [dead, *loops]:
            loop.join()
    check_consensus(loops)


@pytest.mark.parametrize("name", ["adpsgd", "dpsgd", "allreduce"])
def test_a_learner_that_dies_before_its_first_step_is_left_out(name):
    def strategy():
        raise DeathError  # after it has registered

    with Rendezvous(learners=3) as rendezvous:
        loops = [Loop(rendezvous.ticket, learner, STRATEGIES[name], steps=10) for learner in (0, 1)]
        dead = Loop(rendezvous.ticket, 2, strategy)
        dead.join()
        for loop in loops:
            loop.join()
    check_consensus(loops)


@pytest.mark.parametrize("name", ["adpsgd", "dpsgd", "allreduce"])
def test_a_learner_that_was_dropped_joins_again_with_the_weights_of_the_others(name):
    """The rendezvous drops it, as it does when a frozen process is silent for too long."""
    with Rendezvous(learners=3) as rendezvous:
        server = rendezvous.server

        def drop(loop):
            if loop.taken == 15:
                server._run_soon(lambda: server._state._run._drop(1, "dropped", "no heartbeat"))

        loops = [
            Loop(
                rendezvous.ticket, learner, STRATEGIES[name], steps=FOR_EVER, on_step=drop if learner == 1 else nothing
            )
            for learner in range(3)
        ]
        end_after(loops[1], 25, loops)
    check_consensus(loops)


def test_a_learner_whose_module_differs_is_refused():
    class Wide(Loop):
        def _train(self):
            world = self.world = join(self.ticket, self.id)
            module = nn.Linear(3, 5, dtype=torch.float64)
            Learner(module, torch.optim.SGD(module.parameters(), lr=0.1), self.strategy(), world=world)

    with Rendezvous(learners=2) as rendezvous:
        loops = [Loop(rendezvous.ticket, 0, DPSGD, steps=5), Wide(rendezvous.ticket, 1, DPSGD)]
        with pytest.raises(StrategyError, match="differs"):
            loops[1].join()
        with pytest.raises(StrategyError, match="differs"):
            loops[0].join()


@pytest.mark.parametrize("name", ["adpsgd", "dpsgd", "allreduce", "delay-by-one"])
def test_settle_leaves_the_mean_in_every_module_and_training_goes_on_from_it(name):
    seen = {}

    def settle(loop):
        if loop.taken == 10:
            loop.learner.settle()
            seen[loop.id] = flat(loop.module)

    with Rendezvous(learners=3) as rendezvous:
        loops = [Loop(rendezvous.ticket, i, STRATEGIES[name], steps=20, on_step=settle) for i in range(3)]
        for loop in loops:
            loop.join()
    for learner in (1, 2):
        np.testing.assert_array_equal(seen[0], seen[learner])
    check_consensus(loops)


@pytest.mark.parametrize("name", ["adpsgd", "dpsgd", "delay-by-one"])
def test_weights_that_are_changed_inside_rewrite_stay_changed(name):
    def rewrite(loop):
        if loop.taken == 10:
            with loop.learner.rewrite() as module, torch.no_grad():
                module.weight.fill_(1000.0)

    with Rendezvous(learners=2) as rendezvous:
        loops = [Loop(rendezvous.ticket, i, STRATEGIES[name], steps=12, on_step=rewrite) for i in range(2)]
        for loop in loops:
            loop.join()
    for loop in loops:
        assert loop.own[:6].min() > 100.0


def test_the_scheduler_of_a_learner_that_joins_continues_that_of_the_others():
    schedulers = {}

    class Scheduled(Loop):
        def _train(self):
            world = self.world = join(self.ticket, self.id)
            module = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
            with Learner(module, optimizer, ADPSGD(), world=world, extras=[scheduler]) as learner:
                self.first = scheduler.last_epoch
                while learner.steps < self.total:
                    module(torch.randn(8, 3)).square().mean().backward()
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    time.sleep(0.01)
                    schedulers[self.id] = scheduler.last_epoch

    with Rendezvous(learners=1) as rendezvous:
        first = Scheduled(rendezvous.ticket, 0, ADPSGD, steps=150)
        while schedulers.get(0, 0) < 20:
            time.sleep(0.01)
        joined = Scheduled(rendezvous.ticket, None, ADPSGD, steps=150)
        first.join()
        joined.join()
    assert joined.first >= 20


def test_two_processes_with_one_id_do_not_fight_for_it():
    with Rendezvous(learners=2) as rendezvous:
        loops = [Loop(rendezvous.ticket, learner, ADPSGD, steps=300) for learner in range(2)]
        while not all(loop.taken > 5 for loop in loops):
            time.sleep(0.01)
        second = Loop(rendezvous.ticket, 1, ADPSGD, steps=300)
        with pytest.raises(LaunchError, match="one process per learner"):
            loops[1].join()
        second.join()
        loops[0].join()
    check_consensus([loops[0], second])


def test_a_consensus_that_waits_too_long_names_the_learners_that_are_missing_and_training_goes_on():
    seen = []

    def look(loop):
        if loop.taken == 5 and loop.id == 0:
            with (
                pytest.raises(MissingLearnersError, match="missing: 1") as caught,
                loop.learner.consensus(timeout_s=0.5),
            ):
                pass
            seen.append(caught.value.learners)

    with Rendezvous(learners=2) as rendezvous:
        loops = [Loop(rendezvous.ticket, learner, ADPSGD, steps=FOR_EVER, on_step=look) for learner in range(2)]
        end_after(loops[0], 10, loops)
    assert seen == [[1]]
    check_consensus(loops)
