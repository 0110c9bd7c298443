r"""The synchronous family, all learners at once: replicas are stacked, gradients are batched, a round is one matrix.

With $X$ the replicas as rows and $G_i = g_i(x_i)$, one step of momentum SGD (or any optimizer that treats every number by
itself) is $X \leftarrow \text{optimizer}(W_k X, G)$. The rows of W and what becomes of G are the strategy's:

* `DPSGD`: W_k of its mixing;
* `DelayByOne`: W = J/n, or W = I and $\bar G_{k-1}$ in place of $G_k$ where gradients are delayed;
* `Allreduce`: W = I and $\bar G$;
* `SuperLearner`: the mean of G inside each group, and the rows of the strategy between, once per group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.optim import Optimizer

from roundelay.errors import StrategyError
from roundelay.strategies import DPSGD, Allreduce, DelayByOne, Strategy, SuperLearner
from roundelay.topology import Mixing

Loss = Callable[[nn.Module, Any], Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class StackedLearners:
    """n learners with equal weights at first; the same numbers as one `VirtualLearner` each, up to rounding.

    Args:
        module: the model; MLPs and CNNs without state gain most, an LSTM is faster in a loop.
        loss: (module, batch) -> mean loss over the batch, as `Task.loss`.
        optimizer: builds one that treats every number by itself (SGD, Adam), from stacked parameters.
        strategy: one of the synchronous ones, not attached to anything.
        size: how many learners.

    >>> from roundelay import DPSGD, ring
    >>> learners = StackedLearners(
    ...     nn.Linear(3, 1), lambda module, x: module(x).square().mean(), lambda weights: torch.optim.SGD(weights, lr=0.1),
    ...     DPSGD(ring(4)), size=4)
    >>> learners.step(torch.ones(4, 2, 3)).shape  # 4 learners, 2 samples each, 3 features
    torch.Size([4])
    """

    def __init__(self, module: nn.Module, loss: Loss, optimizer: MakeOptimizer, strategy: Strategy, size: int) -> None:
        self.size, self.strategy, self.round = size, strategy, 0
        self._scored = _Scored(module, loss)
        self.weights = {
            name: nn.Parameter(weight.detach().expand(size, *weight.shape).clone())
            for name, weight in self._scored.named_parameters()
        }
        self.optimizer = optimizer(list(self.weights.values()))
        self._gradients = vmap(grad_and_value(self._loss), randomness="different")
        self._mixing, self._group = _rows(strategy, size)
        self._reduce = _reduction(strategy)
        self._fixed = self._matrix(0) if self._mixing is not None and self._mixing.period == 1 else None

    def _loss(self, weights: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ANN401
        return functional_call(self._scored, weights, (batch,))  # type: ignore[no-any-return]

    def step(self, batch: Any, adjust: Callable[[list[Tensor]], None] | None = None) -> Tensor:  # noqa: ANN401
        """One step of everyone on a batch with the learners in front (n, ...); the loss of each.

        `adjust` may change the gradients in place (n, ...), as a user's clipping would between backward and step.
        """
        gradients, losses = self._gradients({name: w.detach() for name, w in self.weights.items()}, batch)
        for name, weight in self.weights.items():
            weight.grad = gradients[name]
        stacked = list(gradients.values())
        self._reduce(stacked, self._group)
        if adjust is not None:
            adjust(stacked)
        self._mix()
        self.optimizer.step()
        self.round += 1
        return losses  # type: ignore[no-any-return]

    @torch.no_grad()
    def _mix(self) -> None:
        if self._mixing is None:
            return
        W = self._matrix(self.round) if self._fixed is None else self._fixed
        for weight in self.weights.values():
            flat = weight.reshape(self.size, -1)
            mixed = W.to(weight.dtype) @ flat[:: self._group]
            flat.copy_(mixed.repeat_interleave(self._group, dim=0))

    def _matrix(self, round: int) -> Tensor:
        assert self._mixing is not None
        return torch.from_numpy(self._mixing.matrix(round))

    @property
    def mixes(self) -> bool:
        """Whether weights are averaged, and not only gradients."""
        return self._mixing is not None

    def flat(self) -> Tensor:
        """X: one row a learner (n, parameters)."""
        return torch.cat([weight.detach().reshape(self.size, -1) for weight in self.weights.values()], dim=1)

    def spread(self) -> float:
        """Rms distance of replicas from consensus."""
        X = self.flat().double()
        return float((X - X.mean(dim=0)).square().sum(dim=1).mean().sqrt())

    @torch.no_grad()
    def consensus_loss(self, batch: Any) -> float:  # noqa: ANN401
        """Loss of the mean model on one batch without a learners' axis."""
        return float(self._loss({name: weight.mean(dim=0) for name, weight in self.weights.items()}, batch))

    def consensus(self) -> dict[str, Tensor]:
        """Weights of the mean model, by the names that the module gave them."""
        return {name.removeprefix("module."): weight.detach().mean(dim=0) for name, weight in self.weights.items()}


