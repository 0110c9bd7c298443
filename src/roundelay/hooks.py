"""Hooks on the user's optimizer and on gradients, so that the training loop stays the user's."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from roundelay.errors import StrategyError


class StepHooks:
    """Calls `before` and `after` once around every step of an optimizer.

    A closure given to step() is run before `before`, so that its gradients exist, as after `backward()`. The optimizer
    gets the result of the closure. If the step() of an optimizer subclass calls super().step(), torch's hooks run
    twice; the inner call is ignored here.
    """

    def __init__(self, optimizer: Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._before, self._after = before, after
        self._step_frame: FrameType | None = None  # of the step under way
        self._inner_steps = 0
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        _remove(self._handles)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        caller = sys._getframe(1)
        if self._step_frame is not None and self._step_frame in _callers(caller):
            self._inner_steps += 1
            return None
        closure = next((each for each in (*args, *kwargs.values()) if callable(each)), None)
        result = _Result(optimizer, closure) if closure else None
        self._step_frame, self._inner_steps = caller, 0
        self._before()
        if result is None:
            return None
        result.remember_weights()
        return tuple(result if each is closure else each for each in args), {
            key: result if each is closure else each for key, each in kwargs.items()
        }

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inner_steps:
            self._inner_steps -= 1
            return
        self._step_frame = None
        self._after()


class _Result:
    """Stands for a closure that was called already. Raises StrategyError if it is called after the weights have changed."""

    def __init__(self, optimizer: Optimizer, closure: Callable[[], Any]) -> None:
        self._optimizer = optimizer
        with torch.enable_grad():
            self._value = closure()

    def remember_weights(self) -> None:
        self._versions = self._versions_now()

    def __call__(self) -> Any:  # noqa: ANN401
        if self._versions != self._versions_now():
            raise StrategyError(
                f"{type(self._optimizer).__name__} calls its closure after it has changed the weights, as LBFGS and SAM do; no "
                "averaging can follow that; use an optimizer that takes one gradient per step"
            )
        return self._value

    def _versions_now(self) -> list[int]:
        return [weight._version for group in self._optimizer.param_groups for weight in group["params"]]


class GradientHooks:
    """Calls `ready(index)` for every gradient that backward produces, and `after` when backward has ended."""

    def __init__(
        self, weights: Sequence[nn.Parameter], ready: Callable[[int], None], after: Callable[[], None]
    ) -> None:
        self._ready, self._after = ready, after
        self._paused = False
        self._backward: int | None = None  # torch's number of the backward pass under way
        self._handles = [
            weight.register_post_accumulate_grad_hook(lambda _, index=index: self._gradient_ready(index))
            for index, weight in enumerate(weights)
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        _remove(self._handles)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """In this block neither `ready` nor `after` is called."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _gradient_ready(self, index: int) -> None:
        if self._paused:
            return
        backward = torch._C._current_graph_task_id()
        if self._backward is None:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
        elif self._backward != backward:
            raise StrategyError(
                "the last backward() raised while gradients were on their way to the other learners, which cannot be "
                "taken back; let that exception end the training loop (or a backward runs inside another: "
                "torch.utils.checkpoint needs use_reentrant=False here)"
            )
        self._ready(index)

    def _after_backward(self) -> None:
        self._backward = None
        self._after()


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _callers(frame: FrameType) -> Iterator[FrameType]:
    while frame.f_back is not None:
        frame = frame.f_back
        yield frame
