r"""All synchronous learners in one tensor: replicas are the rows, and one batched call computes all gradients.

With $X$ the replicas as rows and $G_i = g_i(x_i)$, a step of an elementwise optimizer (SGD, Adam) is

* `StackedDPSGD`: $X \leftarrow \text{optimizer}(W_k X, G)$;
* `StackedDelayByOne`: $X \leftarrow \text{optimizer}(\bar X, G)$;
* `StackedAllreduce`: $X \leftarrow \text{optimizer}(X, \bar G)$.

Each takes its sums in the same order as the strategy that it is named after. So with equal gradients it gives the same bits as
that strategy on the virtual clock (tests/simulation/test_stacked.py), several times faster.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.optim import Optimizer

from roundelay.errors import StrategyError
from roundelay.topology import Mixing

Loss = Callable[[nn.Module, Any], Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
KEPT_ROUNDS = 8  # rounds whose running means are cached, so that a fixed graph is read only once


class StackedStrategy:
    """A strategy for all learners at once: the hooks of `Strategy`, in the same order, change stacked tensors."""

    def after_backward(self, gradients: list[Tensor]) -> None:
        """Change the gradients (learners, ...) before the user's clipping."""

    def before_step(self, weights: list[Tensor], round: int) -> None:
        """Change the weights (learners, ...) before the optimizer's step."""


class StackedAllreduce(StackedStrategy):
    """Each learner applies the mean gradient."""

    def after_backward(self, gradients: list[Tensor]) -> None:
        """G_i <- mean_j G_j."""
        for gradient in gradients:
            _replace_by_mean(gradient)


class StackedDelayByOne(StackedStrategy):
    """Each learner applies its own gradient to the mean weights."""

    def before_step(self, weights: list[Tensor], round: int) -> None:
        """x_i <- mean_j x_j."""
        for weight in weights:
            _replace_by_mean(weight)


class StackedDPSGD(StackedStrategy):
    """Each learner applies its own gradient to the mean of its neighbourhood.

    Args:
        mixing: W_k; its size is the number of learners.
    """

    def __init__(self, mixing: Mixing) -> None:
        self.mixing = mixing
        self._steps_of = functools.lru_cache(maxsize=KEPT_ROUNDS)(self._running_means)

    def before_step(self, weights: list[Tensor], round: int) -> None:
        """x_i <- sum_j W_ij x_j as a running mean, one neighbour after the other."""
        if self.mixing.size != len(weights[0]):
            raise StrategyError(
                f"the mixing {self.mixing!r} has {self.mixing.size} learners, but {len(weights[0])} train"
            )
        steps = self._steps_of(round % self.mixing.period if self.mixing.period else round)
        for weight in weights:
            before = weight.clone()
            for peers, shares in steps:
                weight.lerp_(before[peers], shares.to(weight.dtype).view(-1, *[1] * (weight.dim() - 1)))

    def _running_means(self, round: int) -> list[tuple[Tensor, Tensor]]:
        """Step k moves each learner towards its k-th neighbour by a share; a learner without a k-th neighbour stays."""
        moves: list[list[tuple[int, float]]] = []
        for rank in range(self.mixing.size):
            row = self.mixing.row(rank, round)
            total, own_moves = row.pop(rank, 0.0), []
            for peer, weight in row.items():
                total += weight
                own_moves.append((peer, weight / total))
            moves.append(own_moves)
        steps = []
        for moves_k in itertools.zip_longest(*moves):
            peers, shares = zip(*(move or (rank, 0.0) for rank, move in enumerate(moves_k)), strict=True)
            steps.append((torch.tensor(peers), torch.tensor(shares, dtype=torch.float64)))
        return steps


def _replace_by_mean(stacked: Tensor) -> None:
    """Each row <- the mean of the rows, summed in order of rank, like a collective on the virtual clock."""
    total = stacked[0].clone()
    for row in stacked[1:]:
        total += row
    stacked.copy_(total.div_(len(stacked)))


class StackedLearners:
    """n learners that step together; they start with equal weights.

    Args:
        module: the model. MLPs and CNNs without buffers gain most; an LSTM is faster in a loop.
        loss: (module, batch) -> mean loss over the batch, as `Task.loss`.
        optimizer: builds an elementwise optimizer (SGD, Adam) from stacked parameters.
        strategy: the update rule.
        size: the number of learners.

    >>> from roundelay import ring
    >>> learners = StackedLearners(
    ...     nn.Linear(3, 1), lambda module, x: module(x).square().mean(), lambda weights: torch.optim.SGD(weights, lr=0.1),
    ...     StackedDPSGD(ring(4)), size=4)
    >>> learners.step(torch.ones(4, 2, 3)).shape  # 4 learners, 2 samples each, 3 features
    torch.Size([4])
    """

    def __init__(
        self, module: nn.Module, loss: Loss, optimizer: MakeOptimizer, strategy: StackedStrategy, size: int
    ) -> None:
        self.size, self.strategy, self.round = size, strategy, 0
        self._scored = _Scored(module, loss)
        self.weights = {
            name: nn.Parameter(weight.detach().expand(size, *weight.shape).clone())
            for name, weight in self._scored.named_parameters()
        }
        self.optimizer = optimizer(list(self.weights.values()))
        self._gradients = vmap(grad_and_value(self._loss), randomness="different")

    def _loss(self, weights: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ANN401
        return functional_call(self._scored, weights, (batch,))  # type: ignore[no-any-return]

    def step(self, batch: Any, adjust: Callable[[list[Tensor]], None] | None = None) -> Tensor:  # noqa: ANN401
        """Take one step of all learners on a batch (learners, samples, ...) and return the loss of each learner.

        `adjust` may change the gradients (learners, ...) in place, as a user's clipping does between backward and step.
        """
        stacked = {name: weight.detach() for name, weight in self.weights.items()}
        gradients, losses = self._gradients(stacked, batch)
        for name, weight in self.weights.items():
            weight.grad = gradients[name]
        self.strategy.after_backward(list(gradients.values()))
        if adjust is not None:
            adjust(list(gradients.values()))
        self.strategy.before_step(list(stacked.values()), self.round)
        self.optimizer.step()
        self.round += 1
        return losses  # type: ignore[no-any-return]

    def flat(self) -> Tensor:
        """X: one row for each learner (learners, parameters)."""
        return torch.cat([weight.detach().reshape(self.size, -1) for weight in self.weights.values()], dim=1)

    def spread(self) -> float:
        """Rms distance of the replicas from their mean."""
        X = self.flat().double()
        return float((X - X.mean(dim=0)).square().sum(dim=1).mean().sqrt())

    @torch.no_grad()
    def consensus_loss(self, batch: Any) -> float:  # noqa: ANN401
        """Loss of the mean model on one batch (samples, ...)."""
        return float(self._loss({name: weight.mean(dim=0) for name, weight in self.weights.items()}, batch))

    def consensus(self) -> dict[str, Tensor]:
        """Weights of the mean model, by their names in the module."""
        return {name.removeprefix("module."): weight.detach().mean(dim=0) for name, weight in self.weights.items()}


class _Scored(nn.Module):
    """A module whose output is its loss, so that functional_call can evaluate the loss at any weights."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.module, self._score = module, loss

    def forward(self, batch: Any) -> Tensor:  # noqa: ANN401
        return self._score(self.module, batch)
