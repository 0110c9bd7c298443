"""What a learner promises, wherever its weights are: in host memory, or on an accelerator whose copies come late or at random."""

from __future__ import annotations

import copy
import functools
import math
import threading

import numpy as np
import pytest
import torch
from adversarial_stream import AdversarialStream
from loopback import loopback, together
from torch import nn

from roundelay import learner as learner_module
from roundelay.errors import RefusedError
from roundelay.learner import Learner
from roundelay.strategies import ADPSGD, DPSGD, DelayByOne, SuperLearner
from roundelay.topology import ring
from roundelay.weights import AcceleratorReplica, Replica, flat

STRATEGIES = {
    "adpsgd": ADPSGD,
    "dpsgd": lambda: DPSGD("ring"),
    "delay-by-one": DelayByOne,
    "super-learner": lambda: SuperLearner(ADPSGD("ring"), 1),
}
LEARNERS, STEPS = 2, 6


@pytest.fixture(params=["host", "accelerator", "accelerator at random"], autouse=True)
def where(request, monkeypatch):
    """Where the weights of all learners are."""
    monkeypatch.setattr(flat, "PIECE", 7)
    seed = 3 if "random" in request.param else None
    on_accelerator = functools.partial(AcceleratorReplica, stream=functools.partial(AdversarialStream, seed=seed))
    make = Replica if request.param == "host" else on_accelerator
    monkeypatch.setattr(learner_module, "replica_of", make)


class Mixed(nn.Module):
    """Two dtypes, tied, frozen and channels-last weights, and BatchNorm."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.last = nn.Linear(3, 1).double()

    def forward(self, x):
        pooled = self.norm(self.conv(x)).mean((2, 3)).to(self.frozen.weight.dtype)
        return self.last(self.second(torch.tanh(self.first(self.frozen(pooled)))).double())


torch.manual_seed(0)
TEMPLATE = Mixed()


def model():
    """A copy, because threads that build modules would share torch's random generator."""
    return copy.deepcopy(TEMPLATE)


def batch(rank, step):
    return rank + torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(100 * rank + step))


def optimizer_of(module):
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def gradient(module, rank, step):
    for parameter in module.parameters():
        parameter.grad = None
    (module(batch(rank, step)) - 3 * rank).square().mean().backward()


def each_learner(make, look, *, steps=range(STEPS), saved=None, between=lambda module, step: None):
    """Train the learners, or go on from what they have saved; what `look(learner, optimizer)` sees on each."""
    with loopback(LEARNERS) as transports:

        def work(rank):
            module = model()
            optimizer = optimizer_of(module)
            with Learner(module, optimizer, make(), transports[rank]) as learner:
                if saved:
                    module.load_state_dict(saved[rank]["module"])
                    optimizer.load_state_dict(saved[rank]["optimizer"])
                    learner.load_state_dict(saved[rank]["learner"])
                for step in steps:
                    gradient(module, rank, step)
                    optimizer.step()
                    between(module, step)
                return look(learner, optimizer)

        return together(LEARNERS, work)


def vector(tensors):
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors]).numpy().copy()


def trained(module):
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def final(learner, optimizer):
    learner.finish()
    return vector(trained(learner.module))


def by_matrix():
    """X <- W X - lr V,  V <- momentum V + G(X): D-PSGD by hand, without any of our code but the matrix."""
    modules = [model() for _ in range(LEARNERS)]
    optimizers = list(map(optimizer_of, modules))
    mixing = ring(LEARNERS)
    for step in range(STEPS):
        for rank, module in enumerate(modules):
            gradient(module, rank, step)
        before = [[weight.detach().clone() for weight in trained(module)] for module in modules]
        for rank, module in enumerate(modules):
            with torch.no_grad():
                for index, weight in enumerate(trained(module)):
                    row = mixing.row(rank, step).items()
                    weight.copy_(sum(share * before[peer][index] for peer, share in row))
            optimizers[rank].step()
    return np.stack([vector(trained(module)) for module in modules])


def test_dpsgd_equals_the_matrix_recursion_with_every_kind_of_weight():
    ends = np.stack(each_learner(STRATEGIES["dpsgd"], final))
    np.testing.assert_allclose(ends, by_matrix(), rtol=0, atol=1e-5)
    assert np.abs(ends[0] - ends[1]).max() > 1e-3, "learners differ, or this would prove nothing"


def test_weights_that_are_replaced_in_the_middle_are_followed():
    def replace(module, step):
        if step == 2:
            module.conv.weight.data = module.conv.weight.data.clone()
            module.to(memory_format=torch.contiguous_format)

    ends = np.stack(each_learner(STRATEGIES["dpsgd"], final, between=replace))
    np.testing.assert_allclose(ends, by_matrix(), rtol=0, atol=1e-5)


