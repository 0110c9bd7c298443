"""Sums and broadcasts between learners of one machine, through memory that they share; an engine does the rest."""

from __future__ import annotations

import atexit
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
from roundelay.transport.heartbeats import BEAT_S
from roundelay.transport.shared_memory import Location, PeerMemory, SharedMemory

SMALLEST_BYTES = 2**16  # of what is summed here: fewer numbers are as fast in the engine, and need no group to form
PIECE = 2**16  # numbers that are summed at a time: they stay in the cache until all have been added
LOOK_S = 0.5  # how soon who waits notices what the watch says

Hopeless = Callable[[tuple[int, ...]], bool]
DependingOn = Callable[[tuple[int, ...], Future[None]], Future[None]]


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
        board_memory: shared memory with its board.
        memory: where its numbers are.
    """

    def __init__(self, rank: int, board_memory: Tensor, memory: PeerMemory) -> None:
        self.rank, self._memory = rank, memory
        self._board_memory = board_memory  # kept for as long as the board is read
        self.board = _Board.from_address(board_memory.data_ptr())
        first_bell = board_memory.data_ptr() + _Board.bells.offset
        self.bells = Bell(first_bell), Bell(first_bell + BELL_BYTES)

    def show(self, location: Location) -> None:
        """Have our own numbers found there."""
        self.board.fd, self.board.offset, self.board.nbytes = location

    def numbers(self, like: Tensor) -> Tensor:
        """Those that it shows, as many as `like` has, where they are. Raises OSError if it has gone, and its memory with it."""
        whole = self._memory.map(self.board.fd, self.board.nbytes)
        return whole[self.board.offset : self.board.offset + like.nbytes].view(like.dtype)


class _GivenUpError(Exception):
    """Nobody waits for the result any more: a member is lost, or this learner closes."""


class _Group:
    """A learner among members that read each other's memory. Work is done in order, in a thread of its own.

    Whatever goes wrong ends the group: members would no longer meet at the same work.

    Args:
        members: all, in the order that all have in common.
        position: of this learner among them.
        hopeless: whether one of these learners is gone.
    """

    def __init__(self, members: list[_Member], position: int, hopeless: Hopeless) -> None:
        self._members, self._position, self._hopeless = members, position, hopeless
        self._own = members[position]
        self._others = {place: member for place, member in enumerate(members) if place != position}
        self._under_way: Future[None] = Future()
        self._closed = False
        self._failure: BaseException | None = None
        self._asked: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, work: Callable[[], None]) -> Future[None]:
        """Have it done after what was asked for before."""
        if self._thread is None:  # not before: some groups form and never work
            self._thread = threading.Thread(target=self._run, name="roundelay-sum", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a thread that is inside torch when Python ends would abort it
        future: Future[None] = Future()
        self._asked.put((work, future))
        return future

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            work, self._under_way = asked
            try:
                if self._failure is None:
                    work()
            except BaseException as error:  # whoever has the future, this one or a later one, hears of it
                self._failure = error
            with contextlib.suppress(InvalidStateError):  # a peer was lost just now
                if self._failure:
                    self._under_way.set_exception(self._failure)
                else:
                    self._under_way.set_result(None)

    def close(self) -> None:
        """Do nothing more; what is under way is given up."""
        self._closed = True
        if self._thread is not None:
            for bell in self._own.bells:
                bell.ring()  # whoever waits looks round
            self._asked.put(None)
            self._thread.join()
            atexit.unregister(self.close)
        self._members, self._others = [], {}  # and with them the memory of peers

    def sum(self, values: Tensor, location: Location) -> None:
        """Reduce, then gather: each member adds up one slice of everybody's numbers, and takes the other slices as they are.

        So results are equal everywhere, bit for bit. Nobody reads another's memory after the last meeting.
        """
        self._ready(location)
        count = len(self._members)
        own = values.view(-1).tensor_split(count)
        slices = {place: self._numbers(member, values).tensor_split(count) for place, member in self._others.items()}
        to_add = (theirs[self._position].split(PIECE) for theirs in slices.values())
        for total, *others in zip(own[self._position].split(PIECE), *to_add, strict=True):
            for numbers in others:
                total.add_(numbers)
            self._look_whether_closed()
        self._meet()
        for place, theirs in slices.items():
            own[place].copy_(theirs[place])
        self._meet()

    def give(self, values: Tensor, location: Location, source: int) -> None:
        """Everybody has what the member at that position has, who may change it again."""
        self._ready(location)
        if source != self._position:
            values.view(-1).copy_(self._numbers(self._members[source], values))
        self._meet()

    def _ready(self, location: Location) -> None:
        """From here on all members have their numbers where they say."""
        self._own.show(location)
        self._meet()

    def _numbers(self, member: _Member, like: Tensor) -> Tensor:
        try:
            return member.numbers(like)
        except OSError as error:
            with contextlib.suppress(TimeoutError):  # the watch will say in a moment what has become of it
                self._under_way.exception(BEAT_S)
                raise _GivenUpError from error
            raise PeerLostError(member.rank, f"its memory cannot be read ({error})") from error

    def _meet(self) -> None:
        """Go on when all have come here. Bells take turns: who has met already may ring for the next meeting."""
        turn = self._own.board.meetings % 2
        self._own.board.meetings += 1
        for member in self._others.values():
            member.bells[turn].ring()
        for _ in self._others:
            while not self._own.bells[turn].wait(LOOK_S):
                self._look_round()
            self._look_whether_closed()

    def _look_whether_closed(self) -> None:
        if self._closed:
            raise _GivenUpError

    def _look_round(self) -> None:
        """While somebody takes long: raise where it makes no sense to wait any more."""
        if self._under_way.done():
            raise _GivenUpError
        for member in self._others.values():
            if self._hopeless((member.rank,)) and member.board.meetings < self._own.board.meetings:
                raise PeerLostError(member.rank, LEFT)  # in order, for else nobody would wait for the result


class SharedCollectives(Collectives):
    """Sums and broadcasts in place, of numbers that lie in shared memory where all members can read it; else by the engine.

    Members of a group find out with its help, when they first have much to sum, whether that is so. Then, and only then, a
    request waits for the others to come.

    Args:
        engine: knows every group.
        rank: this learner.
        memory: ours, where we share it.
        host: equal for learners that can map each other's memory; zeros are like no other.
        hopeless: whether one of these learners is gone.
        depending_on: has a future fail if one of these learners is lost.
    """

    def __init__(
        self,
        engine: Collectives,
        rank: int,
        memory: SharedMemory | None,
        host: bytes,
        *,
        hopeless: Hopeless,
        depending_on: DependingOn,
    ) -> None:
        self._engine, self._rank, self._host = engine, rank, host
        self._hopeless, self._depending_on = hopeless, depending_on
        self._memory = memory if memory and available() else None
        self._groups: dict[tuple[int, ...], _Group | None] = {}

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        """Sum over members."""
        group, location = self._group(values, members)
        if not group or not location:
            return self._engine.all_reduce(values, members)
        return group.ask(lambda: group.sum(values, location))

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        """Source's values for every member."""
        group, location = self._group(values, members)
        if not group or not location:
            return self._engine.broadcast(values, source, members)
        return group.ask(lambda: group.give(values, location, members.index(source)))

    def _group(self, values: Tensor, members: tuple[int, ...]) -> tuple[_Group | None, Location | None]:
        """The group that can work on these values, and where they are; all members come to the same answer."""
        if values.is_cuda or values.nbytes < SMALLEST_BYTES or len(members) == 1:
            return None, None
        if members not in self._groups:
            self._groups[members] = self._formed(members)
        return self._groups[members], self._memory.location(values) if self._memory else None

    def _formed(self, members: tuple[int, ...]) -> _Group | None:
        """Tell each other where boards are, then whether all of them could be mapped; all take part, whether they can or not.

        Raises PeerLostError if a member is lost before that.
        """
        position = members.index(self._rank)
        table = torch.zeros(len(members), len(self._host) + 2, dtype=torch.int64)
        if self._memory:
            own = self._memory.allocate(BOARD_BYTES)
            table[position] = torch.tensor([*self._host, os.getpid(), self._memory.locate(own)])
            for bell in _Member(self._rank, own, PeerMemory(os.getpid())).bells:
                bell.hang()
        self._sum_now(table, members)
        seen = self._seen(members, table)
        everybody_sees = torch.tensor([int(seen is not None)])
        self._sum_now(everybody_sees, members)
        if seen is None or int(everybody_sees) < len(members):
            return None
        return _Group(seen, position, self._hopeless)

    def _sum_now(self, values: Tensor, members: tuple[int, ...]) -> None:
        self._depending_on(members, self._engine.all_reduce(values, members)).result()

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
        self._groups.clear()
        self._engine.close()
