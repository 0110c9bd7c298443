"""One learner of a run: it follows the membership from the first view to the end, and trains in every view."""

from __future__ import annotations

import logging

import torch

from roundelay.cluster.endpoint import Endpoint
from roundelay.cluster.environment import World
from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.elastic import ElasticGroup
from roundelay.errors import DivergedError, DroppedError, MembershipChangedError, PeerLostError
from roundelay.learner import Learner
from roundelay.training.build import learner_seed, optimizer_of, strategy_of
from roundelay.training.checkpoint import Checkpoint
from roundelay.training.config import Config
from roundelay.training.evaluator import check_judged_by
from roundelay.training.loop import LeftError, TrainingLoop
from roundelay.training.other_machines import RunFiles
from roundelay.training.participation import Participation
from roundelay.training.state import Resumed, restore, restore_weights, resumed_from
from roundelay.training.task import Task
from roundelay.training_state import TrainingState

log = logging.getLogger("roundelay")


class Trainer:
    """One learner of a run.

    Args:
        config: of the run.
        files: where the files of the run are.
        task: of the run. Build it before the learner registers: building may take long, and other learners wait for a
            learner that has registered.
        world: rank and size at the beginning.
        client: a connection to the rendezvous, where this learner has registered.
        endpoint: connects this learner to the others.
        elastic: whether synchronous learners go on when the membership changes; if not, `run` raises the error.

    Attributes:
        part: the learner's place in the run.
        loop: takes the steps.

    Raises ConfigError if the task is judged by a figure that it does not have.
    """

    def __init__(
        self,
        config: Config,
        files: RunFiles,
        task: Task,
        world: World,
        *,
        client: RendezvousClient,
        endpoint: Endpoint,
        elastic: bool = True,
    ) -> None:
        self.config, self.task, self._client, self._elastic = config, task, client, elastic
        self.module = task.module().to(world.device)
        check_judged_by(task, self.module)
        self.optimizer = optimizer_of(config.optimizer, task.parameter_groups(self.module))
        state = TrainingState(self.module, self.optimizer)
        self._group = ElasticGroup(client, endpoint, state, group_size=config.group_size or world.local_size)
        self.part = Participation(config, len(task), world, client, self._group)
        self.loop = TrainingLoop(
            config, files, task, self.module, self.optimizer, part=self.part, group=self._group, client=client
        )
        self._group.on_link, self._group.stopping = self._link_changed, lambda: self.loop.stopping.asked

    def run(self, checkpoint: Checkpoint | None = None, *, joins: bool = False, guest: bool = False) -> bool:
        """Train until the budget is used up or a signal asks to stop; True if the budget is used up.

        Args:
            checkpoint: to resume from.
            joins: the other learners are under way, and this learner takes its weights from them.
            guest: the learner did not begin the run. If a signal asks it to stop, it leaves, and the run goes on.

        Raises DivergedError if the gradients of this learner stay non-finite.
        """
        torch.manual_seed(learner_seed(self.config, self._group.id))
        self.loop.stopping.guest = guest
        world = self.part.world
        self._begin(resumed_from(checkpoint, world.rank, world.size, self.part.partition), ready=not joins)
        try:
            finished = self._train_with_the_living()
        except DivergedError as error:
            raise DivergedError(f"{error}; {self.loop.saver.last_checkpoint()}") from None
        except LeftError as error:
            log.warning("learner %d leaves the run: %s", self._group.id, error)
            finished = False
        self.loop.close()
        return finished

    def _begin(self, resumed: Resumed, *, ready: bool) -> None:
        if resumed.state is not None:  # a learner that joins before the first step needs these weights, too
            restore_weights(self.module, self.optimizer, resumed.state)
        self.loop.saver.evaluator.newest = self.part.begin(resumed, ready=ready)
        self.loop.step.counts = resumed.counts
        self._elapsed_before_s = resumed.counts.elapsed_s if ready else 0.0

    def _train_with_the_living(self) -> bool:
        """Take part until the end, whatever happens to other learners; True if the budget is used up."""
        dropped = False
        while True:
            try:
                if dropped:
                    self.loop.saver.evaluator.newest = self.part.join_again()
                    dropped = False
                if self.part.must_meet:
                    self.part.meet()
                return self._take_part()
            except DroppedError as error:
                log.warning("learner %d was dropped (%s) and joins again", self._group.id, error)
                dropped = True
            except (PeerLostError, MembershipChangedError) as error:
                dropped = self.part.reforms_alone and self._client.joining
                if (self.part.reforms_alone and self.part.began and not dropped) or not self._elastic:
                    raise
                log.warning(
                    "learner %d %s: %s", self._group.id, "joins again" if dropped else "meets the others", error
                )
            self.optimizer.zero_grad()

    def _take_part(self) -> bool:
        """Connect to the learners of this view, and train with them. Returns and raises what `TrainingLoop.run` does."""
        strategy = strategy_of(self.config, self.part.world.local_size)
        transport, steps, saved = self.part.connect(strategy)
        meter, seen = self.loop.meter, self.loop.saver.evaluator.newest
        with Learner(self.module, self.optimizer, strategy, transport, self._group.view.membership) as learner:
            learner.count_from(steps)
            if saved is not None:
                restore(learner, saved)
                if self.part.world.rank == 0:
                    meter.write({"kind": "event", "event": "resumed", "samples_seen": seen})
            if not self.part.began:
                self.part.began = True
                meter.start_clock(self._elapsed_before_s + self._client.elapsed_s)
            self._group.follow(learner.peers)
            return self.loop.run(learner)

    def _link_changed(self, peer: int, reached: bool) -> None:  # noqa: FBT001
        event = "reachable" if reached else "unreachable"
        row = {"kind": "event", "event": event, "learner": peer, "reason": f"seen by learner {self._group.id}"}
        self.loop.meter.write(row | {"samples_seen": self.part.position.samples_seen})
