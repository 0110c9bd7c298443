"""Learner: joins a module, an optimizer, a strategy and a transport, and leaves the user's loop as it is."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundelay.clock import Steps
from roundelay.cluster.membership import Membership
from roundelay.consensus import consensus_of
from roundelay.errors import StrategyError
from roundelay.strategies.base import Strategy
from roundelay.topology import Mixing
from roundelay.transport.base import LEFT, Transport
from roundelay.weights.replica import Flat, Replica

log = logging.getLogger("roundelay")


class Learner:
    """One participant in decentralised training.

    Hooks the optimizer (and, where the strategy reduces gradients, the weights), so that the loop stays the user's:

        with Learner(model, optimizer, strategy, world.transport()) as learner:
            for x, y in loader:
                loss_fn(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    At the start every learner takes learner 0's weights and buffers. Leaving the block ends the learner's part: it
    stays until nobody needs it any more, or goes at once if the block raised.

    Raises StrategyError if module, optimizer or strategy do not fit together, PeerLostError (from `backward` or `step`)
    when a synchronous strategy loses a peer.

    Args:
        module: what is trained.
        optimizer: of its parameters.
        strategy: how learners average.
        transport: the way to the others.
        membership: who they are, where somebody has already seen to it that they fit together and begin with the weights
            they should; without it all of the transport's take part, are checked, and begin with learner 0's weights.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        transport: Transport,
        membership: Membership | None = None,
    ) -> None:
        self.module, self.optimizer, self.strategy, self.transport = module, optimizer, strategy, transport
        self._agreed = membership is not None
        self.membership = membership or Membership.of(transport.size)
        self._membership_lock = threading.Lock()  # peers are lost in threads of the transport
        self.steps = self._steps_before = 0  # of which so many before a restart
        self._observed: dict[str, float] = {}
        self._seconds = {"wait": 0.0, "mix": 0.0}
        self._began = time.perf_counter()
        self._accumulating = self._finished = self._closed = False
        self._told_of_changes = False
        self._backward: int | None = None  # the backward pass whose gradients are being reduced
        # The step under way: a subclass's step() that calls super().step() has the hooks run for both.
        self._step_frame: FrameType | None = None
        self._inner_steps = 0
        self._ending = contextlib.ExitStack()  # what is to be undone
        try:
            self._begin()
        except BaseException as error:
            self._abort(error)
            raise

    def _begin(self) -> None:
        _check_optimizer(self.optimizer, self.module)
        self.replica = Replica(self.module)
        self._averaged = set(map(id, self.replica.weights))
        everyone = self.membership  # also who leaves before we are attached: the mixing is laid over those who began
        self.transport.on_lost(self._lost)
        self.transport.on_quiet(self._unheard)
        if not self._agreed:
            self._agree(everyone.living)
            self._take_first_weights(everyone.living)
        self.strategy.attach(self.replica, self.transport, everyone)
        self.replica.mark()
        self._ending.callback(self.replica.move_out)
        self._ending.callback(self.optimizer.register_step_pre_hook(self._before_step).remove)
        self._ending.callback(self.optimizer.register_step_post_hook(self._after_step).remove)
        if self.strategy.reduces_gradients:
            for index, weight in enumerate(self.replica.weights):
                hook = lambda _, index=index: self._gradient_ready(index)  # noqa: E731
                self._ending.callback(weight.register_post_accumulate_grad_hook(hook).remove)

    # The user's side ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in this block only add up gradients; the next one outside reduces the sum (DDP's no_sync)."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    @contextlib.contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """The module with the exact mean weights of all learners; everything is put back afterwards.

        A collective: all learners enter it equally often. Exchanges pause meanwhile. Floating buffers are averaged
        (BatchNorm's variance by its second moment), integer ones are learner 0's.

        After equally many steps; learners that may have taken different numbers of them `finish` first, for a synchronous
        one waits for the next step of its neighbours.
        """
        self._notice_changes()
        self._run(self.strategy.drain())
        try:
            with consensus_of(self.module, self.replica, self.strategy, self.transport, self.membership):
                yield self.module
        finally:
            self.replica.mark()

    def observe(self, **figures: float) -> None:
        """Put figures of your own beside the learner's, such as `observe(loss=loss.item())`; the last ones count."""
        self._observed.update(figures)

    def metrics(self) -> dict[str, float]:
        """What this learner has done so far: steps, seconds split into compute, wait and mix, bytes, and the strategy's own."""
        total = time.perf_counter() - self._began
        steps = max(self.steps - self._steps_before, 1)
        communicating = sum(self._seconds.values())
        return (
            {
                "steps": self.steps,
                "step_s": total / steps,
                "compute_s": (total - communicating) / steps,
                "wait_s": self._seconds["wait"] / steps,
                "mix_s": self._seconds["mix"] / steps,
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
        return self._seconds["wait"]

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart besides module and optimizer, which hold their part of it now."""
        self._notice_changes()
        self._run(self.strategy.before_saving())
        self.replica.mark()
        return {"steps": self.steps, "strategy": self.strategy.state_dict()}

    def count_from(self, steps: int) -> None:
        """Count steps from here, for a learner that goes on where another was."""
        self.steps = self._steps_before = steps

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, with the weights that the module has now; where learners wait for each other, all do so."""
        self.count_from(int(state["steps"]))
        self.strategy.load_state_dict(state["strategy"])
        self.replica.mark()

    def reform(self, mixing: Mixing, membership: Membership) -> None:
        """Go on with those who live now, on this mixing; for strategies that need nobody's consent. May come from any thread."""
        self.strategy.reform(mixing, membership)
        with self._membership_lock:
            self.membership = membership

    def finish(self) -> None:
        """Take no more steps, and stay until nobody needs this learner for theirs; only `consensus` may follow. Idempotent."""
        if not self._finished:
            self._finished = True
            self._notice_changes()
            self._run(self.strategy.finish())
            self.replica.mark()

    def close(self) -> None:
        """End this learner's part: finish, then leave. Idempotent."""
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

    # The hooks -----------------------------------------------------------------------------------------------------------

    def _gradient_ready(self, index: int) -> None:
        if self._accumulating:
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
        self.strategy.gradient_ready(index)

    def _after_backward(self) -> None:
        self._backward = None
        self._run(self.strategy.after_backward())

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caller = sys._getframe(1)
        if self._step_frame is not None and self._step_frame in _callers(caller):
            self._inner_steps += 1
            return
        self._step_frame, self._inner_steps = caller, 0
        if any(callable(argument) for argument in (*args, *kwargs.values())):
            raise StrategyError(
                "optimizer.step() was given a closure; compute the gradient first and call step() without one"
            )
        self._refuse_strangers()
        self.transport.check()
        self._notice_changes()
        self._run(self.strategy.before_step())

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inner_steps:
            self._inner_steps -= 1
            return
        self._step_frame = None
        self._run(self.strategy.after_step())
        self.replica.mark()
        self.steps += 1

    def _refuse_strangers(self) -> None:
        """No weight may be trained by this learner alone: raise StrategyError for one that is stepped and not averaged."""
        for group in self.optimizer.param_groups:
            if self._averaged.issuperset(map(id, group["params"])):
                continue
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in self._averaged:
                    raise StrategyError(
                        f"the optimizer steps a parameter of shape {tuple(parameter.shape)} that learners do not average: it is "
                        "no part of the Learner's module, or was frozen when the Learner was made. Make the Learner anew, "
                        "with a module that has it; what is to stay local needs an optimizer of its own"
                    )

    def _notice_changes(self) -> None:
        """Say, once, that weights which somebody has changed are about to be replaced."""
        if self.strategy.mixes_weights and self.replica.touched() and not self._told_of_changes:
            self._told_of_changes = True
            log.warning(
                "learner %d: the module's weights were changed, and not by a step of this optimizer. %s replaces them by those "
                "that it mixes, so the change is lost. Load weights before the Learner is made, or between learner.state_dict() "
                "and learner.load_state_dict(); what belongs to every step goes into a hook of optimizer.step that is registered "
                "before the Learner is made. Weights put in for an evaluation, or changed anew in every forward, do no harm.",
                self.transport.rank,
                type(self.strategy).__name__,
            )

    def _run(self, steps: Steps) -> None:
        """Drive a strategy's generator: wait for what it yields. Only a peer that dies or freezes ends the wait."""
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
        self._seconds["wait"] += waited
        self._seconds["mix"] += time.perf_counter() - began - waited

    # Beginning and end -----------------------------------------------------------------------------------------------------

    def _agree(self, members: tuple[int, ...]) -> None:
        """Raise StrategyError unless all learners have the same kind of module and of strategy.

        Anything else would mix up weights, or have learners wait for messages that nobody sends.
        """
        shape = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in self.module.named_parameters()]
        shape += [(name, tuple(b.shape), str(b.dtype), False) for name, b in self.module.named_buffers()]
        if who := self._who_differs(repr(shape), members):
            raise StrategyError(
                f"the module of learner {who} differs from learner 0's in names, shapes, dtypes or frozen parameters; "
                "build the same module everywhere"
            )
        if who := self._who_differs(self.strategy.agreement(self.transport.local_size), members):
            raise StrategyError(
                f"the strategy of learner {who} differs from learner 0's; "
                "build the same one everywhere, on the same mixing with the same seed, in groups of the same size"
            )

    def _who_differs(self, text: str, members: tuple[int, ...]) -> str:
        digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.int64)
        first = digest.clone()
        self._wait_for(self.transport.broadcast(first, 0, members))
        differing = torch.zeros(self.transport.size, dtype=torch.int64)
        differing[self.transport.rank] = int(not torch.equal(first, digest))
        self._wait_for(self.transport.all_reduce(differing, members))
        return ", ".join(map(str, differing.nonzero().flatten().tolist()))

    def _take_first_weights(self, members: tuple[int, ...]) -> None:
        tensors: list[Tensor] = [p.detach() for p in self.module.parameters()] + list(self.module.buffers())
        flat = Flat(tensors, on=tensors[0].device)
        flat.read(tensors)
        # As bytes, for not every engine knows every dtype.
        self._wait_for(self.transport.broadcast(flat.storage, 0, members))
        flat.write(tensors)

    @staticmethod
    def _wait_for(future: Any) -> None:  # noqa: ANN401
        future.result()

    def _lost(self, peer: int, reason: str) -> None:
        with self._membership_lock:
            self.membership = self.membership.without(peer)
        level = logging.INFO if reason == LEFT else logging.WARNING
        log.log(level, "learner %d has lost learner %d: %s", self.transport.rank, peer, reason)
        if not self._closed:  # the training thread may have heard of the loss first, and given up because of it
            self.strategy.lost(peer, reason)

    def _unheard(self, peer: int, quiet: bool) -> None:  # noqa: FBT001  # a listener
        if not self._closed:
            self.strategy.unheard(peer, quiet)

    def _abort(self, error: BaseException) -> None:
        """Leave at once; those who count on this learner are told why."""
        if self._closed:
            return
        try:
            self.strategy.abandon()
        finally:
            self._release(f"{type(error).__name__}: {error}")

    def _release(self, failure: str = "") -> None:
        self._closed = True
        try:
            self._ending.close()
        finally:
            self.transport.close(failure)


def _callers(frame: FrameType) -> Iterator[FrameType]:
    while frame.f_back is not None:
        frame = frame.f_back
        yield frame


def _check_optimizer(optimizer: Optimizer, module: nn.Module) -> None:
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if stepped.isdisjoint(map(id, module.parameters())):
        raise StrategyError("the optimizer has none of the module's parameters; build it from module.parameters()")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise StrategyError(
            "LBFGS evaluates the loss several times in one step, which no averaging can follow; use another optimizer"
        )
