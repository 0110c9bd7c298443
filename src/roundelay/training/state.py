"""What a learner saves, and how learners go on from what was saved, be they as many as before or not."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundelay.training.checkpoint import Checkpoint
from roundelay.training.partition import Partition, Position
from roundelay.weights import average
from roundelay.weights.replica import Flat
from roundelay.weights.serialization import from_bytes, read_state, to_bytes

log = logging.getLogger("roundelay")

State = dict[str, Any]


@dataclass
class Counts:
    """What a learner counts through the whole run: its samples, its skipped steps, its seconds."""

    samples: int = 0
    skipped: int = 0
    elapsed_s: float = 0.0


def state_of(position: Position, plan: Partition, counts: Counts, voice: float, parts: State) -> State:
    """A learner's state as a tree of tensors and plain values; `parts` are module, optimizer and learner."""
    return parts | {
        "position": {"start": position.start, "steps": position.steps},
        "used": torch.tensor(position.used, dtype=torch.int64),
        "plan": {"groups": plan.groups, "per_epoch": plan.chunks.per_epoch},
        "counts": asdict(counts),
        "voice": voice,
        "random": random_state(),
    }


@dataclass(frozen=True)
class Earlier:
    """The part of a run that is done: this learner's state, its position, and what all learners have used."""

    state: State | None
    position: Position
    used: list[int]
    counts: Counts


def earlier(resumed: Checkpoint | None, rank: int, size: int, plan: Partition) -> Earlier:
    """What learner `rank` of `size` goes on from.

    Other learners than those that saved start from the mean of these, momentum and all, and share out what is left.
    """
    if resumed is None:
        return Earlier(None, Position(), [], Counts())
    states = [read_state(resumed.path(learner)) for learner in sorted(resumed.files)]
    used = _used(states, plan)
    before = states[0]["plan"]
    if len(states) == size and before == {"groups": plan.groups, "per_epoch": plan.chunks.per_epoch}:
        mine = states[rank]
        position = Position(mine["position"]["start"], mine["position"]["steps"], tuple(mine["used"].tolist()))
        return Earlier(mine, position, used, Counts(**mine["counts"]))
    if rank == 0:
        log.warning("%d learners go on from the mean of the %d that saved, momentum included", size, len(states))
    counts = [state["counts"] for state in states]
    shared = Counts(
        samples=sum(count["samples"] for count in counts) // size, elapsed_s=max(count["elapsed_s"] for count in counts)
    )
    return Earlier(mean_state(states), Position(start=len(used)), used, shared)


def _used(states: list[State], plan: Partition) -> list[int]:
    """The numbers that all learners together have used."""
    drawn = sorted({number for state in states for number in state["used"].tolist()})
    position, before = states[0]["position"], states[0]["plan"]
    if not drawn:  # they counted for themselves
        drawn = list(range(position["start"] + position["steps"] * before["groups"]))
    if before["per_epoch"] == plan.chunks.per_epoch:
        return drawn
    # Other chunks: as many as make the same part of an epoch.
    return list(range(math.ceil(len(drawn) * plan.chunks.per_epoch / before["per_epoch"])))


def mean_state(states: list[State]) -> State:
    """One state for learners that are not those that saved: the mean of those that have a voice."""
    speaking = [state for state in states if state["voice"]]
    return {
        "module": average.mean_module([state["module"] for state in speaking]),
        "optimizer": average.mean_tree([state["optimizer"] for state in speaking]),
        "learner": None,
        "random": None,
    }


class Carried:
    """What one learner hands to another that joins: weights, buffers and the optimizer's state."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._module, self._optimizer = module, optimizer

    def encoded(self, live: Flat | None = None) -> Tensor:
        """As bytes; with `live`, these are the weights."""
        module = self._module.state_dict()
        if live is not None:
            names = [name for name, weight in self._module.named_parameters() if weight.requires_grad]
            module |= dict(zip(names, live.views, strict=True))
        data = to_bytes({"module": module, "optimizer": self._optimizer.state_dict(), "voice": 1.0})
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def adopt(self, states: Sequence[Tensor]) -> None:
        """Go on with the mean of these."""
        mean = mean_state([from_bytes(state.numpy().tobytes()) for state in states])
        self._module.load_state_dict(mean["module"])
        self._optimizer.load_state_dict(mean["optimizer"])


def random_state() -> State:
    """Of torch, of Python and of NumPy."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [
            name,
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }


def set_random_state(state: State) -> None:
    """Put it back."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
