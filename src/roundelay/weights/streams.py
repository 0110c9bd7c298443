"""The side stream of an accelerator: copies and adds that run beside the user's computation."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in the order of a stream."""

    def synchronize(self) -> None:
        """Block the calling thread until the stream has passed this point. Do not call this in the training thread."""


class SideStream(Protocol):
    """A queue of copies and adds, in order. The *compute* stream is the one that the user's own operations run on.

    All methods return at once. Any thread may call them, one at a time.
    """

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue target <- source, between host and device."""

    def add(self, target: Tensor, source: Tensor, factor: float) -> None:
        """Queue target <- target + factor source, on the device."""

    def mark(self) -> Mark:
        """A mark after everything queued so far."""

    def wait_for_compute(self) -> None:
        """Make later operations of this stream wait for everything queued so far on the compute stream."""

    def hold_compute(self, mark: Mark) -> None:
        """Make later operations of the compute stream wait for `mark`."""


class AcceleratorStream:
    """A side stream by torch's device-agnostic API: CUDA, XPU and others.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.Stream(device=device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with self._stream:
            target.copy_(source, non_blocking=True)

    def add(self, target: Tensor, source: Tensor, factor: float) -> None:
        with self._stream:
            target.add_(source, alpha=factor)

    def mark(self) -> torch.Event:
        return self._stream.record_event()

    def wait_for_compute(self) -> None:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def hold_compute(self, mark: Mark) -> None:
        assert isinstance(mark, torch.Event)
        torch.accelerator.current_stream(self._device).wait_event(mark)
