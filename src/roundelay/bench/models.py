"""Models of the benchmarks: one whose computation is emulated by sleeping, and a real LSTM."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = 8
FORWARD_SHARE = 1 / 3  # of a step; the rest is spread over the backward pass, so that communication can overlap with it


class _Layer(torch.autograd.Function):
    """Backward sleeps for `seconds`, then returns a gradient of full size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(weight)
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        time.sleep(ctx.seconds)
        (weight,) = ctx.saved_tensors
        return grad, weight * 1e-4, None


class EmulatedModel(nn.Module):
    """`parameters` weights whose step takes `step_s` and leaves the CPU idle, like a step on an accelerator."""

    def __init__(self, parameters: int, step_s: float) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.ones(parameters // LAYERS)) for _ in range(LAYERS))
        self.step_s = step_s

    def forward(self, x: Tensor) -> Tensor:
        """Sleep for a third of the step, then pass x through the layers."""
        time.sleep(FORWARD_SHARE * self.step_s)
        backward_s = (1 - FORWARD_SHARE) * self.step_s / LAYERS
        for weight in self.layers:
            x = _Layer.apply(x, weight, backward_s)  # type: ignore[no-untyped-call]
        return x


class LSTMModel(nn.Module):
    """A small acoustic model on random frames. Its computation competes with communication for the cores."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        hidden = max(16, int((parameters / 16) ** 0.5) // 8 * 8)
        self.lstm = nn.LSTM(40, hidden, num_layers=1, bidirectional=True, batch_first=True)
        self.out = nn.Linear(2 * hidden, 128)

    def forward(self, x: Tensor) -> Tensor:
        """Mean square of the logits."""
        logits: Tensor = self.out(self.lstm(x)[0])
        return logits.square().mean()


def build(compute: str, parameters: int, step_s: float) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The module for "emulated" or "lstm", and a function that makes one batch for it."""
    if compute == "lstm":
        return LSTMModel(parameters), lambda: torch.randn(8, 21, 40)
    return EmulatedModel(parameters, step_s), lambda: torch.ones(1, requires_grad=True)
