"""Weights on an accelerator, tried on an adversarial device: the same numbers as on the host, and every wait is needed."""

import functools
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from adversarial_stream import AdversarialMark, AdversarialStream
from loopback import loopback, together
from torch import nn
from worlds import LR, train, weights, world

from roundelay import learner as learner_module, weights as weights_package
from roundelay.consensus import Consensus, Mean
from roundelay.errors import RefusedError
from roundelay.learner import Learner
from roundelay.simulation import learners as simulated_learners
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne, SuperLearner
from roundelay.strategies.pair_average import PairAverage
from roundelay.topology import random_ring
from roundelay.weights import AcceleratorReplica, Replica, flat

STRATEGIES = {
    "adpsgd": lambda: ADPSGD(random_ring, max_lead=2),
    "adpsgd-bfloat16": lambda: ADPSGD("ring", wire="bfloat16"),
    "dpsgd": lambda: DPSGD("ring"),
    "delay-by-one": DelayByOne,
    "delayed-gradients": lambda: DelayByOne("gradients"),
    "allreduce": Allreduce,
    "super-learner": lambda: SuperLearner(ADPSGD("ring", max_lead=2), 2),
    "synchronous-super-learner": lambda: SuperLearner(DPSGD("ring"), 2),
}
SEEDS = [None, 1, 2]


def on_accelerator(monkeypatch, seed=None):
    """Make every learner of this test train on the adversarial device."""
    make = functools.partial(AcceleratorReplica, stream=functools.partial(AdversarialStream, seed=seed))
    for module in (weights_package, learner_module, simulated_learners):
        monkeypatch.setattr(module, "replica_of", make)


def trained(name, steps=25):
    """All weights after training on the virtual clock, uneven speeds, messages that take time."""
    clock, network, learners = world(
        [STRATEGIES[name]() for _ in range(4)],
        compute_s=lambda rank, step: 1.0 + 0.1 * ((3 * rank + step) % 4),
        latency_s=0.3,
    )
    train(clock, network, learners, [steps] * 4)
    return weights(learners)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_training_on_the_accelerator_equals_training_on_the_host(name, seed, monkeypatch):
    monkeypatch.setattr(flat, "PIECE", 5)
    expected = trained(name)
    on_accelerator(monkeypatch, seed)
    np.testing.assert_allclose(trained(name), expected, rtol=0, atol=1e-9)


def hammered(monkeypatch, share_memory, seed):
    """Four learners in threads that step as fast as they can; sums of weights at the end, and expected."""
    monkeypatch.setattr(flat, "PIECE", 700)
    on_accelerator(monkeypatch, seed)
    totals, finals = [None] * 4, [None] * 4
    with loopback(4, share_memory=share_memory) as transports:

        def work(rank):
            rng = torch.Generator().manual_seed(rank)
            module = nn.Linear(3000, 1, bias=False, dtype=torch.float64)
            optimizer = torch.optim.SGD(module.parameters(), lr=LR)
            with Learner(module, optimizer, ADPSGD(random_ring, max_lead=2), transports[rank]) as learner:
                total = module.weight.detach().clone()
                for _ in range(200):
                    module.weight.grad = torch.randn(module.weight.shape, generator=rng, dtype=torch.float64)
                    total -= LR * module.weight.grad
                    optimizer.step()
                learner.finish()
                finals[rank], totals[rank] = module.weight.detach().numpy().copy(), total.numpy()
                assert learner.metrics()["exchanges_finished"] + learner.metrics()["exchanges_served"] > 50

        together(4, work)
    return np.sum(finals, axis=0), np.sum(totals, axis=0)


@pytest.mark.parametrize("share_memory", [True, False], ids=["shared", "sockets"])
@pytest.mark.parametrize("seed", SEEDS)
def test_exchanges_during_steps_lose_no_update(share_memory, seed, monkeypatch):
    final, expected = hammered(monkeypatch, share_memory, seed)
    np.testing.assert_allclose(final, expected, rtol=0, atol=1e-9)


def no_wait(*args, **kwargs):
    return None


