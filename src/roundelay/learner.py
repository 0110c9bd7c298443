"""Learner: connects a module, an optimizer, a strategy and a world of peers, and leaves the user's loop as it is."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundelay.agreement import agreement_of, check_agreement, check_shards_agree, take_first_weights
from roundelay.checks import check_optimizer, check_strategy, refuse_ddp, refuse_ddp_around, unwrapped_optimizer
from roundelay.clock import Steps
from roundelay.cluster.environment import World, init
from roundelay.cluster.membership import Membership
from roundelay.consensus import Mean, mean_of
from roundelay.elastic import ElasticGroup, Result, Stateful, TrainingState
from roundelay.errors import DroppedError, MembershipChangedError, StrategyError
from roundelay.hooks import GradientHooks, StepHooks
from roundelay.step_times import StepTimes
from roundelay.strategies.base import Strategy
from roundelay.transport.base import LEFT, Transport
from roundelay.weights import replica_of, whole_state
from roundelay.weights.shards import ShardGroup, shard_group

log = logging.getLogger("roundelay")

CHANGES = (ConnectionError, MembershipChangedError)  # errors after which the learners of an elastic run meet and go on


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
    before its first step. If the strategy re-forms alone (ADPSGD), no other learner notices more than that. Otherwise all
    learners meet inside `backward` or `step`, and go on. A learner whose weights were replaced in a meeting drops the gradient
    at hand: that step changes nothing.

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

    Attributes:
        steps: taken so far. A learner that joins continues the count of the others.
        joined: this learner joined a run under way.
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
        optimizer = unwrapped_optimizer(optimizer)
        self.module, self.optimizer, self.strategy = module, optimizer, strategy
        self._shards = shard_group(module)
        check_strategy(strategy, self._shards)
        self._state = TrainingState(module, optimizer, extras)
        self._steps_before = 0  # before a restart
        self._observed: dict[str, float] = {}
        self._times = StepTimes()
        self._membership_lock = threading.Lock()  # peers are lost in threads of the transport
        self._attached = self._finished = self._closed = self._warned = False
        self._void = False  # the step at hand changes nothing: its gradient was dropped
        self._behind = 0  # steps to take without peers, until this learner has taken as many as they
        self._failure: Exception | None = None  # raised while backward was running
        self._cleanup = contextlib.ExitStack()
        self._elastic: ElasticGroup | None = None
        self.joined = self._ready = False
        self._world = world or (None if transport else init())
        if self._world is not None and self._world.client is not None:
            self._elastic = _elastic_group(self._world, self._state, strategy, self._shards)
            self.joined = self._world.client.joining
        else:
            self.transport = transport or _transport(self._world, self._shards)
            self.membership = membership or Membership.of(self.transport.size)
        try:
            self._begin(agreed=membership is not None)
        except BaseException as error:
            self._abort(error)
            raise

    def _begin(self, *, agreed: bool) -> None:
        check_optimizer(self.optimizer, self.module)
        self.replica = replica_of(self.module)
        self._averaged = set(map(id, self.replica.weights))
        if self._elastic is not None:
            self._enter()
        elif not agreed:
            if self._shards:
                check_shards_agree(self.strategy, self.transport)
            check_agreement(self.module, self.strategy, self.transport, self.membership.living)
            take_first_weights(self.module, self.transport, self.membership.living)
        self._attach()
        self._cleanup.callback(StepHooks(self.optimizer, self._before_step, self._after_step).remove)
        reduced = self.replica.weights if self.strategy.reduces_gradients else []
        self._gradient_hooks = GradientHooks(reduced, self._gradient_ready, self._after_backward)
        self._cleanup.callback(self._gradient_hooks.remove)

    def _attach(self) -> None:
        """Give the strategy the transport and the weights of now."""
        members = self.membership  # before a peer is lost, because all learners must use the same mixing
        self.transport.on_lost(self._peer_lost)
        self.transport.on_silent(self._peer_silent)
        if self._elastic is not None and self.strategy.synchronous:
            self.strategy.begin_at(self.steps)
        self.strategy.attach(self.replica, self.transport, members)
        self._attached = True
        for peer, reason in self.transport.lost.items():  # lost before the strategy could be told
            self.strategy.peer_lost(peer, reason)
        self.replica.mark()
        if self._elastic is not None:
            self._elastic.follow(self)

    # For the user ------------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps that the weights have seen."""
        return self._state.steps

    @property
    def members(self) -> tuple[int, ...]:
        """The living learners, by id."""
        return self.membership.living

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
        self._together(lambda members: self.transport.all_reduce(torch.zeros(1), members).result())
        self.replica.mark()

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
        traffic = self.transport.traffic
        return (
            {"steps": self.steps, "members": self.membership.size}
            | self._times.metrics(self.steps - self._steps_before)
            | {"bytes_sent": traffic.bytes_sent, "bytes_received": traffic.bytes_received}
            | {"refused": self.transport.refused.counts.total()}
            | self._observed
            | self.strategy.metrics()
        )

    @property
    def waited_s(self) -> float:
        """Seconds in which this learner has waited for others."""
        return self._times.waited_s

    def state_dict(self) -> dict[str, Any]:
        """What a restart needs besides the states of module and optimizer; save those two after this call."""
        self._warn_of_changes()
        self._run(self.strategy.before_saving)
        self.replica.mark()
        return {"steps": self.steps, "strategy": self.strategy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, with the module's current weights. If synchronous, all learners must call this."""
        self.count_from(int(state["steps"]))
        self.strategy.load_state_dict(state["strategy"])
        self.replica.mark()

    def count_from(self, steps: int) -> None:
        """Set the step count to `steps`, if this learner continues the work of another learner."""
        self._state.steps = self._steps_before = steps

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
            self._run(self.strategy.finish)
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

    @property
    def _steps_alone(self) -> bool:
        """Whether the step at hand has nothing to do with the peers."""
        return self._void or self._behind > 0

    def _gradient_ready(self, index: int) -> None:
        if self._failure is not None or self._steps_alone:
            return
        try:
            self.strategy.gradient_ready(index)
        except CHANGES as error:  # an exception would end this backward, whose gradients are needed
            if self._elastic is None:
                raise
            self._failure = error

    def _after_backward(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._recover(failure)
        if not self._steps_alone:
            self._run(self.strategy.after_backward)

    def _before_step(self) -> None:
        if self.steps == self._steps_before:  # the first step
            refuse_ddp_around(self.module)
        self._refuse_other_parameters()
        if not self._steps_alone:
            self._run(self._mix_in)

    def _mix_in(self) -> Steps:
        if self._elastic is not None:
            self._elastic.check()
        self.transport.check()
        self._warn_of_changes()
        yield from self.strategy.before_step()

    def _after_step(self) -> None:
        if self._world is not None:
            self._world.steps.taken += 1
        if self._void:
            self._void = False
            return
        self._state.steps += 1
        if self._behind:
            self._behind -= 1
            if not self._behind:
                self._attach()
        else:
            self._run(self.strategy.after_step, again=False)
        self.replica.mark()

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
                "mixed weights, so the change is lost. Change weights before the Learner is made, or inside `with "
                "learner.rewrite():`. A change that belongs to every step goes into a hook of optimizer.step that is "
                "registered before the Learner is made. Weights that are put in for an evaluation, or changed anew in every "
                "forward, do no harm.",
                self.transport.rank,
                type(self.strategy).__name__,
            )

    # Peers that come and go ------------------------------------------------------------------------------------------------

    def _run(self, begin: Callable[[], Steps], *, again: bool = True) -> None:
        """Run a hook of the strategy. If the learners of an elastic run had to meet, run it once more, unless not `again`."""
        while True:
            try:
                self._times.drive(begin())
                return
            except CHANGES as error:
                self._recover(error)
                if not again:
                    self._void = False  # the step is over
                if not again or self._steps_alone:
                    return

    def _mean(self, timeout_s: float | None = None) -> Mean:
        self._warn_of_changes()
        self._run(self.strategy.drain)
        return self._together(
            lambda members: mean_of(self.module, self.replica, self.strategy, self.transport, members), timeout_s
        )

    def _together(self, compute: Callable[[tuple[int, ...]], Result], timeout_s: float | None = None) -> Result:
        """The result of a collective of all living learners."""
        while self._elastic is not None:
            try:
                return self._elastic.together(compute, timeout_s)
            except CHANGES as error:
                self._recover(error)
                if self._behind:
                    self._attach()
                self._void, self._behind = False, 0
                self._run(self.strategy.finish if self._finished else self.strategy.drain)
        return compute(self.membership.living)

    def _recover(self, error: Exception) -> None:
        """Connect to the living learners again, if the run is elastic and the strategy cannot go on; else raise `error`."""
        dropped = isinstance(error, DroppedError)
        if self._elastic is None or (self.strategy.reforms_alone and not dropped):
            raise error
        log.warning("learner %d meets the others: %s", self.transport.rank, error)
        self._ready = not dropped
        if self._attached:
            self.strategy.abandon()
        self._attached = False
        self.transport.close(f"{type(error).__name__}: {error}")
        self._enter()
        if self._elastic.took_state:
            self._void = True
            for weight in self.replica.weights:
                weight.grad = None
        if not self._behind:
            self._attach()

    def _enter(self) -> None:
        assert self._elastic is not None
        assert self._world is not None
        agreement = agreement_of(self.module, self.strategy, self._world.size, self._world.local_size)
        self.transport, newest = self._elastic.enter(
            self.strategy, ready=self._ready, steps=self.steps, agreement=agreement
        )
        self.membership, self._ready = self._elastic.view.membership, True
        self._behind = newest - self.steps

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
            if hasattr(self, "transport"):
                self.transport.close(failure)
            if self._elastic is not None and self._world is not None:
                self._world.close(failure)


def _elastic_group(world: World, state: TrainingState, strategy: Strategy, shards: ShardGroup | None) -> ElasticGroup:
    if shards is not None:
        raise StrategyError(
            "a module in shards (FSDP2) cannot take part in an elastic run: a node is several processes, which would have to "
            "come and go together. Start it with torchrun; a node that is lost is left out there, too"
        )
    assert world.client is not None
    assert world.endpoint is not None
    return ElasticGroup(world.client, world.endpoint, state, group_size=strategy.members_of_a_group(world.local_size))


def _transport(world: World | None, shards: ShardGroup | None) -> Transport:
    assert world is not None
    return (world if shards is None else world.between_nodes(shards.ranks)).transport()
