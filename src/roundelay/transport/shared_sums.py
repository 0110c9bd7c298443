"""Sums and broadcasts between learners of one machine, through memory that they share; an engine does the rest."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError

import torch
from torch import Tensor

from roundelay.errors import PeerLostError
from roundelay.transport.base import LEFT, Collectives
from roundelay.transport.bells import BELL_BYTES, Bell, available
from roundelay.transport.forming import LOOK_S, Hopeless, formed
from roundelay.transport.shared import PeerMemory, SharedMemory

SMALLEST_BYTES = 2**16  # of what is summed here: fewer numbers are as fast in the engine, and need no group to form
PIECE = 2**16  # numbers that are summed at a time: they stay in the cache until all have been added


class _Board(ctypes.Structure):
    """What a member shows the others: two bells to ring for it, how far it has come, and where its numbers are."""

    _fields_ = (
        ("bells", (ctypes.c_char * BELL_BYTES) * 2),
        ("meetings", ctypes.c_int64),
        ("fd", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("nbytes", ctypes.c_int64),  # of the whole buffer
    )


BOARD_BYTES = ctypes.sizeof(_Board)


class _Member:
    """One learner of a group, as all of them see it.

    Args:
        rank: which one.
        place: shared memory with its board.
        memory: where its numbers are.
    """

    def __init__(self, rank: int, place: Tensor, memory: PeerMemory) -> None:
        self.rank, self._place, self._memory = rank, place, memory  # the place is kept for as long as the board is read
        self.board = _Board.from_address(place.data_ptr())
        first_bell = place.data_ptr() + _Board.bells.offset
        self.bells = Bell(first_bell), Bell(first_bell + BELL_BYTES)

    def numbers(self, like: Tensor) -> Tensor:
        """Those that it shows, as many as `like` has, where they are."""
        whole = self._memory.map(self.board.fd, self.board.nbytes)
        return whole[self.board.offset : self.board.offset + like.nbytes].view(like.dtype)


class _GivenUpError(Exception):
    """Nobody waits for the result any more: a member is lost, or this learner closes."""


class _Group:
    """A learner among members that read each other's memory. Work is done in order, in a thread of its own.

    Args:
        members: all, in the order that all have in common.
        place: of this learner among them.
        memory: its own.
        hopeless: whether one of these learners is gone.
    """

    def __init__(self, members: list[_Member], place: int, memory: SharedMemory, hopeless: Hopeless) -> None:
        self._members, self._place, self._memory, self._hopeless = members, place, memory, hopeless
        self._own = members[place]
        self._others = [member for member in members if member is not self._own]
        self._under_way: Future[None] = Future()
        self._closed = False
        self._asked: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="roundelay-sum", daemon=True)
        self._thread.start()

    def ask(self, work: Callable[[], None]) -> Future[None]:
        """Have it done after what was asked for before."""
        future: Future[None] = Future()
        self._asked.put((work, future))
        return future

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            work, self._under_way = asked
            error: BaseException | None = None
            try:
                work()
            except _GivenUpError:
                return
            except BaseException as raised:  # whoever has the future hears of it
                error = raised
            with contextlib.suppress(InvalidStateError):  # a peer was lost just now
                self._under_way.set_exception(error) if error else self._under_way.set_result(None)

    def close(self) -> None:
        """Do nothing more; what is under way is given up."""
        self._closed = True
        self._asked.put(None)
        self._thread.join(2 * LOOK_S)

    def sum(self, values: Tensor) -> None:
        """Reduce, then gather: each member adds up one slice of everybody's numbers, and takes the other slices as they are.

        So results are equal everywhere, bit for bit. Nobody reads another's memory after the last meeting.
        """
        slices = [numbers.tensor_split(len(self._members)) for numbers in self._numbers(values)]
        own = slices[self._place]
        to_add = [theirs[self._place].split(PIECE) for theirs in slices if theirs is not own]
        for total, *others in zip(own[self._place].split(PIECE), *to_add, strict=True):
            for numbers in others:
                total.add_(numbers)
        self._meet()
        for place, theirs in enumerate(slices):
            if theirs is not own:
                own[place].copy_(theirs[place])
        self._meet()

    def give(self, values: Tensor, source: int) -> None:
        """Everybody has what the member at that place has, who may change it again."""
        theirs = self._numbers(values)[source]
        if theirs is not values:
            values.copy_(theirs)
        self._meet()

    def _numbers(self, values: Tensor) -> list[Tensor]:
        """Those of all members, each in its own memory, from when all have theirs ready."""
        place = self._memory.place(values)
        assert place is not None
        self._own.board.fd, self._own.board.offset, self._own.board.nbytes = place
        self._meet()
        return [values if member is self._own else member.numbers(values) for member in self._members]

    def _meet(self) -> None:
        """Go on when all have come here. Bells take turns: who has met already may ring for the next meeting."""
        turn = self._own.board.meetings % 2
        self._own.board.meetings += 1
        for member in self._others:
            member.bells[turn].ring()
        for _ in self._others:
            while not self._own.bells[turn].wait(LOOK_S):
                self._look_round()

    def _look_round(self) -> None:
        """While somebody takes long: raise where it makes no sense to wait any more."""
        if self._closed or self._under_way.done():
            raise _GivenUpError
        for member in self._others:
            if self._hopeless((member.rank,)) and member.board.meetings < self._own.board.meetings:
                raise PeerLostError(member.rank, LEFT)  # in order, for else nobody would wait for the result


class SharedCollectives(Collectives):
    """Sums and broadcasts in place, of numbers that lie in shared memory where all members can read it; else by the engine.

    Members of a group find out with its help, when they first have much to sum, whether that is so.

    Args:
        engine: knows every group.
        rank: this learner.
        memory: ours, where we share it.
        host: equal for learners that can map each other's memory; zeros are like no other.
        hopeless: whether one of these learners is gone.
    """

    def __init__(
        self, engine: Collectives, rank: int, memory: SharedMemory | None, host: bytes, hopeless: Hopeless
    ) -> None:
        self._engine, self._rank, self._host, self._hopeless = engine, rank, host, hopeless
        self._memory = memory if memory and available() else None
        self._groups: dict[tuple[int, ...], _Group | None] = {}

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Sum over members."""
        group = self._group(values, members)
        return group.ask(lambda: group.sum(values)) if group else self._engine.all_reduce(values, members)

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        """Source's values for every member."""
        group, place = self._group(values, members), members.index(source)
        return (
            group.ask(lambda: group.give(values, place)) if group else self._engine.broadcast(values, source, members)
        )

    def _group(self, values: Tensor, members: tuple[int, ...]) -> _Group | None:
        """The group that can work on these values; None if only the engine can. All members come to the same answer."""
        if values.is_cuda or values.nbytes < SMALLEST_BYTES or len(members) == 1:
            return None
        if members not in self._groups:
            self._groups[members] = formed(lambda: self._form(members), members, self._hopeless)
        return self._groups[members] if self._memory and self._memory.place(values) else None

    def _form(self, members: tuple[int, ...]) -> _Group | None:
        """Tell each other where boards are, then whether all of them could be mapped; all take part, whether they can or not."""
        place = members.index(self._rank)
        table = torch.zeros(len(members), len(self._host) + 2, dtype=torch.int64)
        if self._memory:
            own = self._memory.allocate(BOARD_BYTES)
            table[place] = torch.tensor([*self._host, os.getpid(), self._memory.locate(own)])
            for bell in _Member(self._rank, own, PeerMemory(os.getpid())).bells:
                bell.hang()
        self._engine.all_reduce(table, members).result()
        seen = self._seen(members, table)
        everybody_sees = torch.tensor([int(seen is not None)])
        self._engine.all_reduce(everybody_sees, members).result()
        if self._memory is None or seen is None or int(everybody_sees) < len(members):
            return None
        return _Group(seen, place, self._memory, self._hopeless)

    def _seen(self, members: tuple[int, ...], table: Tensor) -> list[_Member] | None:
        """All members, if each is here and lets us into its memory: a container or another user may not."""
        if self._memory is None or any(bytes(row[:-2].tolist()) != self._host for row in table):
            return None
        seen = []
        for rank, (pid, fd) in zip(members, table[:, -2:].tolist(), strict=True):
            memory = PeerMemory(pid)
            try:
                seen.append(_Member(rank, memory.map(fd, BOARD_BYTES), memory))
            except OSError:
                return None
        return seen

    def close(self) -> None:
        """Nothing goes on afterwards."""
        for group in self._groups.values():
            if group:
                group.close()
        self._engine.close()
