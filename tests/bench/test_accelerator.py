"""The emulated accelerator keeps order, bandwidth and numbers; rows are computed from what learners report."""

from __future__ import annotations

import functools
import json
import threading
import time

import pytest
import torch
from torch import nn

from roundelay.bench import accelerator
from roundelay.bench.accelerator import CASES, NONE, Row
from roundelay.bench.accelerator_worker import Device, Loop, tensor_bytes
from roundelay.bench.emulated_stream import EmulatedStream, SynchronousReplica
from roundelay.cli import main
from roundelay.cluster.environment import World
from roundelay.weights import AcceleratorReplica


@pytest.fixture
def stream():
    stream = EmulatedStream(bandwidth_Bps=1e12)
    yield stream
    stream.close()


def test_operations_run_in_order_and_a_mark_waits_for_those_before_it(stream):
    x, y = torch.zeros(1000), torch.ones(1000)
    for _ in range(20):
        stream.add(y, y, 1.0)
        stream.copy(x, y)
    stream.mark().synchronize()
    assert (x == 2.0**20).all()


def test_a_copy_takes_its_bytes_divided_by_the_bandwidth_and_the_caller_does_not_wait():
    stream = EmulatedStream(bandwidth_Bps=4e6)
    began = time.perf_counter()
    stream.copy(torch.zeros(100_000), torch.ones(100_000))
    queued_s = time.perf_counter() - began
    stream.mark().synchronize()
    taken_s = time.perf_counter() - began
    stream.close()
    assert queued_s < 0.05
    assert 0.1 <= taken_s < 0.2
    assert stream.excess_s == 0


def test_a_bandwidth_that_the_cpu_cannot_reach_is_counted_as_excess():
    stream = EmulatedStream(bandwidth_Bps=1e15)
    stream.copy(torch.zeros(1_000_000), torch.ones(1_000_000))
    stream.mark().synchronize()
    stream.close()
    assert stream.excess_s > 0


def test_the_compute_stream_waits_for_a_mark(stream):
    go_on = threading.Event()
    stream._queue.put(go_on.wait)
    mark = stream.mark()
    assert not mark.is_set()
    go_on.set()
    stream.hold_compute(mark)
    assert mark.is_set()


@pytest.mark.parametrize("kind", ["overlapped", "synchronous"])
def test_steps_and_corrections_give_the_same_numbers_with_either_kind_of_copies(kind, stream):
    module = nn.Linear(50, 20)
    start = [weight.detach().clone() for weight in module.parameters()]
    kinds = {"overlapped": lambda: AcceleratorReplica(module, lambda _: stream)}
    replica = kinds.get(kind, functools.partial(SynchronousReplica, module, stream))()
    mirror = replica.mirror()
    for _ in range(3):
        for k, piece in enumerate(mirror.pieces):
            correction = torch.full_like(piece, 0.5)
            replica.wait_until_readable()
            piece.add_(correction)
            replica.correct(k, correction, 1.0)
        replica.wait_until_corrected()
        replica.begin_step(mirror)
        with torch.no_grad():
            for weight in module.parameters():
                weight.add_(1.0)
        replica.end_step(mirror)
        replica.follow(mirror)
    replica.wait_until_readable()
    for weight, view, first in zip(module.parameters(), mirror.views, start, strict=True):
        torch.testing.assert_close(weight.detach(), first + 4.5)
        torch.testing.assert_close(view, first + 4.5)


def test_a_step_takes_its_time_whatever_the_optimizer_needs():
    device = Device(World(0, 1, 0, 1), 1e12)
    module = nn.ParameterList([nn.Parameter(torch.ones(1000))])
    loop = Loop(device, module, 0.1, None, synchronous=False)

    def slow_step():
        time.sleep(0.05)

    loop._optimizer.step = slow_step
    loop.step()
    began = time.perf_counter()
    for _ in range(3):
        loop.step()
    assert 0.28 < time.perf_counter() - began < 0.42
    device.emulated.close()


def test_tensor_bytes_counts_shared_memory_once():
    before = tensor_bytes()
    whole = torch.zeros(1000)
    views = [whole[:10], whole.view(10, 100)]
    assert tensor_bytes() - before == whole.nbytes
    del whole, views
    assert tensor_bytes() == before


def learner(steps, exchanges=0, device=0, host=0):
    return {"steps": steps, "seconds": 10.0, "exchanges": exchanges, "device_bytes": device, "host_bytes": host}


def test_a_row_has_ratios_within_repetitions_and_the_most_memory():
    ours = CASES[2]
    measured = {
        NONE: [[learner(30), learner(30)], [learner(20), learner(20)], [learner(10), learner(10)]],
        ours: [
            [learner(27, 20, 101, 300), learner(27, 7, 101, 250)],
            [learner(20, 10, 101, 280), learner(20, 10, 101, 280)],
            [learner(8, 8, 101, 280), learner(8, 0, 101, 280)],
        ],
    }
    row = accelerator.row(ours, measured, model_bytes=100)
    assert row.ratio_to_none == pytest.approx(0.9)
    assert row.ratio_to_none_range == pytest.approx((0.8, 1.0))
    assert row.steps_per_s == pytest.approx(4.0)
    assert row.exchanges_per_step == pytest.approx(0.5)
    assert (row.device_copies, row.host_copies) == (1.01, 3.0)


def row_of(case, ratio):
    return Row(case.strategy, case.copies, case.transport, 6.6 * ratio, ratio, (ratio, ratio), 0.7, 1.01, 3.0)


def test_the_command_says_that_the_accelerator_is_emulated(monkeypatch, capsys):
    asked = {}

    def run(**settings):
        asked.update(settings)
        settings["progress"](CASES[0])
        return [row_of(case, 0.97) for case in CASES]

    monkeypatch.setattr(accelerator, "run", run)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert main(["bench", "accelerator", "--bandwidth", "6GB/s", "--step", "200ms"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "The accelerator is emulated: computation is a sleep" in out
    assert "on the device 1.01 models, on the host 3.00 models" in out
    assert (asked["learners"], asked["parameters"], asked["step_s"], asked["bandwidth_Bps"]) == (
        2,
        43_000_000,
        0.2,
        6e9,
    )
    assert main(["bench", "accelerator", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rows"][1]["ratio_to_none"] == 0.97
    assert document["note"].startswith("The accelerator is emulated")
    assert document.keys() >= {"command", "machine", "parameters", "step_s", "bandwidth_Bps", "learners"}


def test_one_learner_is_refused(capsys):
    assert main(["bench", "accelerator", "--learners", "1"]) == 2
    assert "needs at least 2 learners, got 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_short_real_run_keeps_to_the_promised_memory():
    rows = accelerator.run(learners=2, parameters=8_000_000, step_s=0.1, bandwidth_Bps=12e9, seconds=1.0, repetitions=1)
    none, overlapped, sockets, synchronous = rows
    assert none.ratio_to_none == 1.0
    assert overlapped.exchanges_per_step > 0
    assert overlapped.ratio_to_none > synchronous.ratio_to_none
    piece = 2**18 / 8_000_000
    assert sockets.device_copies <= 1 + piece + 0.001
    assert 2 < sockets.host_copies <= 3.001
