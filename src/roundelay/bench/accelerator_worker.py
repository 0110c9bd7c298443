"""One learner process of `roundelay bench accelerator`. Its argument is JSON: the cases, and how to measure them.

All learners measure the cases in order. Learner 0 prints one line per case: a JSON list with the measurement of each learner.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roundelay.bench.emulated_stream import EmulatedStream, SynchronousReplica
from roundelay.clock import Steps
from roundelay.cluster import environment
from roundelay.cluster.environment import World
from roundelay.cluster.membership import Membership
from roundelay.strategies import ADPSGD
from roundelay.weights import AcceleratorReplica, Replica
from roundelay.weights.streams import AcceleratorStream

TENSORS = 16  # the model has this many weights of equal size
WARM_UP_STEPS = 3


class Device:
    """The accelerator of this process: a real one, or an emulated one.

    Args:
        world: this learner, whose accelerator is used if there is one.
        bandwidth_Bps: of the emulated one.
    """

    def __init__(self, world: World, bandwidth_Bps: float) -> None:
        self.torch_device = world.device
        self.emulated = EmulatedStream(bandwidth_Bps) if self.torch_device.type == "cpu" else None

    def replica(self, module: nn.Module, *, synchronous: bool) -> Replica:
        """The module's weights, with synchronous or overlapped copies."""
        stream = self.emulated or AcceleratorStream(self.torch_device)
        return SynchronousReplica(module, stream) if synchronous else AcceleratorReplica(module, lambda _: stream)


class Loop:
    """Steps of one learner whose computation is a sleep.

    On the emulated device, what the CPU needs for the arithmetic of a device is deducted from the sleep of the next step: the
    optimizer, the corrections, and the part of a synchronous copy that is due to the CPU.

    Args:
        device: where the weights are.
        module: what is trained; its gradients stay as they are.
        step_s: seconds of computation in a step.
        strategy: None: no communication.
        synchronous: copies are synchronous.
    """

    def __init__(
        self, device: Device, module: nn.Module, step_s: float, strategy: ADPSGD | None, *, synchronous: bool
    ) -> None:
        self._stream, self._step_s, self._strategy, self._synchronous = device.emulated, step_s, strategy, synchronous
        self._optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
        self._deducted_s = 0.0

    def step(self) -> None:
        """Sleep, then let the optimizer apply the gradient."""
        time.sleep(max(0.0, self._step_s - self._deducted_s))
        excess_s = self._stream.excess_s if self._stream else 0.0
        if self._strategy is not None:
            block_on(self._strategy.before_step())
        elif self._stream:
            self._stream.compute_from = time.perf_counter()
        self._optimizer.step()
        computed_s = time.perf_counter() - self._stream.compute_from if self._stream else 0.0
        if self._strategy is not None:
            block_on(self._strategy.after_step())
        self._deducted_s = computed_s
        if self._stream and self._synchronous:
            self._deducted_s += self._stream.excess_s - excess_s


def block_on(steps: Steps) -> None:
    """Drive a generator of a strategy."""
    result = None
    try:
        while True:
            result = steps.send(result).result()
    except StopIteration:
        pass


def measure(case: dict[str, Any], plan: dict[str, Any], world: World, device: Device) -> dict[str, float]:
    """Measure one case in this process. All learners of `world` call this together."""
    module = _module(plan["parameters"], device.torch_device)
    before_bytes = tensor_bytes()
    strategy, transport, device_bytes = None, None, 0
    if case["strategy"] != "none":
        strategy = ADPSGD()
        transport = world.transport(share_memory=case["transport"] == "shared-memory")
        replica = device.replica(module, synchronous=case["copies"] == "synchronous")
        strategy.attach(replica, transport, Membership.of(world.size))
        device_bytes = replica.device_bytes
    loop = Loop(device, module, plan["step_s"], strategy, synchronous=case["copies"] == "synchronous")
    for _ in range(WARM_UP_STEPS):
        loop.step()
    dist.barrier()
    exchanges = -strategy.metrics()["exchanges_finished"] if strategy else 0
    began, steps = time.perf_counter(), 0
    while time.perf_counter() < began + plan["seconds"]:
        loop.step()
        steps += 1
    elapsed_s = time.perf_counter() - began
    exchanges += strategy.metrics()["exchanges_finished"] if strategy else 0
    extra_bytes = tensor_bytes() - before_bytes
    dist.barrier()  # no learner leaves while others are measured
    if strategy and transport:
        block_on(strategy.finish())
        dist.barrier()
        transport.close()
    return {
        "steps": steps,
        "seconds": elapsed_s,
        "exchanges": exchanges,
        "device_bytes": device_bytes,
        "host_bytes": extra_bytes - device_bytes,
    }


def _module(parameters: int, device: torch.device) -> nn.Module:
    module = nn.ParameterList(nn.Parameter(torch.ones(parameters // TENSORS, device=device)) for _ in range(TENSORS))
    for weight in module:
        weight.grad = torch.ones_like(weight)
    return module


def tensor_bytes() -> int:
    """Bytes of all tensors in this process, on any device. Memory that several tensors share counts once."""
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter):
            with contextlib.suppress(NotImplementedError):  # another thread is just making or freeing this tensor
                storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())


def main() -> None:
    """Measure all cases of the command line."""
    plan = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    world = environment.init()
    device = Device(world, plan["bandwidth_Bps"])
    for case in plan["cases"]:
        own = measure(case, plan, world, device)
        gathered = [torch.zeros(len(own), dtype=torch.float64) for _ in range(world.size)]
        dist.all_gather(gathered, torch.tensor(list(own.values()), dtype=torch.float64))
        if world.rank == 0:
            sys.stdout.write(json.dumps([dict(zip(own, each.tolist(), strict=True)) for each in gathered]) + "\n")
            sys.stdout.flush()
    if device.emulated:
        device.emulated.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
