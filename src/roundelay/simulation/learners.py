"""Virtual learners: real modules, optimizers and strategies as processes on a virtual clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from roundelay.clock import Process, VirtualClock
from roundelay.cluster.membership import Membership
from roundelay.simulation.network import Links, ModelledNetwork
from roundelay.strategies.base import Strategy
from roundelay.transport.base import Transport
from roundelay.transport.simulated import SimulatedNetwork
from roundelay.weights import replica_of

SETTLING_STEPS, TIMED_STEPS = 4, 8  # the first steps of a run are not yet periodic


@dataclass
class VirtualLearner:
    """One learner on the virtual clock.

    The gradient is computed at the weights from the start of the compute time and applied at its end, as on a real machine.

    Attributes:
        gradient: `gradient(step)` fills the gradients of the module.
        compute_s: `compute_s(step)` is the virtual time that the step computes.
        membership: the learners that take part when this learner starts; None: all learners of the network.
    """

    module: nn.Module
    optimizer: Optimizer
    strategy: Strategy
    transport: Transport
    gradient: Callable[[int], None]
    compute_s: Callable[[int], float]
    membership: Membership | None = None

    def process(self, steps: int | None = None) -> Process:
        """Train for `steps` steps, then finish and leave. None: train until the clock stops."""
        membership = self.membership or Membership.of(self.transport.size)
        self.strategy.attach(replica_of(self.module), self.transport, membership)
        self.transport.on_lost(self.strategy.peer_lost)
        self.transport.on_silent(self.strategy.peer_silent)
        for step in itertools.count() if steps is None else range(steps):
            self.gradient(step)
            yield self.compute_s(step)
            yield from self.strategy.after_backward()
            yield from self.strategy.before_step()
            self.optimizer.step()
            yield from self.strategy.after_step()
        yield from self.strategy.finish()
        self.transport.close()


def start(clock: VirtualClock, learners: Iterable[VirtualLearner], steps: int | None = None) -> None:
    """Put the learners on the clock; they train when the clock runs."""
    for learner in learners:
        clock.spawn(learner.process(steps), f"learner {learner.transport.rank}")


def run(clock: VirtualClock, learners: Iterable[VirtualLearner], steps: int) -> None:
    """Train all learners for `steps` steps each."""
    start(clock, learners, steps)
    clock.run()


def step_starts(
    network: SimulatedNetwork, strategy_of: Callable[[], Strategy], compute_s: Sequence[float], steps: int
) -> list[list[float]]:
    """The virtual times at which each learner starts its steps; a step of learner i computes for compute_s[i] seconds.

    The strategy runs with a model of one weight and zero gradients, so only its communication and its waiting matter.
    """
    starts: list[list[float]] = [[] for _ in compute_s]
    learners = []
    for rank, seconds in enumerate(compute_s):
        module = nn.Linear(1, 1, bias=False)
        module.weight.grad = torch.zeros_like(module.weight)

        def note_start(step: int, rank: int = rank) -> None:
            starts[rank].append(network.clock.now())

        def constant(step: int, seconds: float = seconds) -> float:
            return seconds

        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        transport = network.transports[rank]
        learners.append(VirtualLearner(module, optimizer, strategy_of(), transport, note_start, constant))
    run(network.clock, learners, steps)
    return starts


def seconds_per_step(
    strategy_of: Callable[[], Strategy], links: Links, model_bytes: float, compute_s: Sequence[float]
) -> float:
    """Virtual seconds from one step of learner 0 to its next one, with communication and waiting, once the run is periodic.

    The strategy itself runs on the clock, with one weight that counts as `model_bytes`.
    """
    network = ModelledNetwork(VirtualClock(), len(compute_s), links, model_bytes)
    first, *_ = step_starts(network, strategy_of, compute_s, SETTLING_STEPS + TIMED_STEPS + 1)
    return (first[-1] - first[SETTLING_STEPS]) / TIMED_STEPS
