"""Weights on an accelerator: a mirror in host memory for exchanges. Copies between the two overlap with computation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from roundelay.weights.flat import Allocate, Flat
from roundelay.weights.replica import Replica
from roundelay.weights.streams import AcceleratorStream, Mark, SideStream


class AcceleratorReplica(Replica):
    """The weights of a module on an accelerator. Parameters, gradients and optimizer stay there.

    Exchanges act on a flat buffer in host memory, the *mirror*. What an exchange adds to the mirror it also adds, on the side
    stream, to a buffer of *corrections* on the device. A step begins with weights <- weights + corrections, at the speed of
    device memory; after it the new weights go to the mirror, on the side stream. So no copy of the model between host and
    device blocks the training thread. Exchanges do wait until the mirror is complete.

    Device memory: the corrections, and one piece of a flat buffer per dtype. Host memory: the mirror.

    Args:
        module: what is trained.
        stream: makes the side stream for a device. Tests replace it.
    """

    def __init__(self, module: nn.Module, stream: Callable[[torch.device], SideStream] = AcceleratorStream) -> None:
        super().__init__(module)
        self._stream = stream(self.weights[0].device)
        self._corrections: Flat | None = None  # made with the first mirror
        self._staging: dict[torch.dtype, Tensor] = {}
        self._mirrored: Mark | None = None  # recorded after the last copy to the mirror
        self._last: Mark | None = None  # recorded after the last operation queued
        self._staged = False  # the corrections hold whole weights

    def mirror(self, allocate: Allocate | None = None) -> Flat:
        """Make the mirror, and the buffer of corrections on the device."""
        mirror = super().mirror(allocate)
        self._corrections = Flat(mirror.views, on=self.weights[0].device)
        largest = {piece.dtype: piece for piece in sorted(self._corrections.pieces, key=len)}
        self._staging = {dtype: torch.empty_like(piece) for dtype, piece in largest.items()}
        self._stream.wait_for_compute()  # the compute stream sets the corrections to zero
        return mirror

    @property
    def device_bytes(self) -> int:
        """Bytes on the device beside the weights themselves: the corrections, and a piece of them for each dtype."""
        buffers = [self._corrections.storage] if self._corrections else []
        return sum(buffer.nbytes for buffer in (*buffers, *self._staging.values()))

    def begin_step(self, flat: Flat) -> None:
        """Weights <- weights + corrections, or <- what was staged, in order with the user's own operations."""
        assert self._corrections is not None
        if self._last is not None:
            self._stream.hold_compute(self._last)  # the corrections, and the copy that still reads the old weights
        if self._staged:
            self._corrections.write(self.tensors())
        else:
            torch._foreach_add_(self.tensors(), self._matching(self._corrections.views))
        self._forget_corrections()

    def end_step(self, flat: Flat) -> None:
        """Start the copy of the new weights to the mirror `flat`."""
        self._stream.wait_for_compute()
        for view, weight in zip(flat.views, self.tensors(), strict=True):
            self._stream.copy(view, weight)
        self._mirrored = self._last = self._stream.mark()

    def follow(self, flat: Flat) -> None:
        """Do nothing: the weights are on the device already, and corrections come in at the next step."""

    def wait_until_readable(self) -> Mark | None:
        """Block until the mirror is complete; for threads that exchange. Two calls return the same if no step came in between."""
        mirrored = self._mirrored
        if mirrored is not None:
            mirrored.synchronize()
        return mirrored

    @property
    def version(self) -> Mark | None:
        return self._mirrored

    def correct(self, piece: int, correction: Tensor, sign: float) -> None:
        """An exchange has added `sign * correction` to a piece of the mirror: queue the same for the device.

        The correction must not change before `wait_until_corrected` returns.
        """
        assert self._corrections is not None
        target = self._corrections.pieces[piece]
        staging = self._staging[target.dtype][: len(target)]
        self._stream.copy(staging, correction)
        self._stream.add(target, staging, sign)
        self._last = self._stream.mark()

    def wait_until_corrected(self) -> None:
        """Block until all corrections so far were read; for threads that exchange."""
        if self._last is not None:
            self._last.synchronize()

    def stage(self, flat: Flat) -> None:
        """Queue the copy of `flat` to the device."""
        assert self._corrections is not None
        for target, source in zip(self._corrections.pieces, flat.pieces, strict=True):
            self._stream.copy(target, source)
        self._staged, self._last = True, self._stream.mark()

    def restart(self, flat: Flat) -> None:
        """Flat <- the module's weights. Corrections of the old weights are dropped. Blocks."""
        self.wait_until_corrected()
        self._forget_corrections()
        self._stream.wait_for_compute()  # before the next correction
        super().restart(flat)

    def copy_from(self, flat: Flat) -> None:
        """The module's weights <- flat, which includes all corrections. Blocks, so do not call it in every step."""
        self.wait_until_corrected()
        self._forget_corrections()
        self._stream.wait_for_compute()  # before the next correction
        super().copy_from(flat)

    def _forget_corrections(self) -> None:
        self._staged = False
        if self._corrections is not None:
            self._corrections.storage.zero_()

    def _matching(self, views: list[Tensor]) -> list[Tensor]:
        """Corrections in the dtype of the weights, which `.to()` may have changed."""
        return [view.to(weight.dtype) for view, weight in zip(views, self.weights, strict=True)]
