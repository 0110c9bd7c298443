"""A small problem with real data: handwritten digits, an MLP, and a fixed shard of the data for each learner."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roundelay.training.tiny import digits_dataset

Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """Training and held-out examples, and the sizes of the hidden layers."""

    train: Examples
    held_out: Examples
    hidden: tuple[int, ...]

    def module(self, seed: int) -> nn.Module:
        """A ReLU MLP; equal seeds give equal weights."""
        classes = int(self.train[1].max()) + 1
        sizes = (self.train[0].shape[1], *self.hidden, classes)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers: list[nn.Module] = []
            for inputs, outputs in itertools.pairwise(sizes):
                layers += [nn.Linear(inputs, outputs), nn.ReLU()]
            return nn.Sequential(*layers[:-1])

    def shards(self, learners: int, seed: int) -> Shards:
        """Equal random parts of the training examples, one for each learner."""
        order = torch.randperm(len(self.train[1]), generator=torch.Generator().manual_seed(seed))
        size = len(order) // learners
        return Shards(self.train, order[: size * learners].view(learners, size), seed)


class Shards:
    """Batches that each learner draws with replacement from its own shard; batch k is a function of (seed, k) alone.

    Args:
        examples: all examples.
        of: indices into the examples (learners, shard size).
        seed: of the draws.
    """

    def __init__(self, examples: Examples, of: Tensor, seed: int) -> None:
        self.examples, self.of, self.seed = examples, of, seed

    def batch(self, step: int, size: int) -> Examples:
        """One batch for each learner, as one tensor (learners, size, ...)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        drawn = torch.randint(self.of.shape[1], (len(self.of), size), generator=generator)
        chosen = self.of.gather(1, drawn)
        return self.examples[0][chosen], self.examples[1][chosen]

    def own(self, learner: int, step: int, size: int) -> Examples:
        """The batch of one learner, for learners that do not step together; other samples than in `batch`."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 65_537 + learner)
        chosen = self.of[learner, torch.randint(self.of.shape[1], (size,), generator=generator)]
        return self.examples[0][chosen], self.examples[1][chosen]


def loss(module: nn.Module, batch: Examples) -> Tensor:
    """Mean cross-entropy."""
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


@functools.cache
def digits() -> Problem:
    """1797 handwritten digits of 8 x 8 pixels (scikit-learn's copy of the UCI test set); every sixth is held out.

    Raises MissingExtraError if scikit-learn is not installed.
    """
    x, y = digits_dataset()
    held_out = torch.arange(len(y)) % 6 == 5
    return Problem((x[~held_out], y[~held_out]), (x[held_out], y[held_out]), hidden=(32,))
