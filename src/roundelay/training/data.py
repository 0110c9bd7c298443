"""Which chunk of samples a step uses; see `roundelay.chunks`.

Chunks are numbered through all epochs, so the number of a chunk also says how far the run is. The learning rate of a step is
computed from that number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from roundelay.chunks import Chunks

if TYPE_CHECKING:
    from roundelay.training.task import Batch, Task


class Draw(NamedTuple):
    """What a step uses: `number` counts the budget of the run, `chunk` says which samples.

    The two differ only for learners that have static shares and do not step together.
    """

    number: int
    chunk: int


class Draws(ABC):
    """The draws of one group of learners, one per step, until the budget of the run is used up."""

    @abstractmethod
    def next(self) -> Draw | None:
        """The next draw; None if there is none left. May block."""

    def more(self) -> bool:
        """Call this after `next` returned None: whether there is a draw again. May block until this is certain."""
        return False

    def __iter__(self) -> Iterator[Draw]:
        while (draw := self.next()) is not None:
            yield draw


class EqualDraws(Draws):
    """Draws of synchronous learners with static shares: step k of group j uses chunk `start + k * groups + j`.

    Args:
        group: j.
        groups: how many groups there are.
        total: chunks in the run.
        start: chunks that were used before step 0.
        done: steps that were taken already.
    """

    def __init__(self, group: int, groups: int, total: int, *, start: int = 0, done: int = 0) -> None:
        self._next, self._groups, self._total = start + done * groups + group, groups, total

    def next(self) -> Draw | None:
        """The next draw; None at the end of the budget. Never blocks."""
        number = self._next
        self._next += self._groups
        return Draw(number, number) if number < self._total else None


class SharedCursor(Protocol):
    """Counts the budget of a run for all learners. The client of the rendezvous implements it."""

    def declare(self, total: int, used: Sequence[int]) -> None:
        """Set the number of chunks in the run, and the numbers that were used before. Only the first call counts."""

    def draw(self, group: int, index: int, done: int, *, patient: bool = False) -> int | None:
        """The number of draw `index` of `group`; None if no number is left.

        Args:
            group: the group that draws.
            index: which draw of the group this is, from 0. The same index gives the same number again.
            done: how many draws the weights include. If the learner is lost, its other draws are given out again.
            patient: if all numbers are given out, wait until none can be given back any more.
        """


@dataclass(frozen=True)
class StaticShare:
    """The chunks of one group: first, first + stride, first + 2 stride, ... The first `done` of them are used already."""

    first: int
    stride: int
    done: int


class SharedDraws(Draws):
    """Draws of learners that do not step together: a shared cursor counts the budget.

    With dynamic sharding the number drawn is the chunk. With static sharding a group uses the chunks of its own share, and
    a fast group gets further through its share.

    Args:
        cursor: of the run.
        group: the group that draws. Every member asks for itself, and all members get the same answer.
        done: returns how many draws of this learner are part of its weights. If this learner is lost, its other draws
            are given to another learner.
        share: the chunks of the group; None with dynamic sharding.
    """

    def __init__(self, cursor: SharedCursor, group: int, done: Callable[[], int], share: StaticShare | None) -> None:
        self._cursor, self._group, self._done, self._share = cursor, group, done, share
        self._first = self._index = done()

    def next(self) -> Draw | None:
        """The next draw; None if no number is left at the moment. Asks the cursor."""
        number = self._cursor.draw(self._group, self._index, self._done())
        if number is None:
            return None
        chunk = number
        if self._share is not None:
            chunk = self._share.first + (self._share.done + self._index - self._first) * self._share.stride
        self._index += 1
        return Draw(number, chunk)

    def more(self) -> bool:
        """Whether a lost learner has left a number that it had drawn and not used. Waits until that is certain."""
        return self._cursor.draw(self._group, self._index, self._done(), patient=True) is not None


class _DrawDataset(Dataset[Any]):
    """Makes a batch from a draw. Runs in the worker processes of a DataLoader, if it has any."""

    def __init__(self, task: Task, chunks: Chunks, member: int, members: int) -> None:
        self._task, self._chunks, self._member, self._members = task, chunks, member, members

    def __getitem__(self, draw: Draw) -> tuple[Draw, int, Batch]:
        samples = self._chunks.samples(draw.chunk, self._member, self._members)
        generator = torch.Generator().manual_seed(hash((self._task.seed, draw.chunk, self._member)) & (2**63 - 1))
        return draw, len(samples), self._task.batch(samples, generator)


def batches(
    task: Task, chunks: Chunks, draws: Draws, *, member: int, members: int, workers: int
) -> Iterator[tuple[Draw, int, Batch]]:
    """For every draw: the draw, the number of samples, and the batch of one member.

    `workers` processes prepare the batches; with 0 the caller's thread prepares them. A batch does not depend on
    the process that prepares it, because its random numbers come from the number of its chunk.
    """
    loader = DataLoader(
        _DrawDataset(task, chunks, member, members),
        sampler=_DrawSampler(draws),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,  # a fork would not have the threads of this process
        generator=torch.Generator(),  # otherwise the loader would change the default generator of training
    )
    return iter(loader)


class _DrawSampler(Sequence[Draw]):
    """Draws as the sampler that a DataLoader takes. Its length is not known."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def __iter__(self) -> Iterator[Draw]:
        return iter(self._draws)

    def __len__(self) -> int:
        raise TypeError("the number of draws of a learner is known only at the end of the run")

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401
        raise TypeError("draws have no index: iterate over them")
