"""Memory of weights on an accelerator, counted on both sides: on the device one copy and a piece, on the host three copies."""

from __future__ import annotations

import functools
import gc
import threading

import pytest
import torch
from loopback import loopback, together
from torch import nn

from roundelay import learner as learner_module
from roundelay.bench.accelerator_worker import tensor_bytes
from roundelay.bench.emulated_stream import EmulatedStream
from roundelay.learner import Learner
from roundelay.strategies import ADPSGD, DPSGD
from roundelay.weights import AcceleratorReplica, flat

LEARNERS, STEPS = 2, 6
WIDTH, PIECE = 400_000, 20_000
MODEL_BYTES = 4 * 2 * WIDTH
PIECE_BYTES = 4 * PIECE
SMALL = 10_000  # counters, norms, views of a header


class CountedReplica(AcceleratorReplica):
    """Notes how many bytes tensors have, also in the middle of an exchange and of a step."""

    most_bytes = 0
    _counting = threading.Lock()

    def count(self):
        with self._counting:
            CountedReplica.most_bytes = max(CountedReplica.most_bytes, tensor_bytes())

    def correct(self, piece, correction, sign):
        super().correct(piece, correction, sign)
        if piece == 3:
            self.count()

    def begin_step(self, flat):
        super().begin_step(flat)
        self.count()


@pytest.mark.parametrize(
    ("make", "on_device", "on_host"),
    [(ADPSGD, 1, 3), (functools.partial(ADPSGD, wire="bfloat16"), 1, 3), (DPSGD, 1, 2)],
    ids=["adpsgd", "adpsgd-bfloat16", "dpsgd"],
)
def test_one_copy_and_a_piece_on_the_device_and_three_copies_on_the_host(make, on_device, on_host, monkeypatch):
    monkeypatch.setattr(flat, "PIECE", PIECE)
    stream = EmulatedStream(bandwidth_Bps=1e12)
    monkeypatch.setattr(learner_module, "replica_of", functools.partial(CountedReplica, stream=lambda _: stream))
    modules = [nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2)]) for _ in range(LEARNERS)]
    for weight in (weight for module in modules for weight in module):
        weight.grad = torch.ones_like(weight)
    gc.collect()  # tensors of earlier tests, freed meanwhile, would hide new ones
    before = CountedReplica.most_bytes = tensor_bytes()
    device_bytes = [0] * LEARNERS
    with loopback(LEARNERS, share_memory=False) as transports:

        def work(rank):
            optimizer = torch.optim.SGD(modules[rank].parameters(), lr=0.1)
            with Learner(modules[rank], optimizer, make(), transports[rank]) as learner:
                for _ in range(STEPS):
                    optimizer.step()
                    learner.strategy.replica.wait_until_corrected()
                device_bytes[rank] = learner.replica.device_bytes

        together(LEARNERS, work)
    stream.close()
    extra_bytes = CountedReplica.most_bytes - before
    for each in device_bytes:
        assert on_device * MODEL_BYTES <= each <= on_device * MODEL_BYTES + PIECE_BYTES + SMALL
    host_bytes = (extra_bytes - sum(device_bytes)) / LEARNERS
    assert (on_host - 1) * MODEL_BYTES < host_bytes <= on_host * MODEL_BYTES + PIECE_BYTES + SMALL


def test_two_dtypes_have_a_piece_each_on_the_device(monkeypatch):
    monkeypatch.setattr(flat, "PIECE", 50)
    module = nn.ParameterList([nn.Parameter(torch.ones(200)), nn.Parameter(torch.ones(30, dtype=torch.float64))])
    replica = AcceleratorReplica(module, lambda _: EmulatedStream(1e12))
    assert replica.device_bytes == 0
    mirror = replica.mirror()
    assert replica.device_bytes == mirror.storage.nbytes + 50 * 4 + 30 * 8
