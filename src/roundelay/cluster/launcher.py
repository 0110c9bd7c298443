"""The launcher starts one process per learner on this machine. Every process is its own failure domain.

torchrun ends all processes when one of them fails. Here the others go on, and a process that failed may be started
again. `roundelay launch` starts a user's script in this way, `roundelay train` a built-in one.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from roundelay.cluster.learner_process import LearnerProcess, Program
from roundelay.cluster.process_output import ProcessOutput
from roundelay.cluster.rendezvous.formation import SAY_EVERY_S
from roundelay.cluster.run_rendezvous import RunRendezvous
from roundelay.cluster.ticket import TICKET

LOOK_EVERY_S = 0.2
FIRST_LOOK_S = 3.0  # when it is first said that learners are missing: most need less time to start
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0  # before a process is started again; doubled every time


class Reporter:
    """Tells the user what happens to the processes: lines on standard error."""

    def say(self, sentence: str) -> None:
        """Show a line."""
        sys.stderr.write(f"roundelay: {sentence}\n")
        sys.stderr.flush()

    def lost(self, process: LearnerProcess, again_in_s: float | None) -> None:
        """A process has failed; it is started again after a while, or not at all."""
        if again_in_s is None:
            self.say(f"learner {process.label} is lost ({process.how_it_ended()}); the others go on")
        else:
            again = f"it is started again in {again_in_s:g} s"
            self.say(f"learner {process.label} has failed ({process.how_it_ended()}); {again}")

    def stopping(self) -> None:
        """The first signal was passed on to the learners."""

    def update(self, launcher: Launcher) -> None:
        """Called a few times a second while learners run."""


class Launcher:
    """Starts the learners of this machine, shows what they write, and starts those again that fail.

    Args:
        program: what every learner executes.
        rendezvous: of the run; its ticket is given to the learners.
        learners: ids of the learners to start here; None stands for a learner whose id the rendezvous chooses.
        restarts: how often one learner may be started again; -1 for no limit.
        reporter: tells the user what happens.

    Attributes:
        failed: how processes that are not started again have ended, by label, the first one first.
        lost_before_stop: the labels of processes that had failed when the first signal came.
        signals: the signals that came, the first one first.
    """

    def __init__(
        self,
        program: Program,
        rendezvous: RunRendezvous,
        learners: Sequence[int | None],
        *,
        restarts: int = 0,
        reporter: Reporter | None = None,
    ) -> None:
        self._program, self._rendezvous, self._learners = program, rendezvous, list(learners)
        self._restarts, self._reporter = restarts, reporter or Reporter()
        self._processes: dict[int, LearnerProcess] = {}  # by id; by index if the rendezvous chooses the ids
        self._begun = False  # whether all learners that begin the run here were started
        self._running: set[int] = set()
        self._again_at: dict[int, float] = {}  # when to start which process again
        self._output = ProcessOutput()
        self.failed: dict[str, str] = {}
        self.lost_before_stop: frozenset[str] = frozenset()
        self.signals: list[int] = []
        self._next_look_s = time.monotonic() + FIRST_LOOK_S
        self._was_waiting = False

    def run(self) -> int:
        """Run until every process has ended for good.

        Returns 0 if a learner has finished, 128 + the number of the signal if a signal ended the run, else 1.
        """
        before = {number: signal.signal(number, self._signalled) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with tempfile.TemporaryDirectory(prefix="roundelay-") as folder:
                self._ticket = Path(folder) / "ticket.json"
                self._rendezvous.ticket.write(self._ticket)
                for index, learner in enumerate(self._learners):
                    self.start(index if learner is None else learner)
                self._begun = True
                while self._running or self._again_at:
                    self._output.show(LOOK_EVERY_S)
                    self._look()
                    self._reporter.update(self)
                    self._say_which_are_missing()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for process in self._processes.values():
                process.end()
            self._output.close()
        finished = any(process.exit_code == 0 for process in self._processes.values())
        return 128 + self.signals[0] if self.signals else 0 if finished else 1

    @property
    def started(self) -> int:
        """How many different learners were started."""
        return len(self._processes)

    @property
    def running(self) -> frozenset[int]:
        """Learners whose process runs, also if it is frozen."""
        return frozenset(self._running)

    def send(self, learner: int, number: signal.Signals) -> None:
        """Send a signal to a learner if it still runs."""
        if learner in self._running:
            self._processes[learner].send(number)

    def start(self, learner: int) -> None:
        """Start a learner, at the beginning of the run or later. A learner that was started after the beginning joins."""
        if learner not in self._processes:
            self._processes[learner] = self._new_process(learner)
        process = self._processes[learner]
        process.start(joins=self._begun and bool(self._running))
        self._running.add(learner)
        self.failed.pop(process.label, None)
        self._output.follow(process)

    def _new_process(self, learner: int) -> LearnerProcess:
        chosen, count = None not in self._learners, len(self._learners)
        name = f"{platform.node()}-{os.getpid()}-{learner}"
        threads = str(max(1, len(os.sched_getaffinity(0)) // count))
        environment = {
            TICKET: str(self._ticket),
            "LOCAL_RANK": str(learner % count),
            "LOCAL_WORLD_SIZE": str(count),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
            # Threads of torch that wait for each other sleep. If they kept a core busy instead, which is the default, a learner
            # with two threads would be up to 100 times slower on a machine whose cores other programs use.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        }
        return LearnerProcess(self._program, name, learner if chosen else None, environment)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        self._again_at.clear()
        if len(self.signals) == 1:
            self.lost_before_stop = frozenset(self.failed)
            self._rendezvous.stop(f"the launcher got {signal.Signals(number).name}")
            self._reporter.stopping()
        for process in self._processes.values():
            process.send(number if len(self.signals) == 1 else signal.SIGKILL)

    def _look(self) -> None:
        """Notice processes that have ended, and start failed ones again when their waiting time is over."""
        for learner in [learner for learner in self._running if self._processes[learner].exit_code is not None]:
            self._running.discard(learner)
            if self._processes[learner].exit_code:
                self._failed(learner)
        for learner, due in list(self._again_at.items()):
            if time.monotonic() >= due:
                del self._again_at[learner]
                self.start(learner)

    def _failed(self, learner: int) -> None:
        process = self._processes[learner]
        self._rendezvous.died(process.learner, process.how_it_ended(), process.name)
        finished = any(each.exit_code == 0 for each in self._processes.values())
        limited = self._restarts >= 0 and process.starts > self._restarts
        again_in_s = None
        if limited or self.signals or (finished and not self._running):
            self.failed[process.label] = process.how_it_ended()
        else:
            again_in_s = min(FIRST_WAIT_S * 2 ** (process.starts - 1), LONGEST_WAIT_S)
            self._again_at[learner] = time.monotonic() + again_in_s
        if not self.signals:
            self._reporter.lost(process, again_in_s)

    def _say_which_are_missing(self) -> None:
        """Say which learners are missing, after a moment and then every few seconds; and at once when none is any more."""
        late = time.monotonic() >= self._next_look_s
        if self.signals or not (late or self._was_waiting):
            return
        waiting = self._rendezvous.waiting()
        if late:
            self._next_look_s = time.monotonic() + SAY_EVERY_S
        if waiting and late:
            self._was_waiting = True
            self._reporter.say(waiting)
        elif self._was_waiting and not waiting:
            self._was_waiting = False
            self._reporter.say("all learners are here")
