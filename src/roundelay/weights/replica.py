"""A learner's own weights: the module's parameters, and how they follow the flat buffer that exchanges act on."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from roundelay.errors import StrategyError
from roundelay.weights.flat import Allocate, Flat
from roundelay.weights.shards import is_sharded, local, reshard

_version = attrgetter("_version")  # torch counts writes in place


class Replica:
    """The weights of one module that learners average: its trainable parameters, each once even if it is tied.

    A strategy may let the optimizer work directly on a flat buffer: between `begin_step` and `end_step` the parameters
    *are* views of that buffer. Otherwise they keep their own memory, so `.to()`, LSTM's flatten_parameters and views that
    the user holds work as usual.

    Weights that FSDP2 has sharded are the rows that this process holds. FSDP2 owns
    their memory, so such weights are always copied.

    Raises StrategyError if the module has no trainable parameter.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not self.weights:
            raise StrategyError("the module has no parameter that requires a gradient; there is nothing to train")
        self._sharded = is_sharded(self.weights[0])
        self._tensors: list[Tensor] = []
        self._redirected = False
        self._marked: list[int] | None = None

    def tensors(self) -> list[Tensor]:
        """The weights as detached tensors for in-place copies; found again if `.to()` has replaced their storage."""
        if self._sharded:
            reshard(self.module)
            self._tensors = list(map(local, self.weights))
        elif _addresses(self._tensors) != _addresses(self.weights):
            self._tensors = [weight.detach() for weight in self.weights]
        return self._tensors

    def gradients(self) -> list[Tensor]:
        """The gradients as detached tensors for in-place copies. A weight without a gradient gets zeros."""
        for weight in self.weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        return [local(weight.grad) for weight in self.weights if weight.grad is not None]

    def mirror(self, allocate: Allocate | None = None) -> Flat:
        """A new flat buffer in host memory with a copy of the weights, for exchanges and steps."""
        flat = Flat(self.tensors(), allocate)
        self.copy_to(flat)
        return flat

    def restart(self, flat: Flat) -> None:
        """Flat <- the module's weights, which the user has replaced."""
        self.copy_to(flat)

    def copy_to(self, flat: Flat) -> None:
        """Flat <- the module's weights."""
        flat.read(self.tensors())

    def copy_from(self, flat: Flat) -> None:
        """The module's weights <- flat."""
        flat.write(self.tensors())

    def begin_step(self, flat: Flat) -> None:
        """Let the optimizer work on `flat`: the parameters are its views until `end_step`.

        Where a parameter differs from its view in device, dtype or strides, the flat is copied into the module instead.
        """
        if not self._sharded and all(map(_same_kind, self.tensors(), flat.views)):
            self._redirected = True
            _point(self.weights, flat.views)
        else:
            flat.write(self.tensors())

    def end_step(self, flat: Flat) -> None:
        """Take the optimizer's result: `flat` has it now, and the parameters are back in their own memory.

        That memory may still hold the values from before the step: `follow(flat)` brings it up to date.
        """
        if not self._redirected:
            self.copy_to(flat)
            return
        self._redirected = False
        for weight, view in zip(self.weights, flat.views, strict=True):
            if weight.data_ptr() != view.data_ptr():  # the optimizer has assigned a new tensor to .data
                view.copy_(weight.detach())
        _point(self.weights, self._tensors)

    def follow(self, flat: Flat) -> None:
        """After a step: the module's weights <- flat. No lock: an exchange may change some of them meanwhile."""
        self.copy_from(flat)

    @property
    def device_bytes(self) -> int:
        """Bytes on the accelerator beside the weights themselves; 0 without one."""
        return 0

    # For threads that exchange; only weights on an accelerator need these -------------------------------------------

    @property
    def version(self) -> object:
        """Changes with every step whose result must be waited for."""
        return None

    def wait_until_readable(self) -> object:
        """Block until the flat buffer has the result of the last step; returns the `version` that was waited for."""
        return None

    def correct(self, piece: int, correction: Tensor, sign: float) -> None:
        """An exchange has added `sign * correction` to a piece of the flat buffer."""

    def wait_until_corrected(self) -> None:
        """Block until the buffers of all corrections so far may be overwritten."""

    def stage(self, flat: Flat) -> None:
        """`flat` has changed as a whole: the next step begins with it."""

    # Changes by the user ------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Remember that the weights are now what they should be."""
        self._marked = self._versions()

    def touched(self) -> bool:
        """Whether the weights were written to since `mark`, other than through `.data`.

        Later calls return False until the next `mark`.
        """
        marked, self._marked = self._marked, None
        return marked is not None and marked != self._versions()

    def _versions(self) -> list[int]:
        return list(map(_version, self.weights))


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _point(weights: Sequence[nn.Parameter], storages: Sequence[Tensor]) -> None:
    for weight, storage in zip(weights, storages, strict=True):
        weight.data = storage


def _same_kind(weight: Tensor, view: Tensor) -> bool:
    return weight.device == view.device and weight.dtype == view.dtype and weight.stride() == view.stride()
