"""How a run is divided: among learners, into chunks, and by the marks at which learners save."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from roundelay.cluster.environment import World
from roundelay.training.config import Config
from roundelay.training.data import Chunks, Draws, EqualDraws, Numbers, SharedDraws, Shares


class Position(NamedTuple):
    """How far a learner is.

    Attributes:
        start: chunks that were used before learners began to count `steps` for themselves.
        steps: since then.
        used: numbers drawn from the rendezvous and used; empty where learners count for themselves.
    """

    start: int = 0
    steps: int = 0
    used: tuple[int, ...] = ()


@dataclass(frozen=True)
class Partition:
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
        drawer: under which number this learner's group draws, and
        drawers: how many there were at first; neither changes when others come and go.
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
    drawer: int
    drawers: int

    @classmethod
    def of(cls, config: Config, world: World, samples: int, learner: int) -> Partition:
        """For a task with so many samples; the learner's number stays, its rank in the world may change."""
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
            drawer=learner // members,
            drawers=config.learners // members,
        )

    def number_of_step(self, position: Position) -> int:
        """Where learners step together: the number of the first chunk of the next step, for all of them."""
        return position.start + position.steps * self.groups

    def draws(
        self, position: Position, used: list[int], line: Numbers, done: Callable[[], int], *, joined: bool = False
    ) -> Draws:
        """What comes next for this learner's group.

        Args:
            position: how far the learner is.
            used: what all learners had used before.
            line: to the rendezvous.
            done: how many draws this learner has used since it registered.
            joined: it came later, so that no static share is its own.
        """
        if self.in_step:
            return EqualDraws(self.group, self.groups, self.total, start=position.start, done=position.steps)
        line.begin(self.total, used)
        own = None if self.dynamic or joined else Shares(position.start + self.drawer, self.drawers, len(position.used))
        return SharedDraws(line, self.drawer, done, own)
