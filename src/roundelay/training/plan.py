"""How a run is divided: among learners, into chunks, and by the marks at which learners save."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from roundelay.launch import World
from roundelay.training.config import Config
from roundelay.training.coordinator import Coordinator
from roundelay.training.data import Chunks, Draws, EqualDraws, SharedDraws


class Position(NamedTuple):
    """How far a learner is.

    Attributes:
        start: chunks that were used before learners began to count `steps` for themselves.
        steps: since then.
        used: numbers drawn from the coordinator and used; empty where learners count for themselves.
    """

    start: int = 0
    steps: int = 0
    used: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """One learner's view of the run.

    Attributes:
        chunks: the samples, by number.
        total: chunks in the run.
        every: chunks between marks.
        groups: how many step on their own.
        group: this learner's.
        member: its place in it.
        members: how many a group has.
        in_step: learners step together on static shares, so that they know everything without asking.
        dynamic: the number drawn says which samples.
    """

    chunks: Chunks
    total: int
    every: int
    groups: int
    group: int
    member: int
    members: int
    in_step: bool
    dynamic: bool

    @classmethod
    def of(cls, config: Config, world: World, samples: int) -> Plan:
        """For a task with so many samples."""
        members = config.group_size or world.local_size
        group, member = divmod(world.rank, members)
        chunks = Chunks(samples, members * config.data.batch, config.seed)
        dynamic = config.data.sharding == "dynamic"
        return cls(
            chunks,
            total=math.ceil(config.budget.epochs * chunks.per_epoch - 1e-9),
            every=max(1, round(config.checkpoint.every_epochs * chunks.per_epoch)),
            groups=world.size // members,
            group=group,
            member=member,
            members=members,
            in_step=config.synchronous and not dynamic,
            dynamic=dynamic,
        )

    def number_of_step(self, position: Position) -> int:
        """Where learners step together: the number of the first chunk of the next step, for all of them."""
        return position.start + position.steps * self.groups

    def draws(self, position: Position, used: list[int], coordinator: Coordinator) -> Draws:
        """What comes next for this learner's group, `used` being what all learners have used."""
        if self.in_step:
            return EqualDraws(self.group, self.groups, self.total, start=position.start, done=position.steps)
        coordinator.begin(self.total, used)
        start, done = position.start, len(position.used)
        return SharedDraws(coordinator, self.group, self.groups, dynamic=self.dynamic, start=start, done=done)
