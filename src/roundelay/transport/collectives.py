"""Collectives on torch.distributed: Gloo between CPUs, NCCL between GPUs, XCCL between XPUs."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from roundelay import devices, threads
from roundelay.transport.base import Collectives
from roundelay.transport.heartbeats import LOST_AFTER_S

# A peer is lost when its heartbeats stop, never because a step takes long. So torch's own time-out must not come first.
NEVER = datetime.timedelta(days=365)
FORMING = datetime.timedelta(minutes=10)
LOOK = datetime.timedelta(seconds=0.5)  # how soon a waiting learner notices a lost peer
POLL_S = 0.0005
ARRIVAL_POLL_S = 0.005
Hopeless = Callable[[tuple[int, ...]], bool]


def backend(kind: str) -> str:
    """torch's backend for tensors on this kind of device, such as "nccl" for "cuda"."""
    found: str = dist.Backend.default_device_backend_map.get(kind, "gloo")
    return found


def backends(kind: str) -> str:
    """What `init_process_group` takes for tensors on the CPU and on this kind of device."""
    cpu = devices.CPU
    return backend(cpu) if kind == cpu else f"{cpu}:{backend(cpu)},{kind}:{backend(kind)}"


class WorkFuture(Future[None]):
    """A collective under way, which the failure detector may fail from outside.

    It waits inside torch, without a thread or a callback of ours: a callback that runs while Python shuts down would end the
    process with SIGABRT.
    """

    def __init__(self, work: dist.Work, *, polled: bool = False) -> None:
        super().__init__()
        self._work, self._polled = work, polled  # NCCL ends the group when a wait times out, so we poll

    def done(self) -> bool:
        """Whether it has ended, or was failed by the failure detector."""
        return super().done() or self._work.is_completed()

    def result(self, timeout: float | None = None) -> None:
        """Wait until it ends or the failure detector fails it; `timeout` is ignored."""
        while not super().done():
            ended = self._work.is_completed()  # asked first, because it may end just after the wait has timed out
            if self._polled and not ended:
                time.sleep(POLL_S)
                continue
            try:
                self._work.wait(LOOK)
            except RuntimeError as error:
                if ended:
                    self._failed(error)
            else:
                self._settle(None)
        return super().result()

    def _failed(self, error: RuntimeError) -> None:
        """Wait for the failure detector to name the lost peer: torch only knows that some connection broke."""
        try:
            super().result(timeout=LOST_AFTER_S)
        except TimeoutError:
            self._settle(error)
        except Exception:
            return

    def _settle(self, error: BaseException | None) -> None:
        with contextlib.suppress(InvalidStateError):
            self.set_exception(error) if error else self.set_result(None)


