"""Calls the strategy at the points of the user's loop where learners average: in backward, and around optimizer.step()."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from roundelay.checks import refuse_ddp_around, refuse_other_parameters
from roundelay.clock import Steps
from roundelay.hooks import GradientHooks, StepHooks
from roundelay.strategy_runner import CHANGES, StrategyRunner


class StrategyHooks:
    """Hooks the optimizer and, if the strategy reduces gradients, the weights.

    Args:
        module: what is trained.
        optimizer: the optimizer of the module.
        runner: runs the hooks of the strategy.

    Attributes:
        gradients: the hooks on gradients.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, runner: StrategyRunner) -> None:
        self._module, self._optimizer, self._runner = module, optimizer, runner
        self._averaged = set(map(id, runner.replica.weights))
        self._looked_for_ddp = False
        self._failure: Exception | None = None  # raised while backward was running
        self._steps = StepHooks(optimizer, self._before_step, self._after_step)
        reduced = runner.replica.weights if runner.strategy.reduces_gradients else []
        self.gradients = GradientHooks(reduced, self._gradient_ready, self._after_backward)

    def remove(self) -> None:
        """Remove all hooks."""
        self._steps.remove()
        self.gradients.remove()

    def _gradient_ready(self, index: int) -> None:
        if self._failure is not None or self._runner.steps_alone:
            return
        try:
            self._runner.strategy.gradient_ready(index)
        except CHANGES as error:  # an exception would end this backward, whose gradients are needed
            if self._runner.peers.group is None:
                raise
            self._failure = error

    def _after_backward(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._runner.recover(failure)
        if not self._runner.steps_alone:
            self._runner.run(self._runner.strategy.after_backward)

    def _before_step(self) -> None:
        if not self._looked_for_ddp:
            self._looked_for_ddp = True
            refuse_ddp_around(self._module)
        refuse_other_parameters(self._optimizer, self._averaged)
        if not self._runner.steps_alone:
            self._runner.run(self._mix_in)

    def _mix_in(self) -> Steps:
        self._runner.peers.check()
        self._runner.warning.warn_if_changed()
        yield from self._runner.strategy.before_step()

    def _after_step(self) -> None:
        self._runner.end_step()
        self._runner.replica.mark()
