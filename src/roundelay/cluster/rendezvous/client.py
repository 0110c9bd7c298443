"""A learner's line to the rendezvous: one thread, which owns its socket.

A learner that loses the line goes on training, and comes back on its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from roundelay.cluster.membership import Membership
from roundelay.cluster.rendezvous.messages import Message, MessageLine
from roundelay.cluster.rendezvous.server import RENDEZVOUS
from roundelay.cluster.rendezvous.state import NEVER_FORMED, Address, Run
from roundelay.errors import DroppedError, HandshakeError, RendezvousLostError
from roundelay.transport import handshake
from roundelay.transport.handshake import Hello, Purpose
from roundelay.transport.heartbeats import BEAT_S, SILENCE_S, SILENT
from roundelay.transport.security import Security

log = logging.getLogger("roundelay")

_ASKED_AGAIN = ("begin", "last_step", "mark", "meet")  # questions that wait until the rendezvous is back, for a while
PATIENCE_S = 300.0  # with a rendezvous that is away, to train on
STOPPING_S = 5.0  # the same, when the run is to stop anyway


@dataclass(frozen=True)
class View:
    """Who takes part from now on.

    Attributes:
        membership: their numbers, and how often it has changed.
        addresses: where they are.
        values: what each brought to the meeting that began this term.
    """

    membership: Membership
    addresses: dict[int, Address]
    values: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, message: Message) -> View:
        """From an answer of the rendezvous."""
        addresses = {int(learner): (str(host), int(port)) for learner, (host, port) in message["living"].items()}
        values = {int(learner): value for learner, value in message.get("values", {}).items()}
        return cls(Membership(tuple(sorted(addresses)), int(message["generation"])), addresses, values)


class RendezvousClient:
    """A learner's line to the rendezvous.

    Args:
        address: where it is.
        security: the run's.
        on_term: hears of every new membership, from the line's thread.
        on_stop: hears why the run is to be saved and stopped.
    """

    def __init__(
        self,
        address: Address,
        security: Security,
        on_term: Callable[[View, str], None] = lambda term, reason: None,
        on_stop: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._address, self._security = address, security
        self.on_term, self.on_stop = on_term, on_stop
        self.id: int | None = None
        self.info: Message = {}
        self.elapsed_s, self.given = 0.0, 0  # of the run and of its budget, when this learner registered
        self.joins = False  # the others are under way, and hear of this learner when it has arrived
        self.term: View | None = None
        self._mine: Address = ("", 0)
        self._run_told: Message = {}
        self._total: int | None = None
        self._used: list[int] = []  # numbers drawn, or used before
        self._lock = threading.Lock()
        self._questions: dict[int, tuple[Message, Future[Message]]] = {}
        self._count = 0
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._dropped: str | None = None
        self._connected, self._away_since = False, 0.0
        self._leaving = self._closing = False
        try:
            self._line = self._connect()
        except HandshakeError:
            raise
        except OSError as error:
            raise RendezvousLostError(f"cannot reach the rendezvous at {address[0]}:{address[1]}: {error}") from error
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="roundelay-line", daemon=True)
        self._thread.start()

    def __enter__(self) -> RendezvousClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}")

    # What a learner asks -----------------------------------------------------------------------------------------------------

    def ask_for_info(self) -> Message:
        """What the rendezvous tells of the run, without taking part in it."""
        info: Message = self._ask("info")["info"]
        return info

    def register(self, run: Run, mine: Address, wanted: int | None) -> View:
        """Take part as learner `wanted`, or as a new one; waits until all that begin together are here."""
        self._run_told, self._mine, self._dropped = asdict(run), mine, None
        answer = self._ask("register", id=wanted, address=mine, generation=NEVER_FORMED, run=self._run_told)
        self.id, self.info, self.term = int(answer["id"]), answer["info"], View.of(answer)
        self.joins = bool(answer["joins"])
        self.elapsed_s, self.given = float(answer["elapsed_s"]), int(answer["given"])
        return self.term

    def begin(self, total: int, used: Sequence[int]) -> None:
        """Say what the budget is, and which numbers of it an earlier part of this run has used."""
        if self._total is None:
            self._total, self._used = total, list(used)
            self._ask("begin", total=total, used=self._used)

    def draw(self, group: int, index: int, done: int, *, patient: bool = False) -> int | None:
        """The number that counts the budget for this step; None when it is used up.

        Args:
            group: which draws.
            index: its next draw; asked for again, it is the same.
            done: how many of its draws are part of its weights; the others come back to the pool if it is lost.
            patient: wait for what may come back.

        While the rendezvous is away, numbers are those that are this learner's by its place among the living.
        """
        try:
            answer = self._ask("draw", group=group, index=index, done=done, patient=patient)
            number = answer["number"]
        except ConnectionError:
            number = self._next_own()
        if number is not None:
            self._used.append(number)
        return None if number is None else int(number)

    def last_step(self, begun: int) -> int:
        """Having begun so many steps, how many to end with; waits until all of the same party have said how many they have."""
        try:
            return int(self._ask("last_step", STOPPING_S, begun=begun)["number"])
        except ConnectionError:
            return begun

    def mark(self, otherwise: int) -> int:
        """Where the budget stood when the first learner asked this: one name for what all save when they stop."""
        try:
            return int(self._ask("mark", STOPPING_S)["number"])
        except ConnectionError:
            return otherwise

    def meet(
        self,
        generation: int,
        value: Any = None,  # noqa: ANN401
        lost: Sequence[int] = (),
        mine: Address | None = None,
    ) -> View:
        """Wait until all living learners are here.

        Args:
            generation: in which this learner was until now.
            value: what all will hear of it.
            lost: those of that generation that it cannot reach any more.
            mine: where it will be found from now on, if not where it was.
        """
        self._mine = mine or self._mine
        answer = self._ask("meet", value=value, lost=list(lost), generation=generation, address=self._mine)
        self.term = View.of(answer)
        return self.term

    def arrived(self) -> None:
        """This learner, which joins, is ready for the others."""
        self._tell({"kind": "arrived"})

    def healed(self) -> None:
        """This learner goes on with the newest membership."""
        if self.term is not None:
            self._tell({"kind": "healed", "generation": self.term.membership.generation})

    def check(self) -> None:
        """Raise DroppedError if the others go on without this learner."""
        if self._dropped is not None:
            raise DroppedError(self._dropped)

    def close(self, failure: str = "") -> None:
        """Say goodbye, with the reason if it is a bad one."""
        if self._leaving:
            return
        self._leaving = True
        self._outbox.put({"kind": "bye", "failure": failure})
        self._closing = True
        self._poke()
        self._thread.join()

    def _next_own(self) -> int | None:
        assert self.term is not None
        assert self._total is not None
        membership, taken = self.term.membership, set(self._used)
        place = membership.position(self.id) if self.id in membership.living else 0
        start = max(taken, default=-1) + 1
        own = range(start + (place - start) % membership.size, self._total, membership.size)
        return next((number for number in own if number not in taken), None)

    def _ask(self, kind: str, patience_s: float = PATIENCE_S, **content: Any) -> Message:  # noqa: ANN401
        """The answer. Raises RendezvousLostError if it is away for too long, DroppedError if it knows us no more."""
        future: Future[Message] = Future()
        with self._lock:
            if self._dropped is not None:
                raise DroppedError(self._dropped)
            if kind == "draw" and not self._connected:
                raise RendezvousLostError("the rendezvous is away")
            self._count += 1
            message = {"kind": kind, "n": self._count} | content
            self._questions[self._count] = message, future
        self._tell(message)
        answer = self._waited_for(future, patience_s)
        if "dropped" in answer:
            raise DroppedError(answer["dropped"])
        return answer

    def _waited_for(self, future: Future[Message], patience_s: float) -> Message:
        """However long it takes, as long as the rendezvous is there."""
        while True:
            try:
                return future.result(timeout=BEAT_S)
            except TimeoutError:
                if not self._connected and time.monotonic() - self._away_since > patience_s:
                    raise RendezvousLostError(f"the rendezvous has been away for {patience_s:g} s") from None

    def _tell(self, message: Message) -> None:
        self._outbox.put(message)
        self._poke()

    def _poke(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    # The line's thread -------------------------------------------------------------------------------------------------------

    def _connect(self) -> MessageLine:
        hello = Hello(-1 if self.id is None else self.id, Purpose.RENDEZVOUS, os.getpid(), bytes(16))
        connection, _ = handshake.connect(self._address, hello, RENDEZVOUS, self._security)
        self._connected = True
        return MessageLine(connection)

    def _run(self) -> None:
        while not self._closing:
            try:
                self._serve_line()
            except OSError as error:
                self._line.close()
                if self._leaving:
                    break
                self._lost_line(error)
        self._line.close()
        self._fail_questions(lambda kind: True, ConnectionError("this learner has closed"))
        self._wake.close()
        self._waker.close()

    def _serve_line(self) -> None:
        heard, due = time.monotonic(), 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            selector.register(self._line.connection, selectors.EVENT_READ, self._line)
            while not self._closing or not self._outbox.empty():
                now = time.monotonic()
                if now >= due:
                    due = now + BEAT_S
                    self._line.send({"kind": "beat"})
                if now - heard > SILENCE_S:
                    raise ConnectionError(SILENT)
                while not self._outbox.empty():
                    self._line.send(self._outbox.get())
                for key, _ in selector.select(timeout=max(due - now, 0.0)):
                    if key.data is None:
                        self._wake.recv(4096)
                        continue
                    for message in self._line.receive():
                        self._take(message)
                    heard = time.monotonic()
                heard += max(time.monotonic() - now - 2 * BEAT_S, 0.0)  # we ourselves stood still

    def _take(self, message: Message) -> None:
        if message["kind"] == "answer":
            with self._lock:
                _, future = self._questions.pop(message["n"], (None, None))
            if future is not None:
                with contextlib.suppress(InvalidStateError):
                    future.set_result(message)
        elif message["kind"] == "membership":
            self._take_up(View.of(message), message["reason"])
        elif message["kind"] == "stop":
            self.on_stop(message["reason"])

    def _lost_line(self, error: OSError) -> None:
        """Go on without, and try to come back."""
        with self._lock:
            self._connected, self._away_since = False, time.monotonic()
        log.warning("learner %s has lost the rendezvous (%s) and goes on without it", self.id, error)
        self._fail_questions(lambda kind: kind not in _ASKED_AGAIN, RendezvousLostError("the rendezvous is away"))
        while not self._leaving:
            try:
                self._line = self._connect()
            except OSError:
                time.sleep(BEAT_S)
                continue
            self._register_again()
            return

    def _register_again(self) -> None:
        if self.term is None:
            return
        membership, addresses = self.term.membership, self.term.addresses
        with self._lock:
            self._count += 1
            future: Future[Message] = Future()
            message = {
                "kind": "register",
                "n": self._count,
                "id": self.id,
                "address": self._mine,
                "run": self._run_told,
                "generation": membership.generation,
                "living": {str(learner): addresses[learner] for learner in membership.living},
                "total": self._total,
                "used": self._used,
            }
            self._questions[self._count] = message, future
            again = [question for question, _ in self._questions.values() if question["kind"] in _ASKED_AGAIN]
        future.add_done_callback(self._registered_again)
        self._outbox.put(message)
        for question in again:
            self._outbox.put(question)

    def _registered_again(self, future: Future[Message]) -> None:
        if future.exception() is not None:
            return
        answer = future.result()
        if "dropped" in answer:
            self._dropped = answer["dropped"]
            log.warning("learner %s was dropped: %s", self.id, self._dropped)
            self._fail_questions(lambda kind: True, DroppedError(self._dropped))
            return
        log.info("learner %s has found the rendezvous again", self.id)
        self._take_up(View.of(answer), "the rendezvous is back")

    def _take_up(self, term: View, reason: str) -> None:
        if self.term is not None and term.membership.generation > self.term.membership.generation:
            self.term = term
            self.on_term(term, reason)

    def _fail_questions(self, which: Callable[[str], bool], error: BaseException) -> None:
        with self._lock:
            failing = [n for n, (question, _) in self._questions.items() if which(question["kind"])]
            futures = [self._questions.pop(n)[1] for n in failing]
        for future in futures:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)
