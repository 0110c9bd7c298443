"""Random faults on the virtual clock: real ADPSGD strategies in a small world, and what must hold in every schedule.

A schedule follows from one seed. Faults happen in the first seconds, learners train until `TRAIN_S`, and then only average until
`END_S`. So at the end all living learners must still take steps, and must agree.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from roundelay.clock import Process, VirtualClock
from roundelay.cluster.membership import Membership
from roundelay.errors import described
from roundelay.simulation.learners import VirtualLearner
from roundelay.strategies import ADPSGD
from roundelay.topology import family
from roundelay.transport.simulated import SimulatedNetwork

KINDS = ("kill", "cut", "join", "slow", "nan")
TOPOLOGIES = ("ring", "random-ring", "complete", "base-graph", "random-matching")
FAULTS_S, MENDED_S, TRAIN_S, END_S = 5.0, 11.0, 12.0, 32.0  # a learner takes about one step a second
TOLD_S = 0.05  # from a change of the membership until the learners are told
LR, SLOW = 0.05, 8.0
AGREED = 0.2  # distance of two learners at the end; their targets are about 1 apart
LATE_S, LATE_STEPS = 10.0, 5  # in the last LATE_S seconds every learner must take at least LATE_STEPS steps
CUT_EXCHANGE = 2.0  # an interrupted exchange changes the sum of all weights by less than this


@dataclass(frozen=True, order=True)
class SimulatedFault:
    """A fault at `at_s`: kill, cut (the link to `other`), join, slow, or nan (a gradient of NaN).

    A cut and a slow learner last until `until_s`.
    """

    at_s: float
    kind: str
    learner: int
    other: int = -1
    until_s: float = 0.0

    def __str__(self) -> str:
        which = {"cut": f" {self.learner}-{self.other}", "join": ""}.get(self.kind, f" {self.learner}")
        return f"{self.kind}{which} at {self.at_s:.2f} s" + (f" until {self.until_s:.2f} s" if self.until_s else "")


@dataclass(frozen=True)
class Schedule:
    """A small world and its faults."""

    seed: int
    learners: int
    topology: str
    max_lead: int
    latency_s: float
    faults: tuple[SimulatedFault, ...]

    @classmethod
    def drawn(cls, seed: int) -> Schedule:
        """The schedule of a seed. At least two learners are never killed and never get NaN."""
        draw = random.Random(seed)
        size = draw.randint(3, 6)
        faults, spared = [], set(draw.sample(range(size), 2))
        for _ in range(draw.randint(0, 5)):
            kind, learner = draw.choice(KINDS), draw.randrange(size)
            fault = SimulatedFault(draw.uniform(0.5, FAULTS_S), kind, learner)
            if kind == "cut":
                fault = replace(fault, other=draw.choice([each for each in range(size) if each != learner]))
            if kind in ("cut", "slow"):
                fault = replace(fault, until_s=draw.uniform(fault.at_s + 0.1, MENDED_S))
            if kind not in ("kill", "nan") or learner not in spared:
                faults.append(fault)
        topology, latency_s = draw.choice(TOPOLOGIES), draw.choice((0.0, 0.01, 0.3))
        return cls(seed, size, topology, draw.randint(1, 4), latency_s, tuple(sorted(faults)))

    def __str__(self) -> str:
        world = f"{self.learners} learners, {self.topology}, max_lead {self.max_lead}, latency {self.latency_s:g} s"
        return "; ".join([world, *map(str, self.faults)])


class _Point(nn.Module):
    """f(x) = |x - target|^2 / 2."""

    def __init__(self, start: Tensor, target: Tensor) -> None:
        super().__init__()
        self.weight, self.target = nn.Parameter(start.clone()), target


class FaultWorld:
    """Runs one schedule, and collects every invariant that does not hold.

    Attributes:
        violations: sentences; none if all invariants hold.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.violations = schedule, list[str]()
        self.clock = VirtualClock()
        self.network = SimulatedNetwork(self.clock, schedule.learners, latency_s=schedule.latency_s)
        self._draw = random.Random(schedule.seed + 1)
        self._learners: dict[int, VirtualLearner] = {}
        self._processes: dict[int, Process] = {}
        self._ended: dict[int, object] = {}
        self._steps: dict[int, list[float]] = {}  # the times of the steps of every learner
        self._poisoned: set[int] = set()  # learners that have got NaN
        self._expected = torch.zeros(4, dtype=torch.float64)  # sum of the weights of all living learners
        self._deaths, self._generation = 0, 0

    def run(self) -> list[str]:
        """Run the schedule to its end, and return the violations."""
        for rank in range(self.schedule.learners):
            self._start(rank, torch.zeros(4, dtype=torch.float64))
        for fault in self.schedule.faults:
            self._plan(fault)
        try:
            self.clock.run(until=END_S)
        except Exception as error:  # a deadlock, or an error in a strategy
            self.violations.append(f"every wait ends: {described(error)}")
            return self.violations
        self.violations += self._violations()
        return self.violations

    # The world ------------------------------------------------------------------------------------------------------------

    def _start(self, rank: int, start: Tensor) -> None:
        target = torch.tensor([self._draw.gauss(0, 1) for _ in range(4)], dtype=torch.float64)
        module = _Point(start, target)
        optimizer = torch.optim.SGD(module.parameters(), lr=LR)
        strategy = ADPSGD(family(self.schedule.topology, seed=self.schedule.seed), max_lead=self.schedule.max_lead)
        self._steps[rank] = []
        optimizer.register_step_post_hook(lambda *_: self._stepped(rank))
        self._learners[rank] = VirtualLearner(
            module,
            optimizer,
            strategy,
            self.network.transports[rank],
            lambda step: self._gradient(rank),
            lambda step: self._seconds(rank, step),
            Membership(tuple(sorted(self._learners | {rank: None})), self._generation)
            if rank >= self.schedule.learners
            else Membership.of(self.schedule.learners),
        )
        self._processes[rank] = self._learners[rank].process()
        self._ended[rank] = self.clock.spawn(self._processes[rank], f"learner {rank}")
        self._expected += start

    def _gradient(self, rank: int) -> None:
        module = self._learners[rank].module
        assert isinstance(module, _Point)
        away = module.weight.detach() - module.target
        module.weight.grad = away if self.clock.now() < TRAIN_S else torch.zeros_like(away)
        if any(fault.kind == "nan" and fault.learner == rank for fault in self._past()) and rank not in self._poisoned:
            self._poisoned.add(rank)
            module.weight.grad = torch.full_like(away, torch.nan)

    def _past(self) -> Iterator[SimulatedFault]:
        return (fault for fault in self.schedule.faults if fault.at_s <= self.clock.now())

    def _seconds(self, rank: int, step: int) -> float:
        slow = any(f.kind == "slow" and f.learner == rank and self.clock.now() < f.until_s for f in self._past())
        return random.Random(f"{self.schedule.seed} {rank} {step}").uniform(0.6, 1.4) * (SLOW if slow else 1.0)

    def _stepped(self, rank: int) -> None:
        self._steps[rank].append(self.clock.now())
        module = self._learners[rank].module
        assert isinstance(module, _Point)
        assert module.weight.grad is not None
        self._expected -= LR * module.weight.grad
        for each in self._learners.keys() - self._poisoned:
            if not bool(torch.isfinite(self._weights(each)).all()):
                self.violations.append(
                    f"weights are finite: learner {each} has non-finite weights at {self.clock.now():.2f} s"
                )
                self._poisoned.add(each)

    def _plan(self, fault: SimulatedFault) -> None:
        actions: dict[str, Callable[[], None]] = {"kill": lambda: self._kill(fault.learner), "join": self._join}
        if fault.kind == "cut":
            self.network.cut(fault.learner, fault.other, at=fault.at_s)
            self.network.mend(fault.learner, fault.other, at=fault.until_s)
            self.clock.call_later(fault.until_s + TOLD_S, self._tell)
        elif fault.kind in actions:
            self.clock.call_later(fault.at_s, actions[fault.kind])

    def _kill(self, rank: int) -> None:
        if rank in self._learners:
            self._expected -= self._weights(rank)
            del self._learners[rank]
            self._deaths += 1
            self.clock.kill(self._ended[rank], self._processes[rank])  # type: ignore[arg-type]
            self.network.lose(rank, "its process ended")
            self.clock.call_later(TOLD_S, self._tell)

    def _join(self) -> None:
        donor = min(self._learners.keys() - self._poisoned)
        start = self._weights(donor).clone()
        self._generation += 1
        self._start(self.network.add().rank, start)
        self.clock.call_later(TOLD_S, self._tell)

    def _tell(self) -> None:
        """Tell all living learners the membership, as a rendezvous does."""
        self._generation += 1
        for learner in list(self._learners.values()):
            learner.strategy.reform(Membership(tuple(sorted(self._learners)), self._generation))

    def _weights(self, rank: int) -> Tensor:
        flat = self._learners[rank].strategy.weights()
        if flat is None:  # the strategy has not begun
            return next(self._learners[rank].module.parameters()).detach()
        return flat.views[0].detach()

    # What must hold at the end ---------------------------------------------------------------------------------------------

    def _violations(self) -> Iterator[str]:
        """Violations at the end. A learner with NaN is refused by all others, so what its peers reach is not known then."""
        if self._poisoned:
            return
        for rank in self._learners:
            late = sum(at_s > END_S - LATE_S for at_s in self._steps[rank])
            if late < LATE_STEPS:
                yield f"every wait ends: learner {rank} took {late} steps in the last {LATE_S:g} s"
        metrics = {rank: learner.strategy.metrics() for rank, learner in self._learners.items()}
        if not {fault.kind for fault in self.schedule.faults} & {"cut", "kill"}:
            for rank, figures in metrics.items():
                if figures["lead_max"] > self.schedule.max_lead:
                    yield f"lead <= max_lead: learner {rank} led by {figures['lead_max']:g} of {self.schedule.max_lead}"
        weights = torch.stack([self._weights(rank) for rank in self._learners])
        apart = float((weights - weights.mean(0)).abs().max())
        if not apart <= AGREED:
            yield f"learners agree: one is {apart:.3f} from the mean, {END_S - TRAIN_S:g} s after the last gradient"
        balance = float((weights.sum(0) - self._expected).abs().max())
        cut = self._deaths + sum(figures["exchanges_failed"] for figures in metrics.values())
        under_way = len(self._learners) * apart  # exchanges of which one side is applied, at most one for each learner
        if not balance <= under_way + CUT_EXCHANGE * cut + 1e-9:
            yield f"the sum is conserved: it is off by {balance:.3f} with {cut:g} exchanges cut"


INVARIANTS = {
    "every wait ends": "all living learners take steps when faults are over, and no strategy raises",
    "weights are finite": "NaN in one learner never reaches another one; checked at every step",
    "lead <= max_lead": "unless learners were lost or refused",
    "learners agree": "when gradients have stopped, all living learners come together",
    "the sum is conserved": "living + dead at death = initial + updates + joined, but for exchanges that a fault cuts",
}


def shrunk(schedule: Schedule) -> Schedule:
    """The schedule without the faults that its violation does not need."""
    for fault in schedule.faults:
        smaller = replace(schedule, faults=tuple(each for each in schedule.faults if each != fault))
        if FaultWorld(smaller).run():
            schedule = smaller
    return schedule
