"""Runs the hooks of a strategy. In an elastic run a hook that fails because a learner has come or gone is run again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from roundelay.checks import ChangeWarning
from roundelay.clock import Steps
from roundelay.elastic import Result
from roundelay.errors import DroppedError, MembershipChangedError, StrategyError
from roundelay.group_computation import together
from roundelay.peers import Peers
from roundelay.step_times import StepTimes
from roundelay.training_state import TrainingState
from roundelay.weights import Replica

log = logging.getLogger("roundelay")

CHANGES = (ConnectionError, MembershipChangedError)  # errors after which the learners of an elastic run meet and go on


class StrategyRunner:
    """Runs the hooks of the strategy, which is attached already, and counts steps.

    If learners of an elastic run must meet, this learner connects again. A learner that is behind the others then takes
    its missing steps without them. If the meeting replaced its weights, its current step changes nothing.

    Args:
        peers: the other learners.
        state: what the learner trains; counts the steps that its weights have seen.
        replica: the weights.

    Attributes:
        peers, replica: as given.
        strategy: the strategy of the learner.
        warning: warns of changed weights that the strategy is about to replace.
        times: seconds that the hooks of the strategy have waited and worked.
        finished: this learner takes no more steps.
    """

    def __init__(self, peers: Peers, state: TrainingState, replica: Replica) -> None:
        self.peers, self.replica, self.strategy = peers, replica, peers.strategy
        self._state = state
        self.warning = ChangeWarning(self.strategy, replica, peers.transport.rank)
        self.times = StepTimes()
        self.finished = False
        self._void = False  # the current step changes nothing: its gradient was dropped
        self._behind = 0  # steps to take without peers, until this learner has caught up with them

    @property
    def steps_alone(self) -> bool:
        """Whether the current step is taken without the peers: its gradient was dropped, or this learner catches up."""
        return self._void or self._behind > 0

    def run(self, begin: Callable[[], Steps]) -> None:
        """Run a hook of the strategy. If learners had to meet meanwhile, run it again, unless `steps_alone` is set."""
        while True:
            try:
                self.times.drive(begin())
                return
            except CHANGES as error:
                self.recover(error)
                if self.steps_alone:
                    return

    def end_step(self) -> None:
        """A step is over: count it, unless it was void, and run the hook after it."""
        if self.peers.world is not None:
            self.peers.world.steps.taken += 1
        if self._void:
            self._void = False
            return
        self._state.steps += 1
        self.times.steps += 1
        if self._behind:
            self._behind -= 1
            if not self._behind:
                self.peers.attach(self.replica)
            return
        try:
            self.times.drive(self.strategy.after_step())
        except CHANGES as error:
            self.recover(error)
            self._void = False  # the current gradient was already applied

    def save(self) -> None:
        """Run the hook before the learner's state is saved."""
        with self.warning.before_replacing():
            self.run(self.strategy.before_saving)

    def drain(self) -> None:
        """Run the hook before a collective. Learners that have finished, and had to meet meanwhile, finish again together."""
        if self.finished:
            self._until_all_are_there(lambda: self.times.drive(self.strategy.drain()))
        else:
            self.run(self.strategy.drain)

    def finish(self) -> None:
        """Run the hook after the last step. Idempotent."""
        if not self.finished:
            with self.warning.before_replacing():
                self.finished = True
                self._run_between_steps(self.strategy.finish)

    def together(self, compute: Callable[[tuple[int, ...]], Result], timeout_s: float | None = None) -> Result:
        """The result of a collective of all living learners. The caller has let the strategy drain before."""
        group = self.peers.group
        if group is None:
            return compute(self.peers.membership.living)
        return self._until_all_are_there(lambda: together(group, compute, timeout_s))

    def gather(self, value: object) -> dict[int, Any]:
        """The values of all living learners of an elastic run, by id. Raises StrategyError in a run of fixed size."""
        group = self.peers.group
        if group is None:
            raise StrategyError("gather needs an elastic run; in a run of fixed size use torch.distributed.all_gather")
        return self._until_all_are_there(lambda: dict(group.gather(value).values))

    def _until_all_are_there(self, collective: Callable[[], Result]) -> Result:
        """The result of a collective. If learners had to meet meanwhile, it is tried again."""
        while True:
            try:
                return collective()
            except CHANGES as error:
                self._recover_between_steps(error)
                self._run_between_steps(self.strategy.finish if self.finished else self.strategy.drain)

    def _run_between_steps(self, begin: Callable[[], Steps]) -> None:
        """As `run`, where no step is left to be taken without the peers: all learners run the hook together."""
        while True:
            try:
                self.times.drive(begin())
                return
            except CHANGES as error:
                self._recover_between_steps(error)

    def _recover_between_steps(self, error: Exception) -> None:
        self.recover(error)
        if self._behind:
            self.peers.attach(self.replica)
        self._void, self._behind = False, 0

    def recover(self, error: Exception) -> None:
        """Connect to the living learners again, if the run is elastic and the strategy cannot go on; else raise `error`."""
        dropped, group = isinstance(error, DroppedError), self.peers.group
        if group is None or (
            self.strategy.reforms_alone and not isinstance(error, DroppedError | MembershipChangedError)
        ):
            raise error
        log.warning("learner %d meets the others: %s", self.peers.transport.rank, error)
        self._behind = self.peers.reconnect(group, error, ready=not dropped)
        if group.took_state or dropped:  # the batch of a learner that was dropped is given to another one
            self._void = True
            for weight in self.replica.weights:
                weight.grad = None
        if not self._behind:
            self.peers.attach(self.replica)