def test_weights_of_another_dtype_in_the_middle_are_followed():
    def widen(module, step):
        if step == 3:
            module.first.double()
            module.second.double()  # tied to `first`, its bias is not
            module.frozen.double()

    ends = np.stack(each_learner(STRATEGIES["dpsgd"], final, between=widen))
    np.testing.assert_allclose(ends, by_matrix(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_consensus_is_the_exact_mean_and_is_taken_back(name):
    def look(learner, optimizer):
        before = copy.deepcopy(learner.module.state_dict())
        with learner.consensus() as mean:
            inside = vector(trained(mean))
            frozen = mean.frozen.weight.clone()
        live = learner.strategy.weights()
        own = vector(trained(learner.module) if live is None else live.views)
        assert torch.equal(frozen, before["frozen.weight"])
        for key, value in learner.module.state_dict().items():
            if "norm.running" in key or "num_batches" in key:
                assert torch.equal(value, before[key])
        assert learner.module.second.weight is learner.module.first.weight
        return inside, own

    inside, own = (np.stack(column) for column in zip(*each_learner(STRATEGIES[name], look), strict=True))
    np.testing.assert_allclose(inside, np.tile(own.mean(0), (LEARNERS, 1)), rtol=0, atol=1e-6)


def test_a_consensus_between_steps_changes_no_later_step():
    calls = []

    def evaluate(learner, module, step):
        if step == 2:
            with learner.consensus():
                calls.append(step)

    with loopback(LEARNERS) as transports:

        def work(rank):
            module = model()
            optimizer = optimizer_of(module)
            with Learner(module, optimizer, STRATEGIES["dpsgd"](), transports[rank]) as learner:
                for step in range(STEPS):
                    gradient(module, rank, step)
                    optimizer.step()
                    evaluate(learner, module, step)
                return final(learner, optimizer)

        ends = np.stack(together(LEARNERS, work))
    assert len(calls) == LEARNERS
    np.testing.assert_allclose(ends, by_matrix(), rtol=0, atol=1e-5)


def save(learner, optimizer):
    state = learner.state_dict()
    return copy.deepcopy({"learner": state, "module": learner.module.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize("name", ["dpsgd", "delay-by-one"])
def test_a_run_that_is_resumed_equals_one_that_was_not_interrupted(name):
    make = STRATEGIES[name]
    expected = np.stack(each_learner(make, final))
    saved = each_learner(make, save, steps=range(3))
    resumed = np.stack(each_learner(make, final, steps=range(3, STEPS), saved=saved))
    np.testing.assert_allclose(resumed, expected, rtol=0, atol=1e-12)


def test_asynchronous_learners_resume_with_the_weights_that_were_saved():
    def look(learner, optimizer):
        with learner.strategy.at_rest() as live:
            return vector(live.views), vector(trained(learner.module))

    saved = each_learner(ADPSGD, save)
    results = each_learner(ADPSGD, look, steps=(), saved=saved)
    for (live, working), state in zip(results, saved, strict=True):
        module = model()
        module.load_state_dict(state["module"])
        np.testing.assert_array_equal(live, vector(trained(module)))
        np.testing.assert_array_equal(working, live)


def test_what_a_joining_learner_is_given_has_the_last_step():
    """At rest, right after a step: the updates of both learners, and nothing else, are in the sum of their weights."""
    with loopback(LEARNERS) as transports:

        def work(rank):
            module = nn.Linear(9, 1, dtype=torch.float64)
            optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
            with Learner(module, optimizer, ADPSGD(), transports[rank]) as learner:
                start = vector(trained(module))
                for step in range(5):
                    for weight in trained(module):
                        weight.grad = torch.full_like(weight, 0.1 * (1 + rank + step))
                    optimizer.step()
                learner._runner.run(learner.strategy.drain)
                transports[rank].all_reduce(torch.zeros(1), (0, 1)).result()
                with learner.strategy.at_rest() as live:
                    given = vector(live.views)
                return start, given, sum(0.1 * (1 + rank + step) for step in range(5))

        starts, given, updates = zip(*together(LEARNERS, work), strict=True)
    np.testing.assert_allclose(sum(given), sum(starts) - sum(updates), rtol=0, atol=1e-12)


def test_non_finite_weights_of_a_peer_are_refused_and_change_nothing():
    with loopback(LEARNERS) as transports:

        def work(rank):
            module = nn.Linear(30, 1)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            with Learner(module, optimizer, ADPSGD(max_lead=2), transports[rank]) as learner:
                for step in range(8):
                    for weight in trained(module):
                        weight.grad = torch.ones_like(weight)
                        if rank == 1 and step == 3:
                            weight.grad.fill_(math.nan)
                    optimizer.step()
                learner.finish()
                return vector(trained(module)), sum(transports[rank].refused.counts.values())

        (good, refused_by_0), (bad, refused_by_1) = together(LEARNERS, work)
    assert np.isfinite(good).all()
    assert np.isnan(bad).all()
    assert refused_by_0 + refused_by_1 > 0


def test_dpsgd_keeps_its_own_weights_if_those_of_a_neighbour_are_not_finite():
    looked = threading.Event()  # learner 1 stays until then
    with loopback(LEARNERS) as transports:

        def work(rank):
            module = nn.Linear(30, 1)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            learner = Learner(module, optimizer, DPSGD("ring"), transports[rank])
            for weight in trained(module):
                weight.grad = torch.full_like(weight, math.nan if rank == 1 else 1.0)
            optimizer.step()
            if rank == 1:
                looked.wait(20)
                learner._leave(RuntimeError("the test is over"))
                return
            before = vector(trained(module))
            try:
                with pytest.raises(RefusedError, match="learner 1 was refused: non-finite weights"):
                    optimizer.step()
                assert np.array_equal(vector(trained(module)), before)
            finally:
                looked.set()
                learner._leave(RuntimeError("the test is over"))

        together(LEARNERS, work)
