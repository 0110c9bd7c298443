"""Fault schedules: a small world, and what goes wrong in it. Everything follows from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from roundelay.simulation.elastic_network import RENDEZVOUS
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne, LocalSGD, Strategy, SuperLearner
from roundelay.topology import Family, family

Mode = Literal["safety", "liveness"]
MODES: tuple[Mode, ...] = ("safety", "liveness")
FAULTS_S, MENDED_S = 7.0, 13.0  # faults begin before the first, and end before the second (with `liveness`)
GROUP = 2  # learners in a super-learner
LOCAL_STEPS = 3
STEPS, EPOCHS = 6, 2  # steps of a learner in an epoch, if all learners are equally fast

STRATEGIES: dict[str, Callable[[Family, int], Strategy]] = {
    "adpsgd": lambda topology, lead: ADPSGD(topology, max_lead=lead),
    "dpsgd": lambda topology, lead: DPSGD(topology),
    "delay-by-one": lambda topology, lead: DelayByOne(),
    "delayed-gradients": lambda topology, lead: DelayByOne(delayed="gradients"),
    "allreduce": lambda topology, lead: Allreduce(),
    "local-sgd": lambda topology, lead: LocalSGD(topology, every=LOCAL_STEPS),
    "local-sgd-overlap": lambda topology, lead: LocalSGD(topology, every=LOCAL_STEPS, overlap=True),
    "local-sgd-int8": lambda topology, lead: LocalSGD(topology, every=LOCAL_STEPS, compress="int8"),
    "super-adpsgd": lambda topology, lead: SuperLearner(ADPSGD(topology, max_lead=lead), group_size=GROUP),
    "super-dpsgd": lambda topology, lead: SuperLearner(DPSGD(topology), group_size=GROUP),
}
TOPOLOGIES = ("ring", "random-ring", "complete", "base-graph", "random-matching")
KINDS = {
    "kill": "the process ends",
    "restart": "the process ends, and is started again",
    "freeze": "the process stands still",
    "freeze-all": "the processes of all learners stand still",
    "join": "another learner joins",
    "leave": "a learner finishes early and leaves",
    "slow": "steps take five times as long",
    "cut": "nothing passes between two learners",
    "one-way": "nothing passes from one learner to another",
    "partition": "nothing passes between a learner, all others and the rendezvous",
    "delay": "messages from one learner to another take a second longer",
    "reconnect": "a learner connects to the rendezvous again, before the rendezvous has noticed that the connection broke",
    "corrupt": "the next weights from one learner to another are altered on the way",
    "nan": "a gradient is NaN",
    "rendezvous": "the rendezvous dies, and comes back with an empty memory",
    "stall": "the rendezvous stands still",
}
LASTING = {"restart", "freeze", "freeze-all", "slow", "cut", "one-way", "partition", "delay", "rendezvous", "stall"}
OF_NO_LEARNER = {"join", "freeze-all", "rendezvous", "stall"}
UNNOTICED = {"kill", "restart", "freeze", "freeze-all", "partition"}
REGISTERED_S = 3.0  # all learners have registered
HARMLESS = {"join", "slow", "delay"}  # no learner is lost, and no exchange fails


@dataclass(frozen=True, order=True)
class SimulatedFault:
    """A fault of one of `KINDS` at `at_s`; `other` is the second learner of a link.

    What lasts ends at `until_s`; a process is started again then.
    """

    at_s: float
    kind: str
    learner: int
    other: int = RENDEZVOUS
    until_s: float = 0.0

    def __str__(self) -> str:
        which = "" if self.kind in OF_NO_LEARNER else f" {self.learner}"
        which += f"-{self.other}" if self.other != RENDEZVOUS else ""
        return f"{self.kind}{which} at {self.at_s:.2f} s" + (f" until {self.until_s:.2f} s" if self.until_s else "")


@dataclass(frozen=True)
class Schedule:
    """A small world and its faults.

    Attributes:
        launched: a launcher tells the rendezvous when a process has ended; otherwise it is found out by heartbeats.
    """

    seed: int
    mode: Mode
    strategy: str
    learners: int
    topology: str
    max_lead: int
    latency_s: float
    launched: bool
    faults: tuple[SimulatedFault, ...]

    @classmethod
    def drawn(cls, seed: int) -> Schedule:
        """The schedule of a seed. At least one learner (of super-learners: one group) is never killed and gets no NaN."""
        draw = random.Random(f"schedule {seed}")
        strategy = draw.choice(list(STRATEGIES))
        grouped = strategy.startswith("super")
        size = draw.choice((4, 6)) if grouped else draw.randint(2, 5)
        topology = "complete" if strategy == "local-sgd-int8" else draw.choice(TOPOLOGIES)
        drawn = cls(
            seed,
            draw.choice(MODES),
            strategy,
            size,
            topology,
            draw.randint(1, 4),
            draw.choice((0.001, 0.01, 0.5 if strategy == "adpsgd" else 0.2)),  # 0.5: exchanges are longer than steps
            draw.random() < 0.5,
            (),
        )
        faults = [drawn._fault(draw, grouped=grouped) for _ in range(draw.randint(0, 4))]
        spared = set(range(GROUP)) if grouped else {draw.randrange(size)}
        kept = (each for each in faults if each is not None and not drawn._harms(each, spared))
        return replace(drawn, faults=tuple(sorted(kept)))

    def _fault(self, draw: random.Random, *, grouped: bool) -> SimulatedFault | None:
        kind, learner, at_s = draw.choice(list(KINDS)), draw.randrange(self.learners), draw.uniform(0.2, FAULTS_S)
        if not self.launched and kind in UNNOTICED:  # before it has registered, only a launcher knows of it
            at_s = max(at_s, REGISTERED_S)
        fault = SimulatedFault(at_s, kind, learner)
        if kind in LASTING:
            ends = MENDED_S if self.mode == "liveness" else 3 * MENDED_S
            fault = replace(fault, until_s=draw.uniform(at_s + 0.1, ends))
        if kind in ("cut", "one-way", "delay", "corrupt"):
            fault = replace(fault, other=draw.choice([each for each in range(self.learners) if each != learner]))
        if grouped and kind in ("join", "restart", "leave"):  # a learner cannot join a super-learner
            return None
        if kind == "leave" and self.build().synchronous:  # it stays until all others have finished, too
            return None
        if kind == "nan" and not self.in_pairs:  # others mix gradients, or average NaN themselves
            return None
        return fault

    @staticmethod
    def _harms(fault: SimulatedFault, spared: set[int]) -> bool:
        return fault.kind in ("kill", "restart", "nan", "leave", "freeze", "partition") and fault.learner in spared

    @property
    def harmless(self) -> bool:
        """Whether no learner is lost and no exchange fails."""
        return {fault.kind for fault in self.faults} <= HARMLESS

    @property
    def in_pairs(self) -> bool:
        """Whether learners average in pairs at any time."""
        return isinstance(self.build(), ADPSGD)

    @property
    def group_size(self) -> int:
        """Learners in a super-learner; 1 if there are none."""
        return GROUP if self.strategy.startswith("super") else 1

    def same_group(self, a: int, b: int) -> bool:
        """Whether two learners are members of one super-learner."""
        return self.group_size > 1 and a // self.group_size == b // self.group_size

    def build(self) -> Strategy:
        """A new strategy for one learner."""
        return STRATEGIES[self.strategy](family(self.topology, seed=self.seed), self.max_lead)

    def __str__(self) -> str:
        world = f"{self.mode}: {self.learners} learners, {self.strategy}, {self.topology}, max_lead {self.max_lead}"
        world += f", latency {self.latency_s:g} s, {'with' if self.launched else 'without'} a launcher"
        return "; ".join([world, *map(str, self.faults)])
