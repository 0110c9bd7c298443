"""What a rendezvous decides: who takes part, who has drawn what, when all have met. No sockets here, so that it can be tested.

A learner *registers*, and from then on asks: for the next number of the budget, for the step with which to end, for a meeting
of all that live. Whoever is silent for too long, or whose process is known to have ended, is dropped: the others hear of the
next *generation* of the membership, and what the lost one had drawn goes back to the pool.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from roundelay.cluster.rendezvous.cursor import Cursor
from roundelay.cluster.rendezvous.messages import Message
from roundelay.transport.heartbeats import SILENT, Heartbeats

log = logging.getLogger("roundelay")

AWAY_S = 2.0  # a learner whose connection broke has so long to come back
NEVER_FORMED = -1

Address = tuple[str, int]

# What a message of each kind must have, and as what.
_FIELDS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "begin": {"total": int, "used": list},
    "draw": {"group": int, "index": int, "done": int, "patient": bool},
    "last_step": {"begun": int},
    "mark": {},
    "meet": {
        "value": lambda value: value,
        "lost": lambda lost: list(map(int, lost)),
        "generation": int,
        "address": lambda address: (str(address[0]), int(address[1])),
    },
}
Tell = Callable[[Message], None]


@dataclass(frozen=True)
class Run:
    """What all learners of a run say of it.

    Attributes:
        expected: how many learners begin together.
        parties: of every learner, the number of its party: those which must end with the same step. One that joins later is
            of the party if there is only one, else alone.
        minimum: with fewer living learners the run is saved and stopped.
    """

    expected: int
    parties: tuple[int, ...]
    minimum: int = 1

    @classmethod
    def told(cls, message: Message) -> Run:
        """From a registration."""
        return cls(int(message["expected"]), tuple(map(int, message["parties"])), int(message["minimum"]))


class Line(Protocol):
    """The way to one learner."""

    def send(self, message: Message) -> None:
        """A message."""

    def hang_up(self) -> None:
        """End it."""


@dataclass
class _Member:
    address: Address
    line: Line | None
    away_since: float = 0.0  # where there is no line
    since: int = NEVER_FORMED  # the generation in which it came
    healed: int = NEVER_FORMED  # the newest generation that it has taken up


@dataclass
class _Question:
    """Asked and not answered yet."""

    line: Line
    learner: int
    message: Message


@dataclass
class _Wound:
    """A change of membership that not all have taken up yet."""

    since: float
    reasons: list[str] = field(default_factory=list)


class RendezvousState:
    """The state of a rendezvous.

    Args:
        now: the time.
        tell: hears of events: died, dropped, left, joined, healed, stopping.
        info: told to everyone who asks.
    """

    def __init__(self, now: Callable[[], float], tell: Tell = lambda event: None, info: Message | None = None) -> None:
        self._now, self._tell = now, tell
        self.info = info or {}
        self._run: Run | None = None
        self.generation, self._formed_at = NEVER_FORMED, now()
        self._members: dict[int, _Member] = {}
        self._arriving: dict[int, _Member] = {}  # those that join, until they are ready
        self._newest = -1  # the largest number of a learner so far
        self._lines: dict[Line, int] = {}
        self._why_gone: dict[int, str] = {}
        self._pulse = Heartbeats(now)
        self._questions: list[_Question] = []
        self._cursor: Cursor | None = None
        self._draws_for: defaultdict[int, set[int]] = defaultdict(set)
        self._recovering = False
        self._stopped_at: int | None = None
        self._stopping = ""
        self._begun: dict[int, int] = {}  # of those that were asked to stop, the steps they have begun
        self._wound: _Wound | None = None

    @property
    def living(self) -> list[int]:
        """Who takes part."""
        return sorted(self._members)

    # What comes in -------------------------------------------------------------------------------------------------------

    def handle(self, line: Line, message: Message) -> None:
        """A message of a learner. Raises KeyError, TypeError or ValueError for what no learner sends."""
        kind = message["kind"]
        if kind == "register":
            self._register(line, message)
        elif kind == "info":
            line.send(_answer(message, info=self.info))
        elif (learner := self._lines.get(line)) is not None:
            self._pulse.heard(learner)
            if learner in self._arriving and kind in ("arrived", "meet"):
                self._arrive(learner)
            if kind == "healed" and learner in self._members:
                self._members[learner].healed = int(message["generation"])
                self._check_healed()
            elif kind == "bye":
                self._say_goodbye(learner, message["failure"])
            elif kind in _FIELDS:
                question = {name: meant(message[name]) for name, meant in _FIELDS[kind].items()}
                if kind == "last_step":
                    self._begun[learner] = question["begun"]
                self._questions.append(_Question(line, learner, {"kind": kind, "n": int(message["n"])} | question))
            elif kind not in ("beat", "arrived", "healed"):
                raise ValueError(f"no learner sends '{kind}'")
        self._settle()

    def closed(self, line: Line) -> None:
        """A connection broke; its learner may come back on another."""
        learner = self._lines.pop(line, None)
        self._questions = [question for question in self._questions if question.line is not line]
        if learner in self._arriving:
            del self._arriving[learner]
            self._pulse.forget(learner)
        elif learner is not None and learner in self._members:
            self._members[learner].line, self._members[learner].away_since = None, self._now()
            self._pulse.forget(learner)

    def died(self, learner: int, reason: str) -> None:
        """It is known that this learner's process has ended."""
        if learner in self._members:
            self._drop(learner, "died", reason)
            self._settle()
        elif learner in self._arriving:
            self._arriving[learner].line.hang_up()  # type: ignore[union-attr]

    def tick(self) -> None:
        """To be called about once a heartbeat: beat, and drop who is silent or has been away for too long."""
        for learner in self._pulse.silent():
            if learner in self._arriving:
                self._arriving[learner].line.hang_up()  # type: ignore[union-attr]
            else:
                self._drop(learner, "dropped", SILENT)
        now = self._now()
        for learner, member in list(self._members.items()):
            if member.line is None and now - member.away_since > AWAY_S:
                self._drop(learner, "died", f"its connection broke and it did not come back within {AWAY_S:g} s")
        for member in [*self._members.values(), *self._arriving.values()]:
            if member.line is not None:
                member.line.send({"kind": "beat"})
        self._settle()

    # Membership ------------------------------------------------------------------------------------------------------------

    def _register(self, line: Line, message: Message) -> None:
        number = None if message["id"] is None else int(message["id"])
        known, (host, port) = int(message["generation"]), message["address"]
        message = message | {"n": int(message["n"]), "address": (str(host), int(port))}
        self._run = self._run or Run.told(message["run"])
        if NEVER_FORMED not in (self.generation, known) and number not in self._members:
            line.send(
                _answer(
                    message,
                    dropped=self._why_gone.get(-1 if number is None else number, "it was not heard of for too long"),
                )
            )
            return
        joins = self.generation != NEVER_FORMED and known == NEVER_FORMED
        if joins and number in self._members:  # restarted faster than its death was noticed
            self._drop(number, "died", "it was started again")
        if number is None:
            self._newest += 1
            number = self._newest
        learner = number
        self._newest = max(self._newest, learner)
        if self.generation == NEVER_FORMED and known != NEVER_FORMED:
            self._recover(message, known)
        self._attach(self._arriving if joins else self._members, learner, line, message["address"])
        if self._cursor is not None:
            self._cursor.use(message.get("used", ()))
        self._questions.append(_Question(line, learner, message))
        if not joins and self.generation == NEVER_FORMED and len(self._members) == self._run.expected:
            self.generation, self._formed_at = 0, self._now()
        self._recovering = self._recovering and any(member.line is None for member in self._members.values())

    def _attach(self, where: dict[int, _Member], learner: int, line: Line, address: Address) -> None:
        if (before := where.get(learner)) and before.line is not None and before.line is not line:
            self._lines.pop(before.line, None)
            before.line.hang_up()
        where[learner] = _Member(address, line)
        self._lines[line] = learner
        self._pulse.heard(learner)

    def _arrive(self, learner: int) -> None:
        """A learner that joins is ready for the others, who hear of it only now."""
        member = self._members[learner] = self._arriving.pop(learner)
        self._event("joined", learner, "")
        self._change(f"learner {learner} joined")
        member.since = self.generation

    def _recover(self, message: Message, known: int) -> None:
        """This rendezvous was started anew in a running training: the first learner to come back tells who is there."""
        log.warning("the rendezvous takes up a run that is under way, in generation %d", known + 1)
        self.generation, self._recovering, self._formed_at = known + 1, True, self._now()
        for other, (host, port) in message["living"].items():
            self._members[int(other)] = _Member((host, port), None, self._now())
            self._newest = max(self._newest, int(other))
        if message.get("total") is not None:
            self._cursor = Cursor(int(message["total"]), message.get("used", ()))

    def _say_goodbye(self, learner: int, failure: str) -> None:
        if learner in self._arriving:
            self._event("died", learner, failure)
            self._arriving[learner].line.hang_up()  # type: ignore[union-attr]
        elif failure:
            self._drop(learner, "died", failure)
        else:
            self._remove(learner)
            self._event("left", learner, "")
            self._change("")

    def _drop(self, learner: int, event: str, reason: str) -> None:
        self._why_gone[learner] = reason
        unfinished = self._remove(learner)
        self._event(event, learner, reason, returned=len(unfinished))
        self._change(f"learner {learner} {event}: {reason}")
        minimum = self._run.minimum if self._run else 1
        if 0 < len(self._members) < minimum and not self._stopping:
            self._stopping = f"{len(self._members)} learners live, fewer than the {minimum} that the run needs"
            self._event("stopping", learner, self._stopping)
            self._to_all({"kind": "stop", "reason": self._stopping})

    def _remove(self, learner: int) -> list[int]:
        member = self._members.pop(learner)
        self._pulse.forget(learner)
        self._questions = [question for question in self._questions if question.learner != learner]
        if member.line is not None:
            self._lines.pop(member.line, None)
            member.line.hang_up()
        self._recovering = self._recovering and any(other.line is None for other in self._members.values())
        groups = self._draws_for.pop(learner, set())
        return [number for group in groups for number in self._cursor.give_back(group)] if self._cursor else []

    def _change(self, reason: str) -> None:
        """The next generation: everyone hears of it."""
        self.generation += 1
        if reason:
            self._wound = self._wound or _Wound(self._now())
            self._wound.reasons.append(reason)
        self._to_all({"kind": "membership", "reason": reason} | self._term())
        self._check_healed()

    def _check_healed(self) -> None:
        if self._wound and self._members and all(member.healed >= self.generation for member in self._members.values()):
            wound, self._wound = self._wound, None
            self._event("healed", None, "; ".join(wound.reasons), seconds=round(self._now() - wound.since, 3))

    def _event(self, event: str, learner: int | None, reason: str, **more: Any) -> None:  # noqa: ANN401
        told = {"kind": "event", "event": event, "learner": learner, "reason": reason, "living": len(self._members)}
        log.info("%s: learner %s %s", event, learner, reason)
        self._tell(told | more)

    def _term(self) -> Message:
        return {"generation": self.generation, "living": {str(i): self._members[i].address for i in self.living}}

    def _to_all(self, message: Message) -> None:
        for member in list(self._members.values()):
            if member.line is not None:
                member.line.send(message)

    # Questions -------------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Answer what can be answered now; an answer may make another possible."""
        self._settle_meeting()
        answered = True
        while answered:
            answered = False
            for question in list(self._questions):
                answer = self._answer(question)
                if answer is not None:
                    answered = True
                    self._questions.remove(question)
                    question.line.send(_answer(question.message, **answer))

    def _answer(self, question: _Question) -> Message | None:
        """What to say; None: not yet."""
        answers: dict[str, Callable[[_Question], Message | None]] = {
            "register": self._registered,
            "begin": self._begin,
            "draw": self._draw,
            "last_step": self._last_step,
            "mark": self._mark,
            "meet": lambda question: None,  # see _settle_meeting
        }
        return answers[question.message["kind"]](question)

    def _registered(self, question: _Question) -> Message | None:
        if self.generation == NEVER_FORMED:
            return None
        elapsed_s = self._now() - self._formed_at
        answer = self._term() | {
            "id": question.learner,
            "info": self.info,
            "joins": False,
            "elapsed_s": elapsed_s,
            "given": self._cursor.given if self._cursor else 0,
        }
        if (arriving := self._arriving.get(question.learner)) is not None:
            answer["living"][str(question.learner)] = arriving.address
            answer["joins"] = True
        return answer

    def _begin(self, question: _Question) -> Message:
        total, used = question.message["total"], question.message["used"]
        self._cursor = self._cursor or Cursor(total, used)  # all learners say the same
        return {}

    def _mark(self, question: _Question) -> Message:
        if self._stopped_at is None:
            self._stopped_at = self._cursor.given if self._cursor else 0
        return {"number": self._stopped_at}

    def _draw(self, question: _Question) -> Message | None:
        message = question.message
        if self._cursor is None or self._recovering:
            return None
        group = message["group"]
        self._draws_for[question.learner].add(group)
        self._cursor.done(group, message["done"])
        number = self._cursor.draw(group, message["index"])
        if number is None and message["patient"] and self._cursor.outstanding:
            return None  # something may still be given back
        return {"number": number}

    def _last_step(self, question: _Question) -> Message | None:
        """The furthest step that anybody of the party has begun: all can finish it, for nobody has gone past."""
        own = self._party(question.learner)
        party = {other for other in {*self._members, *self._begun} if self._party(other) == own}
        if not self._begun.keys() >= party & self._members.keys():
            return None
        return {"number": max(self._begun[member] for member in party & self._begun.keys())}

    def _party(self, learner: int) -> int:
        parties = self._run.parties if self._run else ()
        if learner < len(parties):
            return parties[learner]
        return 0 if set(parties) == {0} else learner

    def _settle_meeting(self) -> None:
        """All that live are here: they form the next generation, without those whom somebody here has lost."""
        here = {question.learner: question for question in self._questions if question.message["kind"] == "meet"}
        if not here or not here.keys() >= self._members.keys():
            return
        blamed = sorted(
            peer
            for question in here.values()
            for peer in question.message["lost"]
            if peer in self._members and self._members[peer].since <= question.message["generation"]
        )
        if blamed:  # alive, but cut off from another: who comes later in the order goes
            self._drop(blamed[-1], "dropped", "others cannot reach it")
            self._settle_meeting()
            return
        self.generation += 1
        self._begun.clear()
        for learner, question in here.items():
            self._members[learner].address = question.message["address"]
        values = {str(learner): question.message["value"] for learner, question in here.items()}
        for question in here.values():
            self._questions.remove(question)
            question.line.send(_answer(question.message, values=values, **self._term()))


def _answer(message: Message, **content: Any) -> Message:  # noqa: ANN401
    return {"kind": "answer", "n": message["n"]} | content
