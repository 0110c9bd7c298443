"""Collectives on torch.distributed: Gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import datetime
from concurrent.futures import Future
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from roundelay.transport.base import Collectives

# Peers are given up by their heartbeats, never because a step takes long, so the engine's own time-out must not come first.
NEVER = datetime.timedelta(days=365)


class ProcessGroupCollectives(Collectives):
    """Sums and broadcasts; one torch process group per set of members, made when first used."""

    _groups: ClassVar[dict[tuple[int, ...], dist.ProcessGroup]] = {}  # torch keeps groups as long as the process lives

    def _group(self, members: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(members) == dist.get_world_size():
            return dist.group.WORLD
        if members not in self._groups:
            self._groups[members] = dist.new_group(list(members), timeout=NEVER, use_local_synchronization=True)
        return self._groups[members]

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Sum over members."""
        return _future(dist.all_reduce(values, group=self._group(members), async_op=True))

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        """Source's values for every member."""
        return _future(dist.broadcast(values, src=source, group=self._group(members), async_op=True))

    def close(self) -> None:
        """The groups go with the process."""


def _future(work: dist.Work | None) -> Future[None]:
    """Ours, completed by torch's own thread when the work is."""
    future: Future[None] = Future()
    assert work is not None

    def ended(torch_future: torch.futures.Future[object]) -> None:
        try:
            torch_future.value()
        except RuntimeError as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    work.get_future().add_done_callback(ended)
    return future
