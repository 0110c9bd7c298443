"""Whether the module shows the live weights or has a copy of them makes no difference that anybody could see."""

import contextlib
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from loopback import loopback, together
from torch import nn
from worlds import train, weights, world

from roundelay.cluster.membership import Membership
from roundelay.learner import Learner
from roundelay.strategies import ADPSGD, DPSGD, SuperLearner, pair_average as live
from roundelay.topology import complete, random_matching, random_ring, ring
from roundelay.transport.shared_memory import SharedMemory
from roundelay.transport.simulated import SimulatedTransport
from roundelay.transport.solo import SoloTransport
from roundelay.weights import replica
from roundelay.weights.replica import Replica

STRATEGIES = {
    "adpsgd": lambda: ADPSGD(random_ring(4), max_lead=3),
    "adpsgd-complete": lambda: ADPSGD(complete(4)),
    "dpsgd": lambda: DPSGD(random_ring(4)),
    "dpsgd-matching": lambda: DPSGD(random_matching(4)),
    "super-learner": lambda: SuperLearner(ADPSGD(ring(2)), group_size=2),
}


@contextlib.contextmanager
def shadows(cast):
    """Virtual learners with memory that can be there twice."""
    memory = SharedMemory()
    with pytest.MonkeyPatch.context() as patch:
        if cast:
            patch.setattr(SimulatedTransport, "allocate", lambda self, nbytes: memory.allocate(nbytes))
            patch.setattr(SimulatedTransport, "shadow", lambda self, buffer: memory.shadow(buffer))
        yield
    memory.close()


def meddle_with(learner, meddles):
    """Whatever a user may do to weights between backward and the next step, step by step; nothing else changes them there."""
    inner, inner_after, kept, left = learner.gradient, learner.strategy.after_backward, [], []

    def gradient(step):
        for view, weight in kept:
            assert torch.equal(view, weight), "a view onto a weight follows it"
        inner(step)
        meddle = meddles[step % len(meddles)]
        if meddle == "write":
            for weight in learner.module.parameters():
                weight.data.fill_(math.nan)
        elif meddle == "keep":
            kept[:] = [(weight.detach(), weight) for weight in learner.module.parameters()]
        elif meddle == "drop":
            kept.clear()
        elif meddle == "move":
            kept.clear()  # the user has moved away from them
            learner.module.head.data = learner.module.head.data.clone()
        left[:] = [weight.detach().clone() for weight in learner.module.parameters()]

    def after_backward():
        for before, weight in zip(left, learner.module.parameters(), strict=True):
            torch.testing.assert_close(weight.detach(), before, rtol=0, atol=0, equal_nan=True)
        yield from inner_after()

    learner.gradient, learner.strategy.after_backward = gradient, after_backward


def result(name, *, cast, steps, paces, latency_s, meddles=()):
    if name == "super-learner":  # whose members have equally many
        steps = [steps[0], steps[0], steps[2], steps[2]]
    with shadows(cast):
        clock, network, learners = world(
            [STRATEGIES[name]() for _ in range(4)], compute_s=lambda rank, step: paces[rank], latency_s=latency_s
        )
        for learner in learners:
            if meddles:
                meddle_with(learner, meddles)
        train(clock, network, learners, steps)
        return weights(learners), [learner.strategy.metrics() for learner in learners]


@settings(max_examples=40)
@given(
    name=st.sampled_from(list(STRATEGIES)),
    steps=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    paces=st.lists(st.sampled_from([0.3, 1.0, 1.1, 7.0]), min_size=4, max_size=4),
    latency_s=st.sampled_from([0.0, 0.01, 0.4, 3.0]),
    piece=st.sampled_from([2**18, 5]),
)
def test_equal_bits_whether_weights_are_shown_or_copied(name, piece, **setting):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "PIECE", piece)
        (X, metrics), (Y, others) = (result(name, cast=cast, **setting) for cast in (True, False))
    assert np.array_equal(X, Y)
    assert metrics == others


@settings(max_examples=40)
@given(
    name=st.sampled_from(
        [name for name in STRATEGIES if name != "super-learner"]
    ),  # which broadcasts what the module has
    meddles=st.lists(st.sampled_from(["nothing", "write", "keep", "drop", "move"]), min_size=1, max_size=5),
    paces=st.lists(st.sampled_from([0.3, 1.0, 1.1]), min_size=4, max_size=4),
    cast=st.booleans(),
)
def test_nothing_that_is_done_to_weights_between_steps_gets_into_training(name, meddles, **setting):
    X, _ = result(name, steps=[9, 9, 9, 9], latency_s=0.1, meddles=meddles, **setting)
    Y, _ = result(name, steps=[9, 9, 9, 9], latency_s=0.1, **setting)
    assert np.array_equal(X, Y)


class _Shadowed(SoloTransport):
    def __init__(self, memory):
        super().__init__()
        self.allocate, self.shadow = memory.allocate, memory.shadow


def _step(module, optimizer, strategy):
    for weight in module.parameters():
        weight.grad = torch.ones_like(weight)
    list(strategy.before_step())
    optimizer.step()
    list(strategy.after_step())


def _move_one(module, optimizer, strategy):
    module[0].weight.data = module[0].weight.data.clone()
    _step(module, optimizer, strategy)


def _raise(module, optimizer, strategy):
    list(strategy.before_step())
    with torch.no_grad():
        module[0].weight.add_(1.0)
    strategy.abandon()


