"""Runs a fault schedule: real learners, elastic logic, rendezvous and samplers on the virtual clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from roundelay import waiting
from roundelay.clock import VirtualClock
from roundelay.cluster.environment import World
from roundelay.cluster.rendezvous.members import RunSpec
from roundelay.cluster.rendezvous.messages import Message
from roundelay.errors import RendezvousLostError, described
from roundelay.learner import Learner
from roundelay.sampler import ElasticSampler
from roundelay.simulation.elastic_network import RENDEZVOUS, ElasticNetwork
from roundelay.simulation.elastic_transport import ElasticEndpoint
from roundelay.simulation.fault_schedule import EPOCHS, STEPS, Schedule, SimulatedFault
from roundelay.simulation.invariants import Invariants, weights_of
from roundelay.simulation.simulated_rendezvous import SimulatedClient, SimulatedConnection, SimulatedRendezvous
from roundelay.simulation.virtual_threads import VirtualProcess

LR, SLOW, DELAY_S = 0.05, 5.0, 1.0
WIDTH = 2  # weights of the model
NOTICED_S, AGAIN_S = 0.2, 0.5  # until the launcher notices the end of a process, and starts one again that failed
SAFETY_END_S, LIVENESS_END_S = 40.0, 150.0
COLUMN_S, COLUMNS = 0.5, 120  # of the timeline


class Point(nn.Module):
    """f(x) = |x - target|^2 / 2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, target: Tensor) -> Tensor:
        """The loss."""
        return 0.5 * (self.weight - target).square().sum()


class Participant:
    """One process of a learner.

    Attributes:
        id: of the learner.
        process: on the virtual clock.
        leaving: it is to finish early.
        learner, client, sampler: of the process, as soon as they exist.
        number: of the batch of its current step.
        finished: it has got its last consensus.
    """

    def __init__(self, world: FaultWorld, id: int, *, joins: bool) -> None:
        self._world, self.id, self._joins = world, id, joins
        self.name = f"process-{len(world.all_processes)}"
        self.process = VirtualProcess(world.clock, str(id))
        self.leaving = False
        self.learner: Learner | None = None
        self.client: SimulatedClient | None = None
        self.sampler: ElasticSampler | None = None
        self.finished = False
        self.number = -1
        self.ended = self.process.start(self._run)
        self.ended.add_done_callback(lambda ended: world.process_over(self))

    def leave(self) -> None:
        """Finish after the current step."""
        self.leaving = True

    def reconnect(self) -> None:
        """The connection to the rendezvous breaks, and the rendezvous does not notice."""
        if self.client is not None and self.process.alive and not self.process.frozen:
            connection = self.client._connection
            assert isinstance(connection, SimulatedConnection)
            connection.break_unnoticed()

    def _run(self) -> None:
        world, schedule = self._world, self._world.schedule
        self.client = client = SimulatedClient(self.process, self.id, world.rendezvous)
        endpoint = ElasticEndpoint(world.network, self.process, self.id)
        size, local_size = schedule.learners, schedule.group_size
        spec = RunSpec(size, tuple(range(size)), 1, "run")
        client.register(spec, endpoint.open(), self.id, joins=self._joins, process=self.name)
        place = World(self.id, size, self.id % local_size, local_size, client=client, endpoint=endpoint)
        self.sampler = ElasticSampler(size * STEPS, 1, EPOCHS, schedule.seed, world=place)
        module = Point()
        optimizer = torch.optim.SGD(module.parameters(), lr=LR)
        world.invariants.watch(self, module, optimizer)
        with Learner(module, optimizer, schedule.build(), world=place) as learner:
            self.learner = learner
            self._train(module, optimizer)
            learner.finish()
            if not self.leaving:
                own = weights_of(learner).clone()
                with learner.consensus():
                    world.invariants.consensus(self, own, module.weight.detach().clone())
                self.finished = True

    def _train(self, module: Point, optimizer: torch.optim.Optimizer) -> None:
        for number in self._numbers():
            if self.leaving:
                return
            self.number = number
            loss: Tensor = module.forward(self._world.target(self.id, number))
            waiting.sleep(self._world.step_s(self.id))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def _numbers(self) -> Iterator[int]:
        """The batches of this learner. Members of a super-learner need equally many, so there they are dealt out."""
        schedule = self._world.schedule
        if schedule.group_size > 1:
            yield from range(self.id, schedule.learners * STEPS * EPOCHS, schedule.learners)
            return
        assert self.sampler is not None
        for _ in self.sampler.remaining_epochs():
            for _ in self.sampler:
                yield self.sampler._drawn[-1]


