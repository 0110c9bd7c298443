"""Learner: connects a module, an optimizer, a strategy and a world of peers, and leaves the user's loop as it is."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundelay.checks import (
    check_optimizer,
    check_strategy,
    refuse_ddp,
    refuse_ddp_around,
    refuse_other_parameters,
    unwrapped_optimizer,
)
from roundelay.clock import Steps
from roundelay.cluster.environment import World
from roundelay.cluster.membership import Membership
from roundelay.consensus import Mean, mean_of
from roundelay.errors import StrategyError
from roundelay.hooks import GradientHooks, StepHooks
from roundelay.participation import CHANGES, Participation
from roundelay.strategies.base import Strategy
from roundelay.training_state import Stateful, TrainingState
from roundelay.transport.base import Transport
from roundelay.weights import replica_of, whole_state
from roundelay.weights.shards import shard_group

log = logging.getLogger("roundelay")


class Learner:
    """One participant in decentralised training.

    Hooks the optimizer (and, if the strategy reduces gradients, the weights), so that the loop stays the user's:

        with Learner(model, optimizer, ADPSGD()) as learner:
            for x, y in loader:
                loss_fn(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    At the start every learner takes the weights and buffers of learner 0. At the end of the block the learner stays until
    no peer needs it any more; if the block raised, it leaves at once.

    In an elastic run (see `join`) learners may be lost, come back, and join. A learner that joins takes the state of others
    before its first step. If the strategy can re-form without a meeting (ADPSGD, LocalSGD), the others go on
    training. Otherwise all learners meet inside `backward` or `step`, and then go on together. If a meeting replaced
    the weights of a learner, that learner drops its current gradient, and its current step changes nothing.

    If FSDP2 has sharded the module over a dimension of a mesh, a learner is a node: the processes that hold one replica in
    shards. Each process averages its shard with the same shard of other nodes.

    Raises StrategyError if module, optimizer and strategy do not fit together. Unless the run is elastic, `backward` or `step`
    raises PeerLostError when a synchronous strategy loses a peer.

    Args:
        module: what is trained.
        optimizer: the optimizer of the module's parameters.
        strategy: how learners average.
        transport: the connection to the peers; by default that of the world. With shards, this is the connection to the
            peers that hold the same shard.
        membership: the learners that take part; by default all of the transport's. If given, the check that learners
            fit together and the broadcast of the first weights are skipped.
        world: by default `init()`, from the environment.
        extras: in an elastic run, more objects with a state that a learner which joins takes over, such as a learning-rate
            scheduler.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        transport: Transport | None = None,
        membership: Membership | None = None,
        *,
        world: World | None = None,
        extras: Sequence[Stateful] = (),
    ) -> None:
        refuse_ddp(module)
        self.module, self.optimizer, self.strategy = module, unwrapped_optimizer(optimizer), strategy
        self._shards = shard_group(module)
        check_strategy(strategy, self._shards)
        self._state = TrainingState(module, self.optimizer, extras)
        self._part = Participation(
            strategy, self._state, world=world, transport=transport, membership=membership, shards=self._shards
        )
        self._steps_before = 0  # before a restart
        self._observed: dict[str, float] = {}
        self._finished = self._closed = self._warned = self._looked_for_ddp = False
        self._failure: Exception | None = None  # raised while backward was running
        self._cleanup = contextlib.ExitStack()
        try:
            self._begin()
        except BaseException as error:
            self._abort(error)
            raise

    def _begin(self) -> None:
        check_optimizer(self.optimizer, self.module)
        self.replica = replica_of(self.module)
        self._averaged = set(map(id, self.replica.weights))
        self._part.begin(self.module, self.replica)
        self._cleanup.callback(StepHooks(self.optimizer, self._before_step, self._after_step).remove)
        reduced = self.replica.weights if self.strategy.reduces_gradients else []
        self._gradient_hooks = GradientHooks(reduced, self._gradient_ready, self._after_backward)
        self._cleanup.callback(self._gradient_hooks.remove)

    # For the user ------------------------------------------------------------------------------------------------------

    @property
    def transport(self) -> Transport:
        """The connection to the peers. In an elastic run it is another one after a meeting."""
        return self._part.transport

    @property
    def membership(self) -> Membership:
        """The living learners, and the generation."""
        return self._part.membership

    @property
    def members(self) -> tuple[int, ...]:
        """The living learners, by id."""
        return self.membership.living

    @property
    def elastic(self) -> bool:
        """Whether learners may come and go."""
        return self._part.elastic

    @property
    def joined(self) -> bool:
        """Whether this learner joined a run under way."""
        return self._part.joined

    @property
    def steps(self) -> int:
        """Steps that the weights have seen. A learner that joins continues the count of the others."""
        return self._state.steps

    @property
    def waited_s(self) -> float:
        """Seconds in which this learner has waited for others."""
        return self._part.times.waited_s

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in here only add up gradients; the next pass outside reduces the sum, like DDP's no_sync."""
        hooks = self._gradient_hooks
        before, hooks.paused = hooks.paused, True
        try:
            yield
        finally:
            hooks.paused = before

    @contextlib.contextmanager
    def consensus(self, timeout_s: float | None = None) -> Iterator[nn.Module]:
        """The module with the exact mean weights of all learners; its own weights come back at the end of the block.

        A collective: all learners enter it equally often, after equally many steps. Learners that may have taken different
        numbers of steps call `finish` first. Exchanges pause meanwhile. Floating-point buffers are averaged (BatchNorm's
        variance by its second moment). Integer buffers are those of the first living learner. In an elastic run, learners
        that are lost meanwhile are left out of the mean, and `timeout_s` limits the wait for learners that do not come: then
        MissingLearnersError names them, and training can go on.
        """
        mean = self._mean(timeout_s)
        try:
            with mean.placed(self.module, self.replica):
                yield self.module
        finally:
            self.replica.mark()

    def settle(self, timeout_s: float | None = None) -> None:
        """Leave the mean of all learners in the module for good. A collective, like `consensus`."""
        mean = self._mean(timeout_s)
        state = self.strategy.state_dict()
        mean.write(self.module, self.replica)
        self.strategy.load_state_dict(state)
        # No exchange may begin before all learners have the mean.
        self._part.together(
            lambda members: self.transport.all_reduce(torch.zeros(1), members).result(), None, self._pause
        )
        self.replica.mark()

    def gather(self, value: object) -> dict[int, Any]:
        """The values of all living learners of an elastic run, by id. A collective, like `consensus`.

        Raises StrategyError in a run of fixed size, where torch.distributed gathers.

        Args:
            value: anything that JSON knows.
        """
        if not self.elastic:
            raise StrategyError("gather needs an elastic run; in a run of fixed size use torch.distributed.all_gather")
        return self._part.gather(value, self._pause)

    @contextlib.contextmanager
    def rewrite(self) -> Iterator[nn.Module]:
        """In this block the module's weights may be changed, for example pruned. All learners must enter it together."""
        state = self.state_dict()
        yield self.module
        self.load_state_dict(state)

    def mean_state_dict(self) -> dict[str, Tensor]:
        """The whole mean model, in host memory, on one process; empty on all others. A collective, like `consensus`.

        That process is the first living learner, usually learner 0. With shards it is the first process of the first
        living node; the other processes of that node send their shards, one tensor at a time. With shards, buffers are
        the mean over the first processes of all nodes.
        """
        # Read before the consensus: peers may leave as soon as it ends, and shards of a node need the same `first`.
        first = self.membership.living[0]
        with self.consensus() as mean_model:
            if self.transport.rank != first:
                return {}
            whole: dict[str, Tensor] = whole_state(mean_model.state_dict())
        return whole if self._shards is None or self._shards.index == 0 else {}

    def observe(self, **figures: float) -> None:
        """Add figures of your own to the metrics, such as `observe(loss=loss.item())`; the last value of a name counts."""
        self._observed.update(figures)

    def metrics(self) -> dict[str, float]:
        """This learner so far: steps, seconds per step split into compute, wait and mix, bytes, and the strategy's own."""
        traffic = self.transport.traffic
        return (
            {"steps": self.steps, "members": self.membership.size}
            | self._part.times.metrics(self.steps - self._steps_before)
            | {"bytes_sent": traffic.bytes_sent, "bytes_received": traffic.bytes_received}
            | {"refused": self.transport.refused.counts.total()}
            | self._observed
            | self.strategy.metrics()
        )

    def state_dict(self) -> dict[str, Any]:
        """What a restart needs besides the states of module and optimizer; save those two after this call."""
        self._warn_of_changes()
        self._part.run(self.strategy.before_saving)
        self.replica.mark()
        return {"steps": self.steps, "strategy": self.strategy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, with the module's current weights. With a synchronous strategy all must call this."""
        self.count_from(int(state["steps"]))
        self.strategy.load_state_dict(state["strategy"])
        self.replica.mark()

    def count_from(self, steps: int) -> None:
        """Set the step count to `steps`, if this learner continues the work of another learner."""
        self._state.steps = self._steps_before = steps

    def reform(self, membership: Membership) -> None:
        """Continue with these members; for strategies with `reforms_alone`. Any thread may call this."""
        self._part.reform(membership)

    def finish(self) -> None:
        """Take no more steps, and stay until no peer needs this learner. Only `consensus` may follow. Idempotent."""
        if not self._finished:
            self._finished = True
            self._warn_of_changes()
            self._part.run(self.strategy.finish)
            self.replica.mark()

    def close(self) -> None:
        """Finish, then leave. Idempotent."""
        if self._closed:
            return
        try:
            self.finish()
        except BaseException as error:
            self._abort(error)
            raise
        self._release()

    def __enter__(self) -> Learner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abort(error)

    # Hooks ---------------------------------------------------------------------------------------------------------------

    def _gradient_ready(self, index: int) -> None:
        if self._failure is not None or self._part.steps_alone:
            return
        try:
            self.strategy.gradient_ready(index)
        except CHANGES as error:  # an exception would end this backward, whose gradients are needed
            if not self._part.elastic:
                raise
            self._failure = error

    def _after_backward(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._part.recover(failure)
        if not self._part.steps_alone:
            self._part.run(self.strategy.after_backward)

    def _before_step(self) -> None:
        if not self._looked_for_ddp:
            self._looked_for_ddp = True
            refuse_ddp_around(self.module)
        refuse_other_parameters(self.optimizer, self._averaged)
        if not self._part.steps_alone:
            self._part.run(self._mix_in)

    def _mix_in(self) -> Steps:
        self._part.check()
        self._warn_of_changes()
        yield from self.strategy.before_step()

    def _after_step(self) -> None:
        self._part.end_step()
        self.replica.mark()

    def _pause(self) -> Steps:
        """The hook before a collective of all learners."""
        yield from self.strategy.finish() if self._finished else self.strategy.drain()

    def _mean(self, timeout_s: float | None) -> Mean:
        self._warn_of_changes()
        self._part.run(self.strategy.drain)
        return self._part.together(
            lambda members: mean_of(self.module, self.replica, self.strategy, self.transport, members),
            timeout_s,
            self._pause,
        )

    def _warn_of_changes(self) -> None:
        """Warn, once, if the user has changed weights that the strategy is about to replace."""
        if self.strategy.mixes_weights and self.replica.touched() and not self._warned:
            self._warned = True
            log.warning(_CHANGED, self.transport.rank, type(self.strategy).__name__)

    def _abort(self, error: BaseException) -> None:
        """Leave at once; the peers are told why."""
        if self._closed:
            return
        try:
            self.strategy.abandon()
        finally:
            self._release(f"{type(error).__name__}: {error}")

    def _release(self, failure: str = "") -> None:
        self._closed = True
        try:
            self._cleanup.close()
        finally:
            self._part.close(failure)


_CHANGED = (
    "learner %d: the module's weights were changed, and not by a step of this optimizer. %s replaces them by the mixed "
    "weights, so the change is lost. Change weights before the Learner is made, or inside `with learner.rewrite():`. A change "
    "that belongs to every step goes into a hook of optimizer.step that is registered before the Learner is made. Weights that "
    "are put in for an evaluation, or changed anew in every forward, do no harm."
)