def _load(module, optimizer, strategy):
    for weight in module.parameters():
        weight.data.mul_(2.0)
    loaded = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    strategy.load_state_dict({"round": 0})
    assert torch.equal(strategy.weights().parts[0], loaded)


DEEDS = {
    "step": _step,
    "save": lambda module, optimizer, strategy: list(strategy.before_saving()),
    "drain": lambda module, optimizer, strategy: list(strategy.drain()),
    "load": _load,
    "move one": _move_one,
    "raise": _raise,
}


@pytest.mark.parametrize("deeds", list(itertools.product(DEEDS, DEEDS)), ids=", ".join)
@pytest.mark.parametrize("exchanged", [False, True])
def test_whatever_came_before_an_exchange_moves_live_weights_and_not_those_of_the_module(deeds, exchanged):
    memory = SharedMemory()
    module = nn.Sequential(nn.Linear(100, 50), nn.Linear(50, 30))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    strategy = ADPSGD(ring(1))
    strategy.attach(Replica(module), _Shadowed(memory), Membership.of(1))
    _step(module, optimizer, strategy)

    def exchange():
        """With somebody whose weights are 1, as threads of the transport do it."""
        message = torch.empty_like(strategy.weights().storage).view(torch.float32).fill_(1.0).view(torch.uint8)
        strategy._answer(1, message, message)
        strategy._live.tidy()

    for deed in deeds:
        if exchanged:
            exchange()
        DEEDS[deed](module, optimizer, strategy)
        shown = [weight.detach().clone() for weight in module.parameters()]
        [was] = (part.clone() for part in strategy.weights().parts)
        exchange()
        torch.testing.assert_close(strategy.weights().parts[0], (was + 1) / 2)
        for weight, before in zip(module.parameters(), shown, strict=True):
            assert torch.equal(weight, before)
    list(strategy.drain())
    assert torch.equal(nn.utils.parameters_to_vector(module.parameters()), strategy.weights().parts[0])
    memory.close()


@pytest.mark.parametrize("share_memory", [True, False], ids=["shared", "sockets"])
def test_hammered_while_weights_are_overwritten_no_update_is_lost(share_memory, monkeypatch):
    """Threads read and write the flats at any time; what the user writes between steps is nowhere among it."""
    size, width, lr = 3, 5000, 0.1
    monkeypatch.setattr(live, "PIECE", 700)
    monkeypatch.setattr(replica, "MOST_WRITES", math.inf)  # weights are shown however often that happens
    initial = torch.randn(1, width, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    with loopback(size, share_memory=share_memory) as transports:

        def work(rank):
            rng = torch.Generator().manual_seed(rank)
            module = nn.Linear(width, 1, bias=False, dtype=torch.float64)
            module.weight.data.copy_(initial)
            optimizer = torch.optim.SGD(module.parameters(), lr=lr)
            total = torch.zeros(1, width, dtype=torch.float64)
            with Learner(module, optimizer, ADPSGD(random_ring(size), max_lead=2), transports[rank]) as learner:
                for step in range(500):
                    module.weight.grad = torch.randn(1, width, generator=rng, dtype=torch.float64)
                    total -= lr * module.weight.grad
                    optimizer.step()
                    assert learner.replica.shown
                    working = module.weight.detach().clone()
                    assert torch.equal(module.weight, working), "which never change until the next step"
                    if step % 3 == 0:
                        module.weight.data.fill_(math.nan)
                served = learner.metrics()["exchanges_served"]
            return total, module.weight.detach().clone(), served

        totals, finals, served = zip(*together(size, work), strict=True)
    assert sum(served) > 500
    torch.testing.assert_close(sum(finals), size * initial + sum(totals), rtol=0, atol=1e-9)


@pytest.mark.parametrize("strategy_of", [lambda: DPSGD(ring(1)), lambda: ADPSGD(ring(1))], ids=["dpsgd", "adpsgd"])
@pytest.mark.parametrize("kind", ["lstm", "batchnorm", "tied", "compiled", "spectral-norm"])
def test_modules_of_every_kind_train_on_shown_weights_as_on_their_own(kind, strategy_of):
    def module_of():
        torch.manual_seed(0)
        if kind == "lstm":
            return _LastOutput(nn.LSTM(6, 5, num_layers=2, bidirectional=True))
        if kind == "batchnorm":
            return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        if kind == "tied":
            first, second = nn.Linear(6, 6), nn.Linear(6, 6)
            second.weight = first.weight
            return nn.Sequential(first, nn.Tanh(), second)
        if kind == "compiled":
            return torch.compile(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), backend="eager")
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)), nn.Linear(5, 3))

    def train_one(module, around):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        with around(module, optimizer) as learner:
            for step in range(6):
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
                module(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if learner:
                assert learner.replica.shown, "or nothing is tested here"
        return nn.utils.parameters_to_vector(module.parameters()).detach()

    plain = train_one(module_of(), lambda *_: contextlib.nullcontext())
    with loopback(1) as [transport]:
        shown = train_one(module_of(), lambda module, optimizer: Learner(module, optimizer, strategy_of(), transport))
    torch.testing.assert_close(shown, plain, rtol=1e-5, atol=1e-6)


class _LastOutput(nn.Module):
    def __init__(self, lstm):
        super().__init__()
        self.lstm = lstm

    def forward(self, x):
        return self.lstm(x)[0]
