"""An emulated accelerator: CPU tensors behind the interface of a side stream, with copies at a given bandwidth."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import torch
from torch import Tensor, nn

from roundelay import threads
from roundelay.weights import Flat, Replica
from roundelay.weights.streams import Mark, SideStream


class EmulatedMark(threading.Event):
    """A point in the order of an emulated stream."""

    def synchronize(self) -> None:
        """Block until the stream has passed this point."""
        self.wait()


class EmulatedStream:
    """Copies and adds in a thread of their own, in order. A copy takes at least its bytes divided by the bandwidth.

    The compute stream is the training thread itself: what an accelerator would compute runs there, on the CPU. With
    `compute_from` and `excess_s` a benchmark can deduct the time that the CPU needs for this work.

    Args:
        bandwidth_Bps: of copies between host and device, in bytes a second.

    Attributes:
        compute_from: when the compute stream was last free to go on, after a wait for this stream.
        excess_s: how much longer copies have taken than the bandwidth says, because the CPU copies more slowly.
    """

    def __init__(self, bandwidth_Bps: float) -> None:
        self._bandwidth_Bps = bandwidth_Bps
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.compute_from = time.perf_counter()
        self.excess_s = 0.0
        threads.start("emulated-stream", self._run)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue target <- source."""
        self._queue.put(lambda: self._timed_copy(target, source))

    def add(self, target: Tensor, source: Tensor, factor: float) -> None:
        """Queue target <- target + factor source."""
        self._queue.put(lambda: target.add_(source, alpha=factor))

    def mark(self) -> EmulatedMark:
        """A mark after everything queued so far."""
        mark = EmulatedMark()
        self._queue.put(mark.set)
        return mark

    def wait_for_compute(self) -> None:
        """Do nothing: what the training thread has computed is complete."""

    def hold_compute(self, mark: Mark) -> None:
        """Block the training thread, which is the compute stream, until `mark`."""
        mark.synchronize()
        self.compute_from = time.perf_counter()

    def close(self) -> None:
        """End the thread after everything queued so far."""
        self._queue.put(None)

    def _run(self) -> None:
        while (operation := self._queue.get()) is not None:
            with torch.no_grad():
                operation()

    def _timed_copy(self, target: Tensor, source: Tensor) -> None:
        began = time.perf_counter()
        target.copy_(source)
        remaining_s = source.nbytes / self._bandwidth_Bps - (time.perf_counter() - began)
        if remaining_s > 0:
            time.sleep(remaining_s)
        else:
            self.excess_s -= remaining_s


class SynchronousReplica(Replica):
    """Weights on an accelerator, copied by the training thread: the whole model to the device before a step, to the host and
    to the device again after it. The way without a side stream, for comparison.

    Args:
        module: what is trained.
        stream: does the copies.
    """  # noqa: D205

    def __init__(self, module: nn.Module, stream: SideStream) -> None:
        super().__init__(module)
        self._stream = stream

    def begin_step(self, flat: Flat) -> None:
        """Weights <- flat, and wait."""
        self._copy_to_device(flat)

    def end_step(self, flat: Flat) -> None:
        """Flat <- weights, and wait."""
        self._stream.wait_for_compute()
        for view, weight in zip(flat.views, self.tensors(), strict=True):
            self._stream.copy(view, weight)
        self._stream.mark().synchronize()

    def follow(self, flat: Flat) -> None:
        """Weights <- flat, and wait."""
        self._copy_to_device(flat)

    def _copy_to_device(self, flat: Flat) -> None:
        for view, weight in zip(flat.views, self.tensors(), strict=True):
            self._stream.copy(weight, view)
        mark = self._stream.mark()
        mark.synchronize()
        self._stream.hold_compute(mark)