class _GroupCollectives(Collectives):
    """Collectives of torch.distributed. Remembers those under way, so that nothing waits for frozen peers.

    Args:
        hopeless: whether one of these members is known to be lost, so that a group of them can never form.
    """

    def __init__(self, hopeless: Hopeless) -> None:
        self._hopeless = hopeless
        # With their groups; also those whose future was failed and forgotten.
        self._works: list[tuple[Any, dist.Work]] = []

    @abstractmethod
    def _group(self, values: Tensor, members: tuple[int, ...]) -> Any:  # noqa: ANN401  # of any backend
        """The process group of these members for values on this device."""

    @abstractmethod
    def _held(self) -> list[Any]:
        """All process groups made so far."""

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Sum over members."""
        options = dist.AllreduceOptions()
        options.timeout = NEVER
        group = self._group(values, members)
        return self._future(group, group.allreduce([values], options), values)

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        """Give every member the values of `source`."""
        options = dist.BroadcastOptions()
        options.timeout, options.rootRank = NEVER, members.index(source)
        group = self._group(values, members)
        return self._future(group, group.broadcast([values], options), values)

    def _future(self, group: Any, work: dist.Work, values: Tensor) -> Future[None]:  # noqa: ANN401
        self._works = [*self._under_way(), (group, work)]
        return WorkFuture(work, polled=values.device.type != devices.CPU)

    def _under_way(self) -> list[tuple[Any, dist.Work]]:
        return [(group, work) for group, work in self._works if not work.is_completed()]

    def _formed(self, members: tuple[int, ...], rank: int, store: Any, form: Callable[[], Any]) -> Any:  # noqa: ANN401
        """What `form` makes once all members have come.

        Forming a group waits for all members, and that wait cannot be ended. So members first wait for each other at the
        store, where a lost member is noticed; then `form` runs in its own thread and normally does not wait.

        Raises ConnectionError if a member is lost before the group has formed.
        """
        self._wait_at(store, members, rank)
        formed: Future[Any] = Future()

        def work() -> None:
            try:
                formed.set_result(form())
            except BaseException as error:
                formed.set_exception(error)

        threads.start("form-group", work)
        while not formed.done():
            with contextlib.suppress(TimeoutError):
                formed.exception(timeout=LOOK.total_seconds())
            if self._hopeless(members):
                raise ConnectionError("a member of the group was lost while it was being formed")
        return formed.result()

    def _wait_at(self, store: Any, members: tuple[int, ...], rank: int) -> None:  # noqa: ANN401
        """Wait until all members have come to the store. Raises ConnectionError if a member or the store is lost."""
        try:
            store.set(f"{members}/{rank}", b"here")
            while not store.check([f"{members}/{member}" for member in members]):
                if self._hopeless(members):
                    raise ConnectionError("a member of the group was lost while it was being formed")
                time.sleep(ARRIVAL_POLL_S)
        except RuntimeError as error:  # torch's error for a lost store
            raise _unreachable(error) from error

    def close(self) -> None:
        """Make sure that process exit does not wait for a collective under way. Groups end with the process."""
        under_way = self._under_way()
        if not under_way:
            return
        # At exit the destructors of the groups would wait for that collective, for ever: keep the groups alive.
        for held in (*self._held(), *(work for _, work in under_way)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


class ProcessGroupCollectives(_GroupCollectives):
    """Sums and broadcasts in the world of `dist.init_process_group`; one group per set of members, made when first used.

    Args:
        hopeless: whether one of these members is known to be lost.
        ranks: of the learners in torch's world, ascending; by default a learner has the same rank there.
    """

    _groups: ClassVar[dict[tuple[int, ...], dist.ProcessGroup]] = {}  # torch keeps groups as long as the process lives

    def __init__(self, hopeless: Hopeless, ranks: Sequence[int] = ()) -> None:
        super().__init__(hopeless)
        self._ranks = ranks or range(dist.get_world_size())

    def _group(self, values: Tensor, members: tuple[int, ...]) -> dist.ProcessGroup:
        if len(members) == dist.get_world_size():
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        ranks = tuple(self._ranks[member] for member in members)
        if ranks not in self._groups:
            store = dist.PrefixStore(f"roundelay/{ranks}", _get_default_store())  # type: ignore[attr-defined]
            self._groups[ranks] = self._formed(
                members,
                self._ranks.index(dist.get_rank()),
                store,
                lambda: dist.new_group(list(ranks), timeout=NEVER, use_local_synchronization=True),
            )
        return self._groups[ranks]

    def _held(self) -> list[Any]:
        return [dist.group.WORLD, *self._groups.values()]


class StoreCollectives(_GroupCollectives):
    """Sums and broadcasts among learners that found each other at a rendezvous; the members may change.

    Args:
        open_store: connects to the store where the members of a group find each other. Every group gets a connection of its
            own: forming one that a lost member leaves holds the lock of its connection for minutes.
        rank: this learner.
        generation: of the membership; groups of different generations are separate.
        host: the interface that Gloo listens on; by default Gloo takes the one of the machine's name.
        hopeless: whether one of these members is known to be lost.
    """

    def __init__(
        self,
        open_store: Callable[[], Any],
        rank: int,
        generation: int,
        host: str,
        hopeless: Hopeless,
    ) -> None:
        super().__init__(hopeless)
        self._open_store, self._rank, self._generation, self._host = open_store, rank, generation, host
        self._groups: dict[tuple[int, str, tuple[int, ...]], Any] = {}

    def use_generation(self, generation: int) -> None:
        """Form new groups from now on: a member of an old one may have been lost and have come back.

        The old groups are released, with their threads and sockets. One with a collective that has not ended is kept, because
        releasing it would wait for that collective: with a frozen peer, for ever.
        """
        self._generation = generation
        busy = [group for group, _ in self._under_way()]
        self._groups = {key: group for key, group in self._groups.items() if any(group is each for each in busy)}

    def _group(self, values: Tensor, members: tuple[int, ...]) -> Any:  # noqa: ANN401
        name, position = backend(values.device.type), members.index(self._rank)
        key = self._generation, name, members
        if key not in self._groups:
            store = dist.PrefixStore(  # type: ignore[attr-defined]
                f"{self._generation}/{name}/{members}", self._opened_store()
            )
            self._groups[key] = self._formed(
                members, self._rank, store, lambda: self._form(name, store, position, len(members))
            )
        return self._groups[key]

    def _opened_store(self) -> Any:  # noqa: ANN401
        try:
            return self._open_store()
        except RuntimeError as error:  # torch's error for a lost store
            raise _unreachable(error) from error

    def _form(self, name: str, store: Any, position: int, size: int) -> Any:  # noqa: ANN401
        if name == "gloo":
            kind: Any = dist.ProcessGroupGloo
            options = kind._Options()
            options._devices = [kind.create_device(hostname=self._host)]
        else:
            kind = getattr(dist, f"ProcessGroup{name.upper()}")
            options = kind.Options()
        options._timeout = FORMING
        return kind(store, position, size, options)

    def _held(self) -> list[Any]:
        return list(self._groups.values())


def _unreachable(error: RuntimeError) -> ConnectionError:
    return ConnectionError(f"the store at which groups form cannot be reached ({error})")
