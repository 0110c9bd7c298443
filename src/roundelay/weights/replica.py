"""A learner's weights: the module's own tensors, and flat buffers that hold them for exchanges.

Where a flat has a shadow, the module's parameters may be that instead of a copy. `.to(dtype)`, LSTM's flatten_parameters and the
like detach them then, and whoever keeps a view onto a weight expects it to follow: both are looked for at every step, and
answered by copies, all in one call.
"""

from __future__ import annotations

import logging
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from roundelay.errors import StrategyError
from roundelay.shadow import Shadow, no_fork

log = logging.getLogger("roundelay")

NON_FINITE = "non-finite weights"
ALIGNMENT = 64  # bytes: a cache line, and enough for every dtype
MOST_WRITES = (
    3  # steps in a row between which weights are written to: pages that the kernel copies cost more than a copy
)

Allocate = Callable[[int], Tensor]

_NARROWER = {torch.float32: torch.float16}
_on_gpu = attrgetter("is_cuda")
_version = attrgetter("_version")


class Layout:
    """Where the numbers of each dtype are in a buffer of bytes: one part after the other, each aligned.

    Args:
        counts: how many numbers of which dtype, in this order.

    Attributes:
        nbytes: of the buffer.
    """

    def __init__(self, counts: Mapping[torch.dtype, int]) -> None:
        self._counts = dict(counts)
        self._spans: list[tuple[int, int, torch.dtype]] = []
        self.nbytes = 0
        for dtype, count in self._counts.items():
            end = self.nbytes + count * dtype.itemsize
            self._spans.append((self.nbytes, end, dtype))
            self.nbytes = -(-end // ALIGNMENT) * ALIGNMENT

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Layout:
        """That of as many numbers as these tensors have.

        >>> Layout.of([torch.ones(2, 3), torch.ones(10)]).nbytes
        64
        """
        counts: dict[torch.dtype, int] = {}
        for tensor in tensors:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
        return cls(counts)

    @property
    def code(self) -> int:
        """Equal for equal layouts, up to accident; not zero."""
        return zlib.crc32(repr(self._spans).encode()) or 1

    def parts_of(self, storage: Tensor) -> list[Tensor]:
        """One flat view per dtype onto a storage of this layout, such as a peer's."""
        return [storage[start:end].view(dtype) for start, end, dtype in self._spans]

    def narrowed(self) -> Layout:
        """The same numbers, those of float32 in float16; itself where that is no shorter, so that lengths tell which it is.

        >>> Layout({torch.float32: 1000}).nbytes, Layout({torch.float32: 1000}).narrowed().nbytes
        (4032, 2048)
        """
        if torch.float16 in self._counts:
            return self
        narrowed = Layout({_NARROWER.get(dtype, dtype): count for dtype, count in self._counts.items()})
        return narrowed if narrowed.nbytes < self.nbytes else self


class Flat:
    """One contiguous buffer with the shape of a list of tensors, grouped by dtype; zero at first.

    Attributes:
        layout: of the storage.
        storage: all bytes, as they travel.
        parts: one flat view per dtype, for arithmetic.
        views: one view per tensor, in the order given, for copying.
        addresses: of the views.
        shadow: that of the storage, if it was given one.
        shadow_views: the same views onto the shadow.
        shadow_addresses: of those.
    """

    def __init__(
        self, tensors: Sequence[Tensor], allocate: Allocate | None = None, on: torch.device | str = "cpu"
    ) -> None:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        self.layout = Layout.of(tensors)
        total = self.layout.nbytes
        self.storage = allocate(total) if allocate else torch.empty(total, dtype=torch.uint8, device=on)
        self.storage.zero_()
        self.parts = self.layout.parts_of(self.storage)
        views: dict[int, Tensor] = {}
        for part, indices in zip(self.parts, by_dtype.values(), strict=True):
            pieces = part.split([tensors[i].numel() for i in indices])
            views.update({i: piece.view(tensors[i].shape) for i, piece in zip(indices, pieces, strict=True)})
        self.views = [views[index] for index in range(len(tensors))]
        self.addresses = _addresses(self.views)
        self.cast(None)

    def cast(self, shadow: Shadow | None) -> Flat:
        """Have this shadow of the storage from now on, or none."""
        start = self.storage.data_ptr()
        self.shadow = shadow
        self.shadow_views = shadow.views([(view.data_ptr() - start, view) for view in self.views]) if shadow else []
        self.shadow_addresses = _addresses(self.shadow_views)
        return self

    def read(self, tensors: Sequence[Tensor]) -> None:
        """This <- tensors."""
        _copy(self.views, tensors)

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Tensors, detached ones, <- this."""
        _copy(tensors, self.views)


class Replica:
    """The weights of one module that learners average: its trainable parameters, each once however often it is tied.

    Raises StrategyError if there are none.

    Attributes:
        shown: the flat whose shadow the module's weights are, so that it must not change; None if they have memory of their own.
    """

    shown: Flat | None = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not self.weights:
            raise StrategyError("the module has no parameter that requires a gradient; there is nothing to train")
        self._tensors: list[Tensor] = []
        self._addresses: list[int] = []  # of those
        self._fitting: tuple[list[Tensor], Flat] | None = None  # what `_fits` has found to be of one kind
        self._lent = False
        self._marked: list[int] | None = None
        self._stays = _use_count is None  # its weights are not to be shadows

    def tensors(self) -> list[Tensor]:
        """The weights for in-place copies; detached anew where `.to()` has replaced a parameter's storage.

        The list keeps the storages that it knows, so that no other can be at their addresses.
        """
        addresses = _addresses(self.weights)
        if addresses != self._addresses:
            self._tensors, self._addresses = [weight.detach() for weight in self.weights], addresses
            if self.shown:
                self._stay("somebody has moved them")
        return self._tensors

    def mark(self) -> None:
        """The weights are what they should be now."""
        self._marked = self._versions()

    def touched(self) -> bool:
        """Whether somebody has written to the weights since they were marked last, but for writes through `.data`; asked once."""
        marked, self._marked = self._marked, None
        return marked is not None and marked != self._versions()

    def _versions(self) -> list[int]:
        return list(map(_version, self.weights))  # torch counts writes in place

    def flat(self, allocate: Allocate | None = None) -> Flat:
        """A new flat buffer with a copy of the weights."""
        flat = Flat(self.tensors(), allocate)
        self.copy_to(flat)
        return flat

    def lend(self, flat: Flat) -> None:
        """Let the parameters be the flat's views for a moment: what changes them changes the flat, without a copy.

        Only between the hooks of one optimizer step. Where a parameter differs from its view in device (the flat is in
        host memory), dtype (after `.to`) or strides (channels last), the flat is copied in instead.
        """
        if not self._fits(flat):
            flat.write(self.tensors())
            return
        self._lent = True
        _point(self.weights, flat.views)

    def take_back(self, flat: Flat) -> bool:
        """End `lend`: the flat has what the optimizer has made, and so have the parameters, if they can be its shadow (`shown`).

        True if they are where they were and have the values of before still, so that the new ones are to be copied in.
        """
        if not self._lent:
            self.copy_to(flat)
            return False
        if _addresses(self.weights) != flat.addresses:  # the optimizer has put new tensors in place of the old
            for weight, view in zip(self.weights, flat.views, strict=True):
                if weight.data_ptr() != view.data_ptr():
                    view.copy_(weight.detach())
        shows = self._may_show(flat)
        self._lent = False
        if shows:
            self._show(flat)
        else:
            _point(self.weights, self._tensors)
        return not shows

    def copy_to(self, flat: Flat) -> None:
        """Flat <- the module's weights."""
        flat.read(self.tensors())

    def copy_from(self, flat: Flat) -> None:
        """The module's weights <- flat; without a copy if they can be its shadow (`shown`)."""
        if flat.shadow and self.can_show(flat):
            self._show(flat)
        else:
            flat.write(self.tensors())

    def move_out(self) -> None:
        """Give the weights memory of their own again, for good."""
        tensors = self.tensors()
        if self.shown and not self._viewed_by_others():
            _point(self.weights, [tensor.clone() for tensor in tensors])
            self.shown = None
        self._stay()

    def _fits(self, flat: Flat) -> bool:
        """Whether parameters can be views of a flat."""
        tensors = self.tensors()
        known = self._fitting is not None and self._fitting[0] is tensors and self._fitting[1] is flat
        if not known and self.shown is None:
            if not all(map(_same_kind, tensors, flat.views)):
                return False
            self._fitting = tensors, flat
        return True

    def can_show(self, flat: Flat) -> bool:
        """Whether parameters can be the shadow of a flat. If not because somebody counts on where they are, they never can."""
        return self._fits(flat) and self._may_show(flat)

    def _may_show(self, flat: Flat) -> bool:
        """The same of parameters that fit, or are lent the flat."""
        if flat.shadow is None or self._stays:
            return False
        if self._viewed_by_others():
            self._stay("somebody keeps views onto them")
        elif flat.shadow.writes >= MOST_WRITES:
            self._stay("they are written to between steps")
        return not self._stays

    def _stay(self, reason: str = "") -> None:
        """The weights are not to be moved by us any more: if they are a shadow, that becomes memory of their own."""
        if reason and not self._stays:
            log.info("the module's weights stay where they are, and are copied after every step: %s", reason)
        self._stays = True
        if self.shown and self.shown.shadow:
            self.shown.shadow.keep()
            self.shown.cast(None)  # others have it now
        self.shown = None

    def _viewed_by_others(self) -> bool:
        """Whether the memory of the weights has more users than the parameters and our list, or is not torch's own."""
        users = _USERS_OF_ONE if self._lent else _USERS_OF_ONE + 1
        return any(_users(tensor) > users or (self.shown is None and _is_foreign(tensor)) for tensor in self._tensors)

    def _show(self, flat: Flat) -> None:
        assert flat.shadow is not None
        with no_fork:
            flat.shadow.forget()
            flat.shadow.expose()
            _point(self.weights, flat.shadow_views)
            self._tensors, self._addresses, self.shown = flat.shadow_views, flat.shadow_addresses, flat
        for weight in self.weights:
            torch.autograd.graph.increment_version(weight)  # as a copy would: graphs of before are not to be used
        self._fitting = None  # it has the tensors of before


def all_finite(parts: Iterable[Tensor]) -> bool:
    """Whether there is no NaN and no infinity; one pass over the numbers, for each of them would stay in a sum.

    >>> all_finite([torch.ones(3), torch.tensor([1.0, float("inf")])])
    False
    """
    for part in parts:
        total = part.sum(dtype=torch.float32 if part.dtype.itemsize < 4 else None)
        if not math.isfinite(float(total)) and not torch.isfinite(part).all():  # the sum alone may be too large
            return False
    return True


_use_count: Callable[[int], int] | None = getattr(
    torch._C, "_storage_Use_Count", None
)  # not on the CPU before torch 2.8


def _users(tensor: Tensor) -> int:
    """How many have the memory of this tensor, in torch or in Python, and some more that are the same for all."""
    storage = tensor.untyped_storage()
    return (_use_count(storage._cdata) if _use_count else 0) + sys.getrefcount(storage)


def _is_foreign(tensor: Tensor) -> bool:
    """Whether others may have its memory without torch's knowledge: a NumPy array, a file, other processes."""
    return tensor.is_shared() or not tensor.untyped_storage().resizable()


_USERS_OF_ONE = _users(torch.empty(1))


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _point(weights: Sequence[nn.Parameter], storages: Sequence[Tensor]) -> None:
    for weight, storage in zip(weights, storages, strict=True):
        weight.data = storage


def _same_kind(weight: Tensor, view: Tensor) -> bool:
    return weight.device == view.device and weight.dtype == view.dtype and weight.stride() == view.stride()


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """All copies in one call; between a GPU and pinned memory on a side stream, finished when this returns."""
    if not any(map(_on_gpu, targets)) and not any(map(_on_gpu, sources)):
        torch._foreach_copy_(list(targets), list(sources))
        return
    gpu = next(tensor.device for tensor in (*targets, *sources) if tensor.is_cuda)
    side = torch.cuda.Stream(gpu)
    side.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(side):
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
    torch.cuda.current_stream(gpu).wait_stream(side)
    side.synchronize()  # the CPU reads pinned memory next
