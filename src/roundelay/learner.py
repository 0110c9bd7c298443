"""Learner: connects a module, an optimizer, a strategy and a world of peers, and leaves the user's loop as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from roundelay.checks import check_optimizer, check_strategy, refuse_ddp, unwrapped_optimizer
from roundelay.cluster.environment import World
from roundelay.cluster.membership import Membership
from roundelay.consensus import Consensus
from roundelay.errors import described
from roundelay.peers import Peers
from roundelay.strategies.base import Strategy
from roundelay.strategy_hooks import StrategyHooks
from roundelay.strategy_runner import StrategyRunner
from roundelay.training_state import Stateful, TrainingState
from roundelay.transport.base import Transport
from roundelay.weights import replica_of
from roundelay.weights.shards import shard_group


class Learner:
    """One participant in decentralised training.

    It hooks the optimizer, so that the loop stays the user's:

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
        transport: connects to the peers, or with shards to those that hold the same shard; by default that of the world.
        membership: the learners that take part; by default all of the transport's. If given, the check that learners
            fit together and the broadcast of the first weights are skipped.
        world: by default `init()`, from the environment.
        extras: in an elastic run, more objects whose state a learner that joins takes over, such as a scheduler.
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
        shards = shard_group(module)
        check_strategy(strategy, module, shards)
        self._state = TrainingState(module, self.optimizer, extras)
        self.peers = Peers(
            strategy, self._state, world=world, transport=transport, membership=membership, shards=shards
        )
        self._observed: dict[str, float] = {}
        self._closed = False
        try:
            check_optimizer(self.optimizer, module)
            self.replica = replica_of(module)
            self.peers.begin(module)
            self.peers.attach(self.replica)
        except BaseException as error:
            self.peers.close(described(error))
            raise
        self._runner = StrategyRunner(self.peers, self._state, self.replica)
        self._consensus = Consensus(module, self._runner, shards)
        self._hooks = StrategyHooks(module, self.optimizer, self._runner)

    @property
    def transport(self) -> Transport:
        """The connection to the peers. In an elastic run it is another one after a meeting."""
        return self.peers.transport

    @property
    def membership(self) -> Membership:
        """The living learners, and the generation."""
        return self.peers.membership

    @property
    def members(self) -> tuple[int, ...]:
        """The living learners, by id."""
        return self.membership.living

    @property
    def elastic(self) -> bool:
        """Whether learners may come and go."""
        return self.peers.group is not None

    @property
    def joined(self) -> bool:
        """Whether this learner joined a run under way."""
        return self.peers.joined

    @property
    def steps(self) -> int:
        """Steps that the weights have seen. A learner that joins continues the count of the others."""
        return self._state.steps

    @property
    def waited_s(self) -> float:
        """Seconds in which this learner has waited for others."""
        return self._runner.times.waited_s

    def accumulate(self) -> AbstractContextManager[None]:
        """Backward passes in here only add up gradients; the next pass outside reduces the sum, like DDP's no_sync."""
        return self._hooks.gradients.paused()

    def consensus(self, timeout_s: float | None = None) -> AbstractContextManager[nn.Module]:
        """The module with the exact mean weights of all learners; its own weights come back at the end of the block.

        A collective: all learners enter it equally often, after equally many steps. Learners that may have taken different
        numbers of steps call `finish` first. Exchanges pause meanwhile. Floating-point buffers are averaged (BatchNorm's
        variance by its second moment). Integer buffers are those of the first living learner. In an elastic run, learners
        that are lost meanwhile are left out of the mean, and `timeout_s` limits the wait for learners that do not come: then
        MissingLearnersError names them, and training can go on.
        """
        return self._consensus.placed(timeout_s)

    def settle(self, timeout_s: float | None = None) -> None:
        """Leave the mean of all learners in the module for good. A collective, like `consensus`."""
        self._consensus.settle(timeout_s)

    def gather(self, value: object) -> dict[int, Any]:
        """The values of all living learners of an elastic run, by id. A collective, like `consensus`.

        `value` is anything that JSON knows. Raises StrategyError in a run of fixed size, where torch.distributed gathers.
        """
        return self._runner.gather(value)

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
        return self._consensus.state_dict()

    def observe(self, **figures: float) -> None:
        """Add figures of your own to the metrics, such as `observe(loss=loss.item())`; the last value of a name counts."""
        self._observed.update(figures)

    def metrics(self) -> dict[str, float]:
        """This learner so far: steps, seconds per step split into compute, wait and mix, bytes, and the strategy's own."""
        own = {"steps": self.steps, "members": self.membership.size} | self._runner.times.metrics()
        return own | self.transport.metrics() | self._observed | self.strategy.metrics()

    def state_dict(self) -> dict[str, Any]:
        """What a restart needs besides the states of module and optimizer; save those two after this call."""
        self._runner.save()
        return {"steps": self.steps, "strategy": self.strategy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, with the module's current weights. With a synchronous strategy all must call this."""
        self.count_from(int(state["steps"]))
        self.strategy.load_state_dict(state["strategy"])
        self.replica.mark()

    def count_from(self, steps: int) -> None:
        """Set the step count to `steps`, if this learner continues the work of another learner."""
        self._state.steps = steps

    def finish(self) -> None:
        """Take no more steps, and stay until no peer needs this learner. Only `consensus` may follow. Idempotent."""
        self._runner.finish()

    def close(self) -> None:
        """Finish, then leave. Idempotent."""
        if not self._closed:
            try:
                self.finish()
            except BaseException as error:
                self._leave(error)
                raise
            self._leave()

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close() if error is None else self._leave(error)

    def _leave(self, error: BaseException | None = None) -> None:
        """Remove the hooks and disconnect. After an error the peers are told why."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as last:  # calls in reverse order, each one even if another raises
            last.callback(self.peers.close, "" if error is None else described(error))
            last.callback(self._hooks.remove)
            if error is not None:
                last.callback(self.strategy.abandon)
