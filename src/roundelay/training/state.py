"""The state that a learner saves, and the state that it resumes from. The number of learners may change in between."""

from __future__ import annotations

import logging
import math
import random
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from roundelay import devices
from roundelay.learner import Learner
from roundelay.training.checkpoint import Checkpoint
from roundelay.training.partition import Partition, Position
from roundelay.training.step import Counts
from roundelay.weights import average
from roundelay.weights.serialization import read_state

log = logging.getLogger("roundelay")

State = dict[str, Any]


def learner_state(learner: Learner, position: Position, counts: Counts) -> State:
    """A learner's state as a tree of tensors and plain values."""
    partition = position.partition
    return {
        "learner": learner.state_dict(),  # first, because this call updates module and optimizer
        "module": learner.module.state_dict(),
        "optimizer": learner.optimizer.state_dict(),
        "position": {"start": position.start, "steps": position.steps},
        "used": torch.tensor(position.used, dtype=torch.int64),
        "partition": {"groups": partition.groups, "per_epoch": partition.chunks.per_epoch},
        "counts": asdict(counts),
        "consensus_weight": learner.strategy.consensus_weight,
        "random": random_state(),
    }


def restore(learner: Learner, state: State) -> None:
    """Load a state of `learner_state` or `mean_state` into a learner that has just begun."""
    initial = learner.state_dict()
    restore_weights(learner.module, learner.optimizer, state)
    learner.load_state_dict(state["learner"] or initial)
    if state["random"] is not None:
        set_random_state(state["random"])


def restore_weights(module: nn.Module, optimizer: Optimizer, state: State) -> None:
    """Load only what does not depend on the other learners: the weights, buffers and the optimizer's state."""
    module.load_state_dict(state["module"])
    optimizer.load_state_dict(state["optimizer"])


@dataclass(frozen=True)
class Resumed:
    """What one learner begins with.

    Attributes:
        state: the state that the learner restores; None in a new run.
        position: how far the learner is.
        used: the draw numbers (see `Draw`) that all learners together have used.
        counts: the learner's counts so far.
    """

    state: State | None
    position: Position
    used: list[int]
    counts: Counts


def resumed_from(checkpoint: Checkpoint | None, rank: int, size: int, partition: Partition) -> Resumed:
    """What learner `rank` of `size` begins with; without a checkpoint, a new run.

    If the number of learners, the number of groups or the number of chunks per epoch has changed, all learners begin
    with the mean of the saved states, momentum included, and share the rest of the budget.
    """
    if checkpoint is None:
        return Resumed(None, Position(partition), [], Counts())
    states = [read_state(checkpoint.path(learner)) for learner in sorted(checkpoint.files)]
    used = _used(states, partition)
    before = states[0]["partition"]
    if len(states) == size and before == {"groups": partition.groups, "per_epoch": partition.chunks.per_epoch}:
        own = states[rank]
        position = Position(partition, own["position"]["start"], own["position"]["steps"], own["used"].tolist())
        return Resumed(own, position, used, Counts(**own["counts"]))
    if rank == 0:
        log.warning("%d learners go on from the mean of the %d that saved, momentum included", size, len(states))
    counts = [state["counts"] for state in states]
    shared = Counts(
        samples=sum(count["samples"] for count in counts) // size, elapsed_s=max(count["elapsed_s"] for count in counts)
    )
    return Resumed(mean_state(states), Position(partition, start=len(used)), used, shared)


def epochs_done(states: list[State]) -> float:
    """How many epochs all learners together had done when they saved these states."""
    return len(_drawn(states)) / float(states[0]["partition"]["per_epoch"])


def _drawn(states: list[State]) -> list[int]:
    drawn = sorted({number for state in states for number in state["used"].tolist()})
    if drawn:
        return drawn
    position, before = (
        states[0]["position"],
        states[0]["partition"],
    )  # the learners were in lockstep and drew no numbers
    return list(range(position["start"] + position["steps"] * before["groups"]))


def _used(states: list[State], partition: Partition) -> list[int]:
    """The draw numbers that all learners together have used."""
    drawn, before = _drawn(states), states[0]["partition"]
    if before["per_epoch"] == partition.chunks.per_epoch:
        return drawn
    # The size of a chunk has changed: count as used as many new chunks as cover the same part of an epoch.
    return list(range(math.ceil(len(drawn) * partition.chunks.per_epoch / before["per_epoch"])))


def mean_state(states: list[State]) -> State:
    """One state for a learner that has none of its own: the mean over the states with a consensus weight above 0."""
    counted = [state for state in states if state["consensus_weight"]]
    return {
        "module": average.mean_module([state["module"] for state in counted]),
        "optimizer": average.mean_tree([state["optimizer"] for state in counted]),
        "learner": None,
        "random": None,
    }


def random_state() -> State:
    """The states of the random generators of torch, Python and NumPy."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "accelerator": _accelerator().get_rng_state() if devices.accelerator() != devices.CPU else None,
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [
            name,
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }


def _accelerator() -> Any:  # noqa: ANN401  # a module of torch, such as torch.cuda
    return torch.get_device_module(devices.accelerator())


def set_random_state(state: State) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["accelerator"] is not None and devices.accelerator() != devices.CPU:
        _accelerator().set_rng_state(state["accelerator"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
