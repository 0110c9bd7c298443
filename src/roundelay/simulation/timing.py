"""Timing only: the same asynchronous strategies without weights or gradients, for tens of thousands of learners.

What a strategy decides (whom it calls, when it waits, how far it leads) does not depend on the weights. So replicas
are hollow, messages carry nothing but count as a whole model, and finished learners stay to answer the others.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from roundelay.clock import Process, VirtualClock
from roundelay.cluster.membership import Membership
from roundelay.errors import StrategyError
from roundelay.simulation.compute import Compute
from roundelay.simulation.network import Links, Ports
from roundelay.strategies import Strategy
from roundelay.topology import Mixing
from roundelay.topology.mixing import RelabelledMixing
from roundelay.topology.permutation import permutation
from roundelay.transport.base import Handler, Request, Transport, Undo
from roundelay.weights.replica import Flat, Replica

_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Timing:
    """When learners were done, and what their strategies say of themselves.

    Attributes:
        ended_s: when each learner had taken its last step.
        metrics: of each strategy.
    """

    ended_s: list[float]
    metrics: list[dict[str, float]]

    def mean(self, figure: str) -> float:
        """One figure of the strategies, mean over learners."""
        return sum(of[figure] for of in self.metrics) / len(self.metrics)


def timing(
    strategy_of: Callable[[int], Strategy],
    size: int,
    *,
    steps: int,
    compute: Compute,
    links: Links,
    model_bytes: float,
) -> Timing:
    """Let `size` learners take `steps` steps each; `strategy_of(rank)` builds an asynchronous strategy.

    >>> from roundelay import ADPSGD, ring
    >>> from roundelay.simulation.compute import constant, slowed
    >>> slow = slowed(constant(1.0), {0: 10})
    >>> links = Links(latency_s=0.1)
    >>> timing(lambda rank: ADPSGD(ring(4)), 4, steps=5, compute=slow, links=links, model_bytes=1e6).ended_s
    [50.0, 5.0, 5.0, 5.0]
    """
    clock = VirtualClock()
    network = _Network(clock, size, links, model_bytes)
    ended_s = [0.0] * size
    strategies = [strategy_of(rank) for rank in range(size)]
    membership = Membership.of(size)

    def learner(rank: int) -> Process:
        strategy = strategies[rank]
        strategy.attach(_Hollow(), network.transports[rank], membership)
        for step in range(steps):
            yield compute(rank, step, clock.now())
            yield from strategy.after_backward()
            yield from strategy.before_step()
            yield from strategy.after_step()
        ended_s[rank] = clock.now()

    for rank in range(size):
        if strategies[rank].synchronous:
            raise StrategyError(f"{type(strategies[rank]).__name__} waits for others; time it on a ModelledNetwork")
        clock.spawn(learner(rank), f"learner {rank}")
    gc.disable()  # events hold no cycles, and looking for some among millions of living objects takes a fifth of the time
    try:
        clock.run()
    finally:
        gc.enable()
    return Timing(ended_s, [strategy.metrics() for strategy in strategies])


class Remembered(Mixing):
    """Another mixing that computes whom everyone calls in a round once, for all learners together.

    >>> from roundelay import random_ring
    >>> mixing = random_ring(6, seed=1)
    >>> [Remembered(mixing).partner(rank, 3) for rank in range(6)] == [mixing.partner(rank, 3) for rank in range(6)]
    True
    """

    def __init__(self, mixing: Mixing) -> None:
        super().__init__(mixing.name, mixing.size, mixing.period)
        self._mixing = mixing
        self.partners = functools.cache(self._relabelled if isinstance(mixing, RelabelledMixing) else self._others)
        self._ranks = list(
            range(mixing.size)
        )  # the same numbers in all tables: a number of one's own is far away in memory

    def row(self, rank: int, round: int = 0) -> dict[int, float]:
        """As it was."""
        return self._mixing.row(rank, round)

    def partner(self, rank: int, round: int = 0) -> int | None:
        """From the round's table."""
        return self.partners(round)[rank]

    def _others(self, round: int) -> list[int | None]:
        return [self._mixing.partner(rank, round) for rank in range(self.size)]

    def _relabelled(self, round: int) -> list[int | None]:
        assert isinstance(self._mixing, RelabelledMixing)
        learner = [self._ranks[rank] for rank in permutation(self.size, self._mixing.seed, round).all().tolist()]
        table: list[int | None] = [None] * self.size
        for position, other in enumerate(self._base):
            table[learner[position]] = None if other is None else learner[other]
        return table

    @functools.cached_property
    def _base(self) -> list[int | None]:
        assert isinstance(self._mixing, RelabelledMixing)
        return [self._mixing.base.partner(position) for position in range(self.size)]


class _Hollow(Replica):
    """No weights, so that whatever a strategy does with them costs nothing."""

    def __init__(self) -> None:
        self.weights = []

    def tensors(self) -> list[Tensor]:
        return []

    def copy_to(self, flat: Flat) -> None:
        pass

    copy_from = lend = copy_to

    def take_back(self, flat: Flat) -> bool:
        return False

    can_show = take_back


class _Answer(Future[Tensor]):
    """A future for one thread: no locks, one listener, which is what a strategy has."""

    def __init__(self) -> None:
        self._listener: Callable[[Future[Tensor]], object] | None = None
        self._come = False

    def done(self) -> bool:
        return self._come

    def result(self, timeout: float | None = None) -> Tensor:
        assert self._come
        return _NOTHING

    def add_done_callback(self, listener: Callable[[Future[Tensor]], object]) -> None:
        assert not self._come
        self._listener = listener

    def come(self) -> None:
        self._come = True
        if self._listener is not None:
            self._listener(self)


class _Network:
    def __init__(self, clock: VirtualClock, size: int, links: Links, model_bytes: float) -> None:
        self.clock, self.ports, self.model_bytes = clock, Ports(links), model_bytes
        self.transports = [_Caller(rank, size, self) for rank in range(size)]

    def send(self, sender: int, receiver: int, action: Callable[[], None]) -> None:
        clock = self.clock
        clock.call_at(self.ports.arrival(sender, receiver, self.model_bytes, clock.now()), action)


class _Caller(Transport):
    """Calls and answers without content; whatever synchronous strategies need is refused."""

    def __init__(self, rank: int, size: int, network: _Network) -> None:
        super().__init__(rank, size)
        self._network = network
        self._handler: Handler | None = None

    def allocate(self, nbytes: int) -> Tensor:
        return _NOTHING

    def call(self, peer: int, buffer: Tensor, request: Request | None = None) -> Future[Tensor]:
        answer, network, target = _Answer(), self._network, self._network.transports[peer]

        def arrive() -> None:
            assert target._handler is not None  # everyone attaches at time zero, and nobody leaves
            target._handler(self.rank, _NOTHING, _NOTHING)
            network.send(peer, self.rank, answer.come)

        network.send(self.rank, peer, arrive)
        return answer

    def serve(self, handler: Handler | None, undo: Undo | None = None) -> None:
        self._handler = handler

    def swap(self, round: int, outgoing: Tensor, incoming: Mapping[int, Tensor]) -> Future[None]:
        raise NotImplementedError

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        raise NotImplementedError

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        raise NotImplementedError

    def finish(self, final: Tensor, members: tuple[int, ...]) -> Future[None]:
        raise NotImplementedError

    def close(self, failure: str = "") -> None:
        pass
