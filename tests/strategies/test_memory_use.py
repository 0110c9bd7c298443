"""How many copies of the model a strategy makes, and that it makes no more once it runs."""

import functools
import inspect
import threading

import pytest
import torch
from loopback import PATIENCE_S, loopback, together
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from roundelay.learner import Learner
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne
from roundelay.topology import ring
from roundelay.weights import Flat, flat

SIZE = 3
WIDTH = 60_000
MODEL_BYTES = 4 * 2 * WIDTH


def module_of():
    return nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2)])


class Allocations(TorchDispatchMode):
    """Counts results of operations that are new memory of at least half a weight's size."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if tensor.nbytes >= 2 * WIDTH and tensor.untyped_storage().data_ptr() not in before:
                self.log.append(str(func))
        return result


def _tensors(tree):
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for branch in tree:
            yield from _tensors(branch)


def watch(strategy, log):
    """Record the allocations of every method that a learner or a thread of the transport calls."""

    def recorded(method):
        @functools.wraps(method)
        def call(*args):
            with Allocations(log):
                return method(*args)

        return call

    def recorded_steps(method):
        @functools.wraps(method)
        def steps():
            inner, value = method(), None
            while True:
                with Allocations(log):
                    try:
                        future = inner.send(value)
                    except StopIteration:
                        return
                value = yield future

        return steps

    names = ["gradient_ready", "after_backward", "before_step", "after_step", "_answer", "_replied", "_apply"]
    for name in names:
        method = getattr(strategy, name, None)
        if method is not None:
            wrap = recorded_steps if inspect.isgeneratorfunction(method) else recorded
            setattr(strategy, name, wrap(method))


CASES = {
    "allreduce": (Allreduce, 1),
    "dpsgd": (lambda: DPSGD(ring(SIZE)), 3),
    "adpsgd": (lambda: ADPSGD(ring(SIZE)), 3),
    "delay-by-one": (DelayByOne, 2),
    "delayed-gradients": (lambda: DelayByOne("gradients"), 2),
}


@pytest.mark.parametrize("share_memory", [True, False], ids=["shared", "sockets"])
@pytest.mark.parametrize("name", CASES)
def test_few_copies_of_the_model_and_no_more_after_warm_up(name, share_memory):
    make, copies = CASES[name]
    all_have_trained = threading.Barrier(SIZE)  # a learner that leaves early costs its callers a buffer
    with loopback(SIZE, share_memory=share_memory) as transports:

        def work(rank):
            module, strategy, log = module_of(), make(), []
            watch(strategy, log)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            with Learner(module, optimizer, strategy, transports[rank]) as learner:
                for step in range(8):
                    if step == 3:
                        log.clear()
                        request = transports[rank]._calls._request_buffer._memory.data_ptr()
                    sum(parameter.square().sum() for parameter in module).backward()
                    optimizer.step()
                all_have_trained.wait(PATIENCE_S)
                received = transports[rank]._calls._request_buffer._memory
                held = sum(flat.storage.nbytes for flat in _flats(strategy)) + received.nbytes
                assert learner.steps == 8
                return log, held / MODEL_BYTES, received.data_ptr() == request or request == 0

        for log, held, kept_request in together(SIZE, work):
            assert log == []
            assert held <= copies * 1.001
            assert kept_request


def test_spread_is_measured_without_memory_of_a_models_size(monkeypatch):
    monkeypatch.setattr(flat, "PIECE", WIDTH // 8)
    with loopback(SIZE) as transports:

        def work(rank):
            module, strategy, log = module_of(), DPSGD(ring(SIZE)), []
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1 * rank)
            with Learner(module, optimizer, strategy, transports[rank]) as learner:
                watch(strategy, log)
                for _ in range(4):
                    learner.metrics()  # asks for a measurement
                    sum(parameter.square().sum() for parameter in module).backward()
                    optimizer.step()
                return log, learner.metrics()["spread"]

        for log, spread in together(SIZE, work):
            assert log == []
            assert spread > 0


def _flats(strategy):
    """Every flat buffer that hangs on a strategy, also in lists and helper objects."""
    found, seen, queue = {}, set(), list(vars(strategy).values())
    while queue:
        thing = queue.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Flat):
            found[thing.storage.data_ptr()] = thing
        elif isinstance(thing, (list, tuple)):
            queue.extend(thing)
        elif type(thing).__module__.startswith("roundelay.strategies"):
            queue.extend(vars(thing).values())
    return found.values()


def test_the_counter_sees_an_allocation():
    log = []
    with Allocations(log):
        torch.ones(WIDTH).add_(1).view(2, -1)
        torch.ones(WIDTH).clone()
    assert len(log) == 3
