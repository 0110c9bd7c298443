"""Virtual learners: real modules, optimizers and strategies as processes on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from roundelay.clock import Process, VirtualClock
from roundelay.cluster.membership import Membership
from roundelay.strategies.base import Strategy
from roundelay.transport.base import Transport
from roundelay.weights.replica import Replica


@dataclass
class VirtualLearner:
    """One learner: `gradient(step)` fills the module's gradients, which then take `compute_s(step)` of virtual time.

    The gradient is taken at the weights from before that time and applied after it, as on a real machine.
    """

    module: nn.Module
    optimizer: Optimizer
    strategy: Strategy
    transport: Transport
    gradient: Callable[[int], None]
    compute_s: Callable[[int], float]

    def process(self, steps: int | Iterable[int]) -> Process:
        """Train for `steps` steps, or for as many numbered steps as an iterable gives, finish and leave."""
        self.strategy.attach(Replica(self.module), self.transport, Membership.of(self.transport.size))
        self.transport.on_lost(self.strategy.lost)
        self.transport.on_quiet(self.strategy.unheard)
        for step in range(steps) if isinstance(steps, int) else steps:
            self.gradient(step)
            yield self.compute_s(step)
            yield from self.strategy.after_backward()
            yield from self.strategy.before_step()
            self.optimizer.step()
            yield from self.strategy.after_step()
        yield from self.strategy.finish()
        self.transport.close()


def run(clock: VirtualClock, learners: Iterable[VirtualLearner], steps: int) -> None:
    """Train all learners for `steps` steps each."""
    for learner in learners:
        clock.spawn(learner.process(steps), f"learner {learner.transport.rank}")
    clock.run()