class FaultWorld:
    """Runs one schedule, and collects every invariant that does not hold.

    Args:
        schedule: what happens.

    Attributes:
        invariants: with the violations.
        participants: the current process of every learner.
        log: (time, learner, what happened), for the timeline.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.clock = VirtualClock()
        self.network = ElasticNetwork(self.clock, latency_s=schedule.latency_s, seed=schedule.seed)
        self.log: list[tuple[float, int, str]] = []
        self.rendezvous = SimulatedRendezvous(self.clock, self.network, self._event)
        self.invariants = Invariants(self)
        self._draw = random.Random(f"world {schedule.seed}")
        self.participants: dict[int, Participant] = {}
        self.all_processes: list[Participant] = []
        self._slow: set[int] = set()
        self._nan: set[int] = set()
        self.poisoned: set[str] = set()  # names of processes that have got NaN
        self.events: list[Message] = []

    def run(self) -> list[str]:
        """Run the schedule to its end, and return the violations."""
        for learner in range(self.schedule.learners):
            self._start(learner, joins=False)
        for fault in self.schedule.faults:
            self.clock.call_later(fault.at_s, lambda fault=fault: self._begin(fault))  # type: ignore[misc]
        end_s = LIVENESS_END_S if self.schedule.mode == "liveness" else SAFETY_END_S
        try:
            while self.clock.now() < end_s and any(each.process.alive for each in self.participants.values()):
                self.clock.run(until=min(end_s, self.clock.now() + 1.0))
            self.invariants.at_end()
        except Exception as error:
            self.invariants.violated("every wait ends", f"{described(error)}")
        finally:
            self.clock._events.clear()
            self.network.on_applied = lambda *_: None  # what is under way now is taken back
            for each in self.all_processes:
                each.process.end()
        return self.invariants.violations

    # What the participants ask ---------------------------------------------------------------------------------------------

    def target(self, learner: int, number: int) -> Tensor:
        """The target of a batch; NaN once if that is planned."""
        if learner in self._nan:
            self._nan.discard(learner)
            self.poisoned.add(self.participants[learner].name)
            return torch.full((WIDTH,), torch.nan, dtype=torch.float64)
        draw = random.Random(number)
        return torch.tensor([draw.gauss(0, 1) for _ in range(WIDTH)], dtype=torch.float64)

    def step_s(self, learner: int) -> float:
        """How long the next step computes."""
        return self._draw.uniform(0.6, 1.4) * (SLOW if learner in self._slow else 1.0)

    def process_over(self, participant: Participant) -> None:
        """A process has ended by itself, or was killed."""
        self.clock.call_later(0.0, participant.process.end)
        self.note(participant.id, "ended")
        if participant.ended.cancelled() or participant.ended.exception() is not None:
            self.invariants.process_failed(participant)
            name, reason = participant.name, "killed by SIGKILL"
            if self.schedule.launched:
                self.clock.call_later(NOTICED_S, lambda: self._tell_died(participant.id, reason, name))
        error = None if participant.ended.cancelled() else participant.ended.exception()
        if (
            isinstance(error, RendezvousLostError) and self.schedule.group_size == 1
        ):  # the rendezvous was away: the launcher tries again
            self.clock.call_later(AGAIN_S, lambda: self._start(participant.id, joins=participant._joins))

    def _tell_died(self, learner: int, reason: str, name: str) -> None:
        if self.rendezvous.process.alive:
            self.rendezvous.state.died(None, reason, name)

    def note(self, learner: int, what: str) -> None:
        """Write an event down for the timeline."""
        self.log.append((self.clock.now(), learner, what))

    def _event(self, event: Message) -> None:
        self.events.append(event | {"at_s": self.clock.now()})
        self.note(-1 if event["learner"] is None else event["learner"], f"{event['event']} {event['reason']}")

    # Faults --------------------------------------------------------------------------------------------------------------

    def _start(self, learner: int, *, joins: bool) -> None:
        if learner in self.participants and self.participants[learner].process.alive:
            return
        self.note(learner, "started")
        self.participants[learner] = Participant(self, learner, joins=joins)
        self.all_processes.append(self.participants[learner])

    def _begin(self, fault: SimulatedFault) -> None:
        self.note(fault.learner, str(fault))
        begin, end = self._actions(fault)
        begin()
        if end is not None:
            self.clock.call_later(fault.until_s - fault.at_s, end)

    def _actions(self, fault: SimulatedFault) -> tuple[Callable[[], object], Callable[[], object] | None]:
        """What begins a fault, and what ends it."""
        network, learner, participant = self.network, fault.learner, self.participants[fault.learner]
        process = participant.process
        everyone = [each.process for each in self.participants.values()]
        link, links = (learner, fault.other), self._links(fault)
        cut = partial(_each, network.cut_link, links), partial(_each, network.mend_link, links)
        actions: dict[str, tuple[Callable[[], object], Callable[[], object] | None]] = {
            "kill": (process.end, None),
            "restart": (process.end, lambda: self._start(learner, joins=True)),
            "freeze": (process.freeze, process.wake),
            "freeze-all": (
                partial(_all, [each.freeze for each in everyone]),
                partial(_all, [each.wake for each in everyone]),
            ),
            "join": (lambda: self._start(max(self.participants) + 1, joins=True), None),
            "leave": (participant.leave, None),
            "slow": (lambda: self._slow.add(learner), lambda: self._slow.discard(learner)),
            "nan": (lambda: self._nan.add(learner), None),
            "corrupt": (lambda: network.corrupt.add(link), None),
            "reconnect": (participant.reconnect, None),
            "rendezvous": (self.rendezvous.die, self.rendezvous.start),
            "stall": (self.rendezvous.process.freeze, self.rendezvous.process.wake),
            "delay": (lambda: network.delay_link(*link, DELAY_S), lambda: network.delay_link(*link, 0.0)),
            "cut": cut,
            "one-way": cut,
            "partition": cut,
        }
        return actions[fault.kind]

    def _links(self, fault: SimulatedFault) -> list[tuple[int, int]]:
        if fault.kind == "one-way":
            return [(fault.learner, fault.other)]
        if fault.kind == "cut":
            return [(fault.learner, fault.other), (fault.other, fault.learner)]
        others = [other for other in (*self.participants, RENDEZVOUS) if other != fault.learner]
        return [link for other in others for link in ((fault.learner, other), (other, fault.learner))]


def _each(change: Callable[[int, int], None], links: list[tuple[int, int]]) -> None:
    for link in links:
        change(*link)


def _all(actions: list[Callable[[], None]]) -> None:
    for action in actions:
        action()


def shrunk(schedule: Schedule) -> Schedule:
    """The schedule without the faults that its first violation does not need."""
    wanted = {violation.partition(":")[0] for violation in FaultWorld(schedule).run()}
    for fault in schedule.faults:
        smaller = replace(schedule, faults=tuple(each for each in schedule.faults if each != fault))
        found = {violation.partition(":")[0] for violation in FaultWorld(smaller).run()}
        if wanted & found:
            schedule = smaller
    return schedule


def timeline(world: FaultWorld) -> str:
    """A picture in text: a row for each learner, a column for each `COLUMN_S`."""
    end_s = max((at_s for at_s, _, what in world.log if what != "ended"), default=0.0)
    columns = min(int(end_s / COLUMN_S) + 1, COLUMNS)
    rows = {learner: [" "] * columns for learner in sorted(world.participants)}
    for participant in world.all_processes:
        times = [
            at_s for at_s, learner, what in world.log if learner == participant.id and what in ("started", "ended")
        ]
        for began_s, ended_s in itertools.zip_longest(times[::2], times[1::2], fillvalue=end_s):
            for column in range(int(began_s / COLUMN_S), min(int(ended_s / COLUMN_S) + 1, columns)):
                rows[participant.id][column] = "-"
    for at_s, learner, what in world.log:
        column, row = int(at_s / COLUMN_S), rows.get(learner)
        if what == "step" and row is not None and column < columns and row[column] == "-":
            row[column] = "#"
    lines = [f"{'seconds':>10} " + "".join(f"{int(s * COLUMN_S):<10}" for s in range(0, columns, 10))]
    lines += [f"learner {learner:>2} {''.join(row)}" for learner, row in rows.items()]
    told = [
        f"{at_s:8.2f} s  {'' if learner < 0 else f'learner {learner}: '}{what}"
        for at_s, learner, what in world.log
        if what != "step"
    ]
    return "\n".join([*lines, "(# steps, - lives without a step)", *told])
