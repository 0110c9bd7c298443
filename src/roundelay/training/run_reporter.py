"""Shows on the terminal, and writes to the metrics, what happens to the learners of a run."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from pathlib import Path

from roundelay.cluster.launcher import Launcher, Reporter
from roundelay.cluster.learner_process import KILLED, LearnerProcess
from roundelay.cluster.rendezvous.messages import Message
from roundelay.training.display import Display
from roundelay.training.metrics import JsonLines
from roundelay.training.verdict import sentence

# Events after a learner has failed are shown so much later: an error in the user's code ends all learners, and is told once.
HOLD_S = 5.0


class RunReporter(Reporter):
    """Tells the user what happens in a run of `roundelay train`.

    Args:
        display: the progress of the run.
        metrics: the file to which events are written.
        meanwhile: called a few times a second with the launcher, for example to disturb learners.

    Attributes:
        events: events of the rendezvous; any thread may put them in.
        has_events: whether the rendezvous is in this process. If not, deaths are reported by the launcher only.
        stop_reason: why the rendezvous stopped the run; empty if it did not.
    """

    def __init__(self, display: Display, metrics: Path, meanwhile: Callable[[Launcher], None]) -> None:
        self._display, self._metrics, self._meanwhile = display, metrics, meanwhile
        self.events: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.has_events = True
        self.stop_reason = ""
        self._stopping = False
        self._held: list[Message] = []
        self._hold_until_s = 0.0

    def say(self, sentence: str) -> None:
        """Show a line above the table."""
        self._display.say(sentence)

    def lost(self, process: LearnerProcess, again_in_s: float | None) -> None:
        """Mark the learner in the table. Its death is an event of the rendezvous, too."""
        how = process.how_it_ended()
        if process.learner is not None:
            self._display.gone(process.learner, how.partition(":")[0])
        if not self.has_events and not self._stopping:
            self.say(f"learner {process.label} died ({how})")

    def stopping(self) -> None:
        """Say what happens now. From now on the end of a learner is no news."""
        self._stopping = True
        self.say("stopping: every learner finishes its step and saves; press Ctrl-C again to kill them")

    def update(self, launcher: Launcher) -> None:
        """Show new metrics and events."""
        self._meanwhile(launcher)
        self._display.update()
        self.show_events()

    def show_events(self) -> None:
        """Write the events of the rendezvous to the metrics, and show them."""
        while not self.events.empty():
            event = self.events.get()
            if event["event"] in (
                "left",
                "waiting",
            ):  # every learner leaves at the end; the launcher says which are missing
                continue
            sink = JsonLines(self._metrics)
            sink.write(event | {"elapsed_s": self._display.elapsed_s, "samples_seen": self._display.samples_seen})
            sink.close()
            if event["event"] == "stopping":
                self.stop_reason = event["reason"]
            if event["event"] == "died" and not event["reason"].startswith(KILLED):
                self._hold_until_s = time.monotonic() + HOLD_S
            self._held.append(event)
        if time.monotonic() >= self._hold_until_s:
            self._show_held()

    def finish(self, *, all_failed: bool) -> None:
        """Show what is left. If all learners have failed, the verdict says why, and their deaths are not told one by one."""
        self.show_events()
        if not all_failed:
            self._show_held()

    def _show_held(self) -> None:
        for event in self._held:
            if not (self._stopping and event["event"] == "died"):
                self.say(sentence(event))
        self._held.clear()
