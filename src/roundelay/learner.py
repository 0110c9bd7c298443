"""Learner: connects a module, an optimizer, a strategy and a transport, and leaves the user's loop as it is."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundelay.agreement import check_agreement, check_shards_agree, take_first_weights
from roundelay.clock import Steps
from roundelay.cluster.environment import World, init
from roundelay.cluster.membership import Membership
from roundelay.consensus import consensus_of
from roundelay.errors import StrategyError
from roundelay.hooks import GradientHooks, StepHooks
from roundelay.strategies.base import Strategy
from roundelay.transport.base import LEFT, Transport
from roundelay.weights import replica_of, whole_state
from roundelay.weights.shards import ShardGroup, shard_group

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

    If FSDP2 has sharded the module over a dimension of a mesh, a learner is a node: the processes that hold one replica in
    shards. Each process averages its shard with the same shard of other nodes.

    Raises StrategyError if module, optimizer and strategy do not fit together. `backward` or `step` raises
    PeerLostError when a synchronous strategy loses a peer.

    Args:
        module: what is trained.
        optimizer: the optimizer of the module's parameters.
        strategy: how learners average.
        transport: the connection to the peers; by default `init().transport()`, from the environment. With shards,
            this is the connection to the peers that hold the same shard.
        membership: the learners that take part; by default all of the transport's. If given, the check that learners
            fit together and the broadcast of the first weights are skipped.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        transport: Transport | None = None,
        membership: Membership | None = None,
    ) -> None:
        self.module, self.optimizer, self.strategy = module, optimizer, strategy
        self._shards = shard_group(module)
        _check_strategy(strategy, self._shards)
        self.transport = transport or _world(self._shards).transport()
        self.membership = membership or Membership.of(self.transport.size)
        self._membership_lock = threading.Lock()  # peers are lost in threads of the transport
        self.steps = self._steps_before = 0  # `_steps_before`: the steps before a restart
        self._observed: dict[str, float] = {}
        self._wait_s = self._mix_s = 0.0
        self._began = time.perf_counter()
        self._attached = self._finished = self._closed = self._warned = False
        self._cleanup = contextlib.ExitStack()
        try:
            self._begin(agreed=membership is not None)
        except BaseException as error:
            self._abort(error)
            raise

    def _begin(self, *, agreed: bool) -> None:
        _check_optimizer(self.optimizer, self.module)
        self.replica = replica_of(self.module)
        self._averaged = set(map(id, self.replica.weights))
        members = (
            self.membership
        )  # keeps a peer that is lost before `attach`, because all learners must use the same mixing
        self.transport.on_lost(self._peer_lost)
        self.transport.on_silent(self._peer_silent)
        if not agreed:
            if self._shards:
                check_shards_agree(self.strategy, self.transport)
            check_agreement(self.module, self.strategy, self.transport, members.living)
            take_first_weights(self.module, self.transport, members.living)
        self.strategy.attach(self.replica, self.transport, members)
        self._attached = True
        for peer, reason in self.transport.lost.items():  # lost before the strategy could be told
            self.strategy.peer_lost(peer, reason)
        self.replica.mark()
        self._cleanup.callback(StepHooks(self.optimizer, self._before_step, self._after_step).remove)
        reduced = self.replica.weights if self.strategy.reduces_gradients else []
        self._gradient_hooks = GradientHooks(reduced, self.strategy.gradient_ready, self._after_backward)
        self._cleanup.callback(self._gradient_hooks.remove)

    # For the user ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in this block only add up gradients; the next one outside reduces the sum (DDP's no_sync)."""
        hooks = self._gradient_hooks
        before, hooks.paused = hooks.paused, True
        try:
            yield
        finally:
            hooks.paused = before

    @contextlib.contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """The module with the exact mean weights of all learners; its own weights come back at the end of the block.

        A collective: all learners enter it equally often, after equally many steps. Learners that may have taken different
        numbers of steps call `finish` first. Exchanges pause meanwhile. Floating-point buffers are averaged (BatchNorm's
        variance by its second moment). Integer buffers are those of the first living learner.
        """
        self._warn_of_changes()
        self._run(self.strategy.drain())
        try:
            with consensus_of(self.module, self.replica, self.strategy, self.transport, self.membership):
                yield self.module
        finally:
            self.replica.mark()

    def mean_state_dict(self) -> dict[str, Tensor]:
        """The whole mean model, in host memory, on one process; empty on all others. A collective, like `consensus`.

        That process is the first living learner, usually learner 0. With shards it is the first process of the first
        living node; the other processes of that node send their shards, one tensor at a time. With shards, buffers are
        the mean over the first processes of all nodes.
        """
        # Read before the consensus: peers may leave as soon as it ends, and the shards of a node must decide alike.
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
        total = time.perf_counter() - self._began
        steps = max(self.steps - self._steps_before, 1)
        return (
            {
                "steps": self.steps,
                "step_s": total / steps,
                "compute_s": (total - self._wait_s - self._mix_s) / steps,
                "wait_s": self._wait_s / steps,
                "mix_s": self._mix_s / steps,
                "bytes_sent": self.transport.traffic.bytes_sent,
                "bytes_received": self.transport.traffic.bytes_received,
                "refused": self.transport.refused.counts.total(),
            }
            | self._observed
            | self.strategy.metrics()
        )

    @property
    def waited_s(self) -> float:
        """Seconds in which this learner has waited for others."""
        return self._wait_s

    def state_dict(self) -> dict[str, Any]:
        """What a restart needs besides the states of module and optimizer; save those two after this call."""
        self._warn_of_changes()
        self._run(self.strategy.before_saving())
        self.replica.mark()
        return {"steps": self.steps, "strategy": self.strategy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, with the module's current weights. If synchronous, all learners must call this."""
        self.count_from(int(state["steps"]))
        self.strategy.load_state_dict(state["strategy"])
        self.replica.mark()

    def count_from(self, steps: int) -> None:
        """Set the step count to `steps`, if this learner continues the work of another learner."""
        self.steps = self._steps_before = steps

    def reform(self, membership: Membership) -> None:
        """Continue with these members; for strategies with `reforms_alone`. Any thread may call this."""
        self.strategy.reform(membership)
        with self._membership_lock:
            self.membership = membership

    def finish(self) -> None:
        """Take no more steps, and stay until no peer needs this learner. Only `consensus` may follow. Idempotent."""
        if not self._finished:
            self._finished = True
            self._warn_of_changes()
            self._run(self.strategy.finish())
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

    def _after_backward(self) -> None:
        self._run(self.strategy.after_backward())

    def _before_step(self) -> None:
        self._refuse_other_parameters()
        self.transport.check()
        self._warn_of_changes()
        self._run(self.strategy.before_step())

    def _after_step(self) -> None:
        self._run(self.strategy.after_step())
        self.replica.mark()
        self.steps += 1

    def _refuse_other_parameters(self) -> None:
        """Raise StrategyError if the optimizer steps a parameter that learners do not average."""
        for group in self.optimizer.param_groups:
            if self._averaged.issuperset(map(id, group["params"])):
                continue
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in self._averaged:
                    raise StrategyError(
                        f"the optimizer steps a parameter of shape {tuple(parameter.shape)} that learners do not average: it is "
                        "no part of the Learner's module, or was frozen when the Learner was made. Make a new Learner with a "
                        "module that has it; a parameter that is to stay local needs an optimizer of its own"
                    )

    def _warn_of_changes(self) -> None:
        """Warn, once, if the user has changed weights that the strategy is about to replace."""
        if self.strategy.mixes_weights and self.replica.touched() and not self._warned:
            self._warned = True
            log.warning(
                "learner %d: the module's weights were changed, and not by a step of this optimizer. %s replaces them by the "
                "mixed weights, so the change is lost. Load weights before the Learner is made, or between "
                "learner.state_dict() and learner.load_state_dict(). A change that belongs to every step goes into a hook of "
                "optimizer.step that is registered before the Learner is made. Weights that are put in for an evaluation, or "
                "changed anew in every forward, do no harm.",
                self.transport.rank,
                type(self.strategy).__name__,
            )

    def _run(self, steps: Steps) -> None:
        """Drive a strategy's generator: block on every future that it yields."""
        began, waited = time.perf_counter(), 0.0
        try:
            future = next(steps)
            while True:
                asked = time.perf_counter()
                try:
                    result = future.result()
                except BaseException as error:
                    waited += time.perf_counter() - asked
                    future = steps.throw(error)
                else:
                    waited += time.perf_counter() - asked
                    future = steps.send(result)
        except StopIteration:
            pass
        self._wait_s += waited
        self._mix_s += time.perf_counter() - began - waited

    # Peers, and the end --------------------------------------------------------------------------------------------------

    def _peer_lost(self, peer: int, reason: str) -> None:
        with self._membership_lock:
            self.membership = self.membership.without(peer)
        level = logging.INFO if reason == LEFT else logging.WARNING
        log.log(level, "learner %d has lost learner %d: %s", self.transport.rank, peer, reason)
        if self._attached and not self._closed:  # the training thread may have given up because of this loss already
            self.strategy.peer_lost(peer, reason)

    def _peer_silent(self, peer: int, *, silent: bool) -> None:
        if self._attached and not self._closed:
            self.strategy.peer_silent(peer, silent=silent)

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
            self.transport.close(failure)


def _world(shards: ShardGroup | None) -> World:
    return init() if shards is None else init().between_nodes(shards.ranks)


def _check_strategy(strategy: Strategy, shards: ShardGroup | None) -> None:
    if shards is not None and strategy.reduces_gradients:
        raise StrategyError(
            f"{type(strategy).__name__} reduces gradients, which FSDP2 does itself: fully_shard on a mesh of two dimensions "
            "(HSDP) is an allreduce between nodes. Use DPSGD, ADPSGD or DelayByOne, which average weights"
        )
    strategy.rounds_by_step = shards is not None


def _check_optimizer(optimizer: Optimizer, module: nn.Module) -> None:
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if stepped.isdisjoint(map(id, module.parameters())):
        raise StrategyError("the optimizer has none of the module's parameters; build it from module.parameters()")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise StrategyError(
            "LBFGS evaluates the loss several times in one step, which no averaging can follow; use another optimizer"
        )
