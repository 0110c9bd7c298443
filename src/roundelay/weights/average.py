"""Means over learners: of module states, with BatchNorm's variances averaged correctly, and of nested states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

_MEAN, _VARIANCE = "running_mean", "running_var"  # torch's names for the buffers of a normalisation layer


def mean_module(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several `state_dict`s of one module.

    Floating-point tensors are averaged, BatchNorm's variances by their second moments. Other tensors are taken from the
    first state.
    """
    mean: dict[str, Tensor] = mean_tree([with_second_moments(state) for state in states])
    return with_variances(mean)


def with_second_moments(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace every running variance by the second moment E[x^2] = var + mean^2. The tensors given are not changed.

    The mean of variances is wrong if the learners' means differ; the mean of second moments is right.
    `with_variances` is the inverse.
    """
    return dict(state) | {name: variance + mean**2 for name, mean, variance in _norms(state)}


def with_variances(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace every second moment that `with_second_moments` has put in by the variance E[x^2] - mean^2, at least 0."""
    return dict(state) | {name: (moment - mean**2).clamp_(min=0) for name, mean, moment in _norms(state)}


def _norms(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """For every normalisation layer: the name of its `running_var`, its `running_mean`, its `running_var`."""
    for name, variance in state.items():
        layer, _, buffer = name.rpartition(".")
        mean = f"{layer}.{_MEAN}" if layer else _MEAN
        if buffer == _VARIANCE and mean in state:
            yield name, state[mean], variance


def mean_tree(trees: Sequence[Any]) -> Any:  # noqa: ANN401
    """The mean of several trees of equal shape: floating-point tensors are averaged, the rest is taken from the first.

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
