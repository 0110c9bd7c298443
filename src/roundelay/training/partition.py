"""How a run is divided: into chunks, among learners, and by checkpoint boundaries; and how far one learner is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from roundelay.chunks import Chunks
from roundelay.cluster.environment import World
from roundelay.errors import ConfigError
from roundelay.training.config import Config
from roundelay.training.data import Draw, Draws, EqualDraws, SharedCursor, SharedDraws, StaticShare


@dataclass(frozen=True)
class Partition:
    """One learner's part of the run. It is made again when the membership changes.

    Attributes:
        chunks: the samples of every chunk.
        total: chunks in the run.
        chunks_per_checkpoint: chunks between two checkpoint boundaries.
        groups: how many groups of learners there are. A learner alone is a group of one.
        group: the group of this learner.
        member: the position of this learner in its group.
        members: learners per group.
        lockstep: all learners step together on static shares, so each knows without asking which chunks are used.
        dynamic: a draw from the shared cursor says which samples a step uses.
        drawer: the number with which this group draws from the shared cursor. It does not change with the membership.
        drawers: how many groups drew at the beginning of the run.
    """

    chunks: Chunks
    total: int
    chunks_per_checkpoint: int
    groups: int
    group: int
    member: int
    members: int
    lockstep: bool
    dynamic: bool
    drawer: int
    drawers: int

    @classmethod
    def of(cls, config: Config, world: World, samples: int, learner: int, *, synchronous: bool) -> Partition:
        """The part of learner `learner` in a task with `samples` samples. `world.rank` is its rank at the moment.

        Raises ConfigError if the batch of a group is larger than the data.
        """
        members = config.group_size or world.local_size
        if members * config.data.batch > samples:
            shared = f" of each of {members} learners in a group" if members > 1 else ""
            raise ConfigError(
                f"data.batch {config.data.batch}{shared} is more than the {samples} samples of the task; "
                f"use at most {samples // members}"
            )
        group, member = divmod(world.rank, members)
        chunks = Chunks(samples, members * config.data.batch, config.seed)
        dynamic = config.data.sharding == "dynamic"
        return cls(
            chunks,
            total=math.ceil(config.budget.epochs * chunks.per_epoch - 1e-9),
            chunks_per_checkpoint=max(1, round(config.checkpoint.every_epochs * chunks.per_epoch)),
            groups=world.size // members,
            group=group,
            member=member,
            members=members,
            lockstep=synchronous and not dynamic,
            dynamic=dynamic,
            drawer=learner // members,
            drawers=config.learners // members,
        )

    @property
    def samples(self) -> int:
        """Samples in the run."""
        return self.chunks.samples_before(self.total)


@dataclass
class Position:
    """How far one learner is through the run.

    Attributes:
        partition: the learner's part of the run.
        start: in lockstep, chunks that were used before this learner counted `steps` from 0.
        steps: steps since then.
        used: numbers that were drawn from the shared cursor and used; empty in lockstep.
        boundaries: checkpoint boundaries that the learner has passed.
    """

    partition: Partition
    start: int = 0
    steps: int = 0
    used: list[int] = field(default_factory=list)
    boundaries: int = 0

    @property
    def done(self) -> int:
        """Chunks of the run that are used, as far as this learner knows."""
        if self.partition.lockstep:
            return self.start + self.steps * self.partition.groups
        return self.used[-1] + 1 if self.used else 0

    @property
    def samples_seen(self) -> int:
        """Samples that all learners have used, as far as this learner knows."""
        return self.partition.chunks.samples_before(min(self.done, self.partition.total))

    @property
    def first_unconfirmed(self) -> int:
        """In lockstep: the first chunk that is not known to be used by all learners, because some may be a step behind."""
        return self.start + max(self.steps - 1, 0) * self.partition.groups

    def samples_before_step(self, draw: Draw) -> int:
        """Samples that the run has used when the step of this draw begins; in lockstep the same for all learners."""
        return self.partition.chunks.samples_before(self.done if self.partition.lockstep else draw.number)

    def advance(self, draw: Draw) -> int | None:
        """Count a step. If the step passed a checkpoint boundary, return the chunk number of the checkpoint."""
        self.steps += 1
        if not self.partition.lockstep:
            self.used.append(draw.number)
        every, total = self.partition.chunks_per_checkpoint, self.partition.total
        boundary = self.done // every
        # At the end there may be fewer chunks than groups, so not all learners reach the last boundary. No checkpoint
        # is saved there, because all learners save at the end of the run.
        if boundary <= self.boundaries or boundary * every >= total or self.done > total:
            return None
        self.boundaries = boundary
        return self.done if self.partition.lockstep else boundary * every

    def restart_at(self, number: int) -> None:
        """In lockstep: count steps and boundaries from chunk `number` on, as all other learners do."""
        self.start, self.steps = number, 0
        self.skip_boundaries(number)

    def skip_boundaries(self, number: int) -> int:
        """Save no checkpoint at boundaries up to chunk `number`. Returns how many samples come before that chunk."""
        self.boundaries = number // self.partition.chunks_per_checkpoint
        return self.partition.chunks.samples_before(number)

    def draws(self, cursor: SharedCursor, used: list[int], done: Callable[[], int], *, joined: bool = False) -> Draws:
        """The draws of this learner from here on.

        Args:
            cursor: of the run.
            used: the draw numbers that all learners together had used before the run was resumed.
            done: returns how many draws this learner has used since it registered.
            joined: the learner joined a run that was under way, so it has no static share.
        """
        part = self.partition
        if part.lockstep:
            return EqualDraws(part.group, part.groups, part.total, start=self.start, done=self.steps)
        cursor.declare(part.total, used)
        own = None if part.dynamic or joined else StaticShare(self.start + part.drawer, part.drawers, len(self.used))
        return SharedDraws(cursor, part.drawer, done, own)
