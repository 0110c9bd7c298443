"""The mean of saved states: what is evaluated while asynchronous learners train on, and what other learners resume from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

State = dict[str, Any]


def mean_module(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of modules' state dictionaries.

    Floating tensors are averaged, BatchNorm's variance by its second moment; the others are the first one's.
    """
    moments = [_with_second_moments(state) for state in states]
    mean: dict[str, Tensor] = mean_tree(moments)
    for name, running_mean, variance in _statistics(mean):
        mean[name] = (variance - running_mean**2).clamp_(min=0)
    return mean


def _with_second_moments(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state | {name: variance + mean**2 for name, mean, variance in _statistics(state)}


def _statistics(state: dict[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """Of every norm: the name of its variance, its mean, its variance."""
    suffix = "running_var"
    means = {name: name.removesuffix(suffix) + "running_mean" for name in state if name.endswith(suffix)}
    return [(name, state[mean], state[name]) for name, mean in means.items() if mean in state]


def mean_tree(trees: Sequence[Any]) -> Any:  # noqa: ANN401
    """Trees of equal shape as one: floating tensors averaged, everything else as in the first.

    >>> import torch
    >>> mean_tree([{"x": torch.tensor(1.0), "steps": 3}, {"x": torch.tensor(2.0), "steps": 5}])
    {'x': tensor(1.5000), 'steps': 3}
    """
    first = trees[0]
    if isinstance(first, Tensor):
        if not first.is_floating_point():
            return first
        return (sum((tree.double() for tree in trees[1:]), start=first.double()) / len(trees)).to(first.dtype)
    if isinstance(first, dict):
        return {key: mean_tree([tree[key] for tree in trees]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(mean_tree(list(items)) for items in zip(*trees, strict=True))
    return first