class _Scored(nn.Module):
    """A module whose output is its loss, so that functional_call can put any weights under any task's loss."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.module, self._score = module, loss

    def forward(self, batch: Any) -> Tensor:  # noqa: ANN401
        return self._score(self.module, batch)


class _Mean(Mixing):
    """J/n."""

    def __init__(self, size: int) -> None:
        super().__init__("mean", size, period=1)

    def row(self, rank: int, round: int = 0) -> dict[int, float]:
        """All the same."""
        return dict.fromkeys(range(self.size), 1 / self.size)


def _rows(strategy: Strategy, size: int) -> tuple[Mixing | None, int]:
    """The mixing of a strategy, None where weights are not mixed, and how many learners act as one in it."""
    if isinstance(strategy, SuperLearner):
        group = strategy.group_size or size
        if size % group:
            raise StrategyError(f"group_size {group} must divide the {size} learners")
        return _rows(strategy.between, size // group)[0], group
    if isinstance(strategy, DPSGD):
        if strategy.mixing.size != size:
            raise StrategyError(f"the mixing {strategy.mixing!r} is for {strategy.mixing.size} learners, not {size}")
        return strategy.mixing, 1
    if isinstance(strategy, DelayByOne):
        return (_Mean(size) if strategy.delayed == "weights" else None), 1
    if isinstance(strategy, Allreduce):
        return None, 1
    raise StrategyError(
        f"{type(strategy).__name__} cannot be stacked, for its learners do not step together; "
        "run it with roundelay.simulation.VirtualLearner"
    )


Reduction = Callable[[list[Tensor], int], None]


def _reduction(strategy: Strategy) -> Reduction:
    if isinstance(strategy, Allreduce):
        return lambda gradients, _: _mean_of_groups(gradients, len(gradients[0]))
    if isinstance(strategy, SuperLearner):
        return _mean_of_groups
    if isinstance(strategy, DelayByOne) and strategy.delayed == "gradients":
        return _Delayed()
    return lambda gradients, _: None


def _mean_of_groups(gradients: list[Tensor], group: int) -> None:
    """G_i <- the mean of i's group of consecutive learners."""
    for gradient in gradients:
        grouped = gradient.view(-1, group, *gradient.shape[1:])
        grouped.copy_(grouped.mean(dim=1, keepdim=True).expand_as(grouped))


class _Delayed:
    """G_k <- the mean of G_{k-1}; zero at first."""

    def __init__(self) -> None:
        self._last: list[Tensor] = []

    def __call__(self, gradients: list[Tensor], _: int) -> None:
        fresh = [gradient.mean(dim=0, keepdim=True) for gradient in gradients]
        for gradient, last in zip(gradients, self._last or [torch.zeros_like(g) for g in fresh], strict=True):
            gradient.copy_(last.expand_as(gradient))
        self._last = fresh
