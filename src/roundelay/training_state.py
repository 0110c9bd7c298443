"""What a learner that joins receives from others: weights, buffers, the optimizer's state, and the number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundelay.errors import StrategyError
from roundelay.weights import Flat, all_finite, average
from roundelay.weights.serialization import from_bytes, to_bytes


class Stateful(Protocol):
    """An object whose state can be saved and loaded, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:  # noqa: ANN401
        """Continue from that state."""


class TrainingState:
    """What a learner that joins must receive: weights, buffers, the optimizer's state, and the number of steps.

    Args:
        module: what is trained.
        optimizer: of the module.
        extras: more objects whose state a learner that joins takes over.

    Attributes:
        steps: steps that the weights have seen.
        agreement: text that must be equal on all learners: it describes module and strategy.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, extras: Sequence[Stateful] = ()) -> None:
        self._module, self._optimizer, self._extras = module, optimizer, extras
        self.steps = 0
        self.agreement = ""

    def to_bytes(self, weights: Flat | None = None) -> Tensor:
        """Encode the state. If given, `weights` replace the weights of the module."""
        module = self._module.state_dict()
        if weights is not None:
            names = [name for name, weight in self._module.named_parameters() if weight.requires_grad]
            module |= dict(zip(names, weights.views, strict=True))
        extras = [extra.state_dict() for extra in self._extras]
        state = {"module": module, "optimizer": self._optimizer.state_dict(), "extras": extras}
        data = to_bytes(state | {"steps": self.steps, "agreement": self.agreement})
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @staticmethod
    def finite(encoded: Tensor) -> bool:
        """Whether all weights and buffers of an encoded state are finite."""
        module: dict[str, Tensor] = from_bytes(encoded.numpy().tobytes())["module"]
        return all_finite([each for each in module.values() if each.is_floating_point()])

    def load_mean(self, encoded: Sequence[Tensor]) -> None:
        """Decode states of other learners, and load their mean into the module and the optimizer.

        Raises StrategyError if module or strategy differ from the other learners'.
        """
        states = [from_bytes(each.numpy().tobytes()) for each in encoded]
        check_equal(self.agreement, {learner: state["agreement"] for learner, state in enumerate(states)})
        self._module.load_state_dict(average.mean_module([state["module"] for state in states]))
        self._optimizer.load_state_dict(average.mean_tree([state["optimizer"] for state in states]))
        newest = max(states, key=lambda state: state["steps"])
        for extra, saved in zip(self._extras, newest["extras"], strict=True):
            extra.load_state_dict(saved)
        self.steps = int(newest["steps"])


def check_equal(own: str, others: dict[int, str]) -> None:
    """Raise StrategyError if another learner's text, which describes its module and strategy, differs from `own`."""
    if any(other != own for other in others.values()):
        raise StrategyError(
            "this learner's module or strategy differs from the other learners': build the same module everywhere, and the "
            "same strategy on the same topology with the same seed"
        )
