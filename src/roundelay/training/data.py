"""Which samples a step is made of: chunks of a global shuffled order, numbered over the whole run.

A *chunk* is what one group of learners (or one learner) uses in one step. Chunks are numbered through all epochs; a chunk's
number says how far the run is when it is used, so it also gives the learning rate of the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from roundelay.training.task import Batch, Task


class Chunks:
    """The samples of every chunk: epoch e is cut from a permutation that is a pure function of (seed, e).

    The chunks of an epoch are equally large to within one sample, and none is larger than `chunk`.

    >>> chunks = Chunks(samples=10, chunk=4, seed=0)
    >>> [len(chunks.samples(number)) for number in range(chunks.per_epoch)]
    [3, 3, 4]
    >>> chunks.samples_before(0), chunks.samples_before(3), chunks.samples_before(4)
    (0, 10, 13)
    """

    def __init__(self, samples: int, chunk: int, seed: int) -> None:
        self.size, self._seed = samples, seed
        self.per_epoch = -(-samples // chunk)
        self._order: tuple[int, np.ndarray[Any, np.dtype[np.int64]]] | None = None  # of the epoch asked for last

    def _permutation(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(self.size)
        return self._order[1]

    def samples_before(self, number: int) -> int:
        """How many samples come before that chunk."""
        epoch, index = divmod(number, self.per_epoch)
        return epoch * self.size + index * self.size // self.per_epoch

    def samples(self, number: int, member: int = 0, members: int = 1) -> list[int]:
        """Of that chunk, a member's share."""
        epoch, index = divmod(number, self.per_epoch)
        first, end = (i * self.size // self.per_epoch for i in (index, index + 1))
        chosen: list[int] = self._permutation(epoch)[first:end][member::members].tolist()
        return chosen


class Draw(NamedTuple):
    """What a learner does next: `number` counts the run's budget, `chunk` says which samples."""

    number: int
    chunk: int


class Draws(ABC):
    """The chunks of one group of learners, one after the other, until the budget is used up."""

    @abstractmethod
    def next(self) -> Draw | None:
        """The next one; None when the run is over."""

    def more(self) -> bool:
        """After the last one: whether another has turned up; waits until that is known."""
        return False

    def __iter__(self) -> Iterator[Draw]:
        while (draw := self.next()) is not None:
            yield draw


class EqualDraws(Draws):
    """Synchronous learners with static shares: step k of group j has chunk `start + k * groups + j`.

    Args:
        start: chunks used before this run (or its resumption with another number of groups) began.
        done: steps of it that were done already.
    """

    def __init__(self, group: int, groups: int, total: int, *, start: int = 0, done: int = 0) -> None:
        self._next, self._groups, self._total = start + done * groups + group, groups, total

    def next(self) -> Draw | None:
        """Known without asking anybody."""
        number = self._next
        self._next += self._groups
        return Draw(number, number) if number < self._total else None


class Numbers(Protocol):
    """Who counts the budget of a run; see `Rendezvous`."""

    def begin(self, total: int, used: Sequence[int]) -> None:
        """Say how large it is, and what of it is used."""

    def draw(self, group: int, index: int, done: int, *, patient: bool = False) -> int | None:
        """The next number of `group`."""


@dataclass(frozen=True)
class Shares:
    """A static share: chunks first, first + stride, ..., of which so many are done."""

    first: int
    stride: int
    done: int


class SharedDraws(Draws):
    """Learners at their own pace: the rendezvous counts the budget.

    With dynamic sharding the number drawn is the chunk; with static shares a group goes through chunks of its own, and a
    fast group gets further.

    Args:
        line: to the rendezvous.
        group: whose draws these are; all its members ask for themselves and hear the same.
        done: how many of them are used.
        share: the group's own chunks, if they are static.
    """

    def __init__(self, line: Numbers, group: int, done: Callable[[], int], share: Shares | None) -> None:
        self._line, self._group, self._done, self._share = line, group, done, share
        self._before = self._asked = done()

    def next(self) -> Draw | None:
        """The next number that nobody has."""
        number = self._line.draw(self._group, self._asked, self._done())
        if number is None:
            return None
        own = number
        if self._share is not None:
            own = self._share.first + (self._share.done + self._asked - self._before) * self._share.stride
        self._asked += 1
        return Draw(number, own)

    def more(self) -> bool:
        """What a learner that is lost had drawn and not done."""
        return self._line.draw(self._group, self._asked, self._done(), patient=True) is not None


class _Samples(Dataset[Any]):
    """What the loader's workers hold: the task, and how a draw becomes a batch."""

    def __init__(self, task: Task, chunks: Chunks, member: int, members: int) -> None:
        self._task, self._chunks, self._member, self._members = task, chunks, member, members

    def __getitem__(self, draw: Draw) -> tuple[Draw, int, Batch]:
        samples = self._chunks.samples(draw.chunk, self._member, self._members)
        generator = torch.Generator().manual_seed(hash((self._task.seed, draw.chunk, self._member)) & (2**63 - 1))
        return draw, len(samples), self._task.batch(samples, generator)


def batches(
    task: Task, chunks: Chunks, draws: Draws, *, member: int, members: int, workers: int
) -> Iterator[tuple[Draw, int, Batch]]:
    """Draws with the number of samples and the batch of one member; prepared by `workers` processes, if any.

    A batch does not depend on who prepares it: what is random in it comes from the chunk's number.
    """
    loader = DataLoader(
        _Samples(task, chunks, member, members),
        sampler=_Each(draws),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,  # this process has threads, which a fork would not have
        generator=torch.Generator(),  # the loader draws from it, and must not from the one that training draws from
    )
    return iter(loader)


class _Each(Sequence[Draw]):
    """Draws as the sampler that a DataLoader wants; its length is not known."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def __iter__(self) -> Iterator[Draw]:
        return iter(self._draws)

    def __len__(self) -> int:
        raise TypeError("how many draws a learner gets is known at the end")

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401
        raise TypeError("draws come one after the other")