MUTATIONS = {
    "a step does not wait for corrections and for the copy that reads the weights": lambda patch: patch.setattr(
        AdversarialStream, "hold_compute", lambda self, mark: setattr(self, "_ordered", False)
    ),
    "the copy to the mirror does not wait for the optimizer": lambda patch: patch.setattr(
        AdversarialStream, "wait_for_compute", no_wait
    ),
    "exchanges do not wait for the mirror": lambda patch: patch.setattr(
        AcceleratorReplica, "wait_until_readable", lambda self: self._mirrored
    ),
    "nothing waits for anything": lambda patch: patch.setattr(AdversarialMark, "synchronize", no_wait),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_without_one_of_its_waits_the_numbers_are_wrong(mutation, monkeypatch):
    monkeypatch.setattr(flat, "PIECE", 5)
    expected = {name: trained(name) for name in ("adpsgd", "dpsgd")}
    on_accelerator(monkeypatch)
    MUTATIONS[mutation](monkeypatch)
    assert any(is_wrong(name, right) for name, right in expected.items())


def test_a_correction_that_is_reused_before_it_was_read_gives_wrong_numbers(monkeypatch):
    """Over sockets one buffer receives all requests, so this needs the real transport."""
    monkeypatch.setattr(AcceleratorReplica, "wait_until_corrected", no_wait)
    final, expected = hammered(monkeypatch, share_memory=False, seed=None)
    assert not np.allclose(final, expected, rtol=0, atol=1e-6)


def is_wrong(name, right):
    try:
        return not np.allclose(trained(name), right, rtol=0, atol=1e-6)
    except RefusedError:  # garbage that a peer has refused
        return True


def test_a_step_that_comes_while_an_exchange_waits_for_the_mirror_is_noticed(monkeypatch):
    """The exchange waits for one step's copy without the lock; when it has the lock another step's copy is under way."""
    stream = AdversarialStream()
    module = nn.Linear(4, 1, bias=False)
    replica = AcceleratorReplica(module, lambda device: stream)
    mirror = replica.mirror()
    pair = PairAverage(replica, mirror)

    def step():
        replica.begin_step(mirror)
        with torch.no_grad():
            module.weight.add_(1.0)
        replica.end_step(mirror)

    step()
    first, waited = replica.wait_until_readable, []

    def wait_and_step_once():
        version = first()
        if not waited:
            waited.append(True)
            step()
        return version

    monkeypatch.setattr(replica, "wait_until_readable", wait_and_step_once)
    with pair.readable():
        assert torch.equal(mirror.views[0], module.weight.detach()), "the mirror has the newest step"


@pytest.mark.parametrize(
    "kind", [Replica, functools.partial(AcceleratorReplica, stream=AdversarialStream)], ids=["host", "accelerator"]
)
def test_mixed_dtypes_tied_frozen_and_channels_last_weights_follow(kind):
    module = nn.ModuleDict({"a": nn.Conv2d(3, 4, 3), "b": nn.Linear(3, 2).double(), "frozen": nn.Linear(2, 2)})
    module["a"] = module["a"].to(memory_format=torch.channels_last)
    module["frozen"].requires_grad_(False)
    replica = kind(module)
    mirror = replica.mirror()
    before = [weight.detach().clone() for weight in replica.weights]
    for k, piece in enumerate(mirror.pieces):
        correction = torch.ones_like(piece)
        piece.add_(correction)
        replica.correct(k, correction, 1.0)
    replica.wait_until_corrected()
    replica.begin_step(mirror)
    with torch.no_grad():
        for weight in replica.weights:
            weight.mul_(2.0)
    replica.end_step(mirror)
    replica.wait_until_readable()
    replica.follow(mirror)
    for weight, view, start in zip(replica.weights, mirror.views, before, strict=True):
        torch.testing.assert_close(weight.detach(), 2 * (start + 1))
        torch.testing.assert_close(view, 2 * (start + 1))


def test_parameters_replaced_by_another_dtype_are_followed():
    module = nn.Linear(3, 2)
    replica = AcceleratorReplica(module, AdversarialStream)
    mirror = replica.mirror()
    module.double()
    replica.begin_step(mirror)
    with torch.no_grad():
        module.weight.fill_(2.0)
    replica.end_step(mirror)
    replica.wait_until_readable()
    assert (mirror.views[0] == 2.0).all()


class ComputeAwareStream(AdversarialStream):
    """After the compute stream has written to the corrections, what is queued is not ordered with that until it waits."""

    def compute_has_written(self):
        self._ordered = False


SOURCE = Path(inspect.getsourcefile(AcceleratorReplica)).read_text().splitlines()
WAITS = [
    number
    for number, line in enumerate(SOURCE)
    if re.search(r"\.(wait_for_compute|hold_compute|synchronize|wait_until_corrected)\(", line)
]


def without_line(number):
    """The class AcceleratorReplica without one line."""
    lines = list(SOURCE)
    if number is not None:
        lines[number] = re.sub(r"\S.*", "pass", lines[number])
    names = {"__name__": "mutated"}
    exec(compile("\n".join(lines), "mutated", "exec", dont_inherit=True), names)
    made = names["AcceleratorReplica"]
    forget = made._forget_corrections

    def forget_and_say_so(self):
        forget(self)
        self._stream.compute_has_written()

    made._forget_corrections = forget_and_say_so
    return made


def story(made):
    """Weights and mirrors in a life of one replica: corrections before and after steps, a restart, a copy of the mirror."""
    module = nn.Linear(6, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(module.weight)
    replica = made(module, lambda device: ComputeAwareStream())
    mirror = replica.mirror()
    seen = []

    def exchange(value):
        replica.wait_until_readable()
        correction = torch.full((6,), value, dtype=torch.float64)
        mirror.pieces[0].add_(correction)
        replica.correct(0, correction, 1.0)
        return correction

    def step(value):
        replica.begin_step(mirror)
        module.weight.data.add_(value)
        replica.end_step(mirror)

    def look():
        seen.extend([module.weight.detach().flatten().tolist()])

    def reuse(correction):
        replica.wait_until_corrected()
        correction.fill_(1e6)  # the buffer of the next request

    reuse(exchange(1.0))  # before the first step
    step(10.0)
    look()
    exchange(2.0)
    step(20.0)
    look()
    replica.wait_until_readable()
    seen.append(mirror.pieces[0].tolist())
    exchange(4.0)
    replica.restart(mirror)  # the correction is dropped
    seen.append(mirror.pieces[0].tolist())
    exchange(8.0)
    step(40.0)
    look()
    exchange(16.0)
    replica.copy_from(mirror)
    look()
    exchange(32.0)
    step(80.0)
    look()
    return np.array(seen)


def test_a_replica_follows_every_correction():
    expected = [11.0, 33.0, 33.0, 33.0, 81.0, 97.0, 209.0]
    np.testing.assert_array_equal(story(without_line(None)), np.outer(expected, np.ones(6)))


@pytest.mark.parametrize("number", WAITS, ids=[SOURCE[number].strip()[:50] for number in WAITS])
def test_without_any_single_wait_the_numbers_are_wrong(number):
    wrong = story(without_line(number))
    assert not np.array_equal(wrong, story(without_line(None)), equal_nan=True), SOURCE[number]


def test_a_mean_model_waits_until_the_copy_of_the_last_step_has_read_the_weights():
    """Without the wait, a late copy would take the mean for the learner's own weights, and send it to the neighbours."""
    module = torch.nn.Linear(3, 2)
    replica = AcceleratorReplica(module, stream=AdversarialStream)
    mirror = replica.mirror()
    replica.begin_step(mirror)
    with torch.no_grad():
        module.weight.add_(1.0)
    stepped = [weight.clone() for weight in replica.tensors()]
    replica.end_step(mirror)
    mean = Mean(flat.Flat([torch.zeros_like(weight) for weight in stepped]), {})
    Consensus(module, SimpleNamespace(replica=replica), None)._write(mean)
    replica.wait_until_readable()
    for view, weight in zip(mirror.views, stepped, strict=True):
        assert torch.equal(view, weight)
