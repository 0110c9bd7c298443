"""How a run ended, and what to do next: the last lines on the terminal, and the exit code."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundelay.cluster.rendezvous.messages import Message
from roundelay.training import run_directory


@dataclass(frozen=True)
class Ending:
    """What the supervisor of one machine knows when all of its learners have ended.

    Attributes:
        folder: of the run.
        command: the command that continues the run.
        signal: the first signal that the supervisor got; None if there was none.
        killed: a second signal came, which kills the learners.
        stop_reason: why the rendezvous stopped the run; empty if it did not.
        failed: why learners of this machine ended early, by the learner's label, the first one first.
        learners: how many learners this machine had.
        joined: the learners had joined a run under way.
        lost_before_stop: the learners in `failed` that were lost before the signal came. They did not keep the others
            from saving.
        several_machines: other machines may have files of the same checkpoints.
    """

    folder: Path
    command: str
    signal: int | None
    stop_reason: str
    failed: Mapping[str, str]
    learners: int
    joined: bool
    lost_before_stop: frozenset[str] = frozenset()
    several_machines: bool = False
    killed: bool = False

    def verdict(self) -> tuple[str, int]:
        """The last lines, and the exit code: 0 if the run was finished, 128 + the number of the signal, and else 1."""
        finished = self.results() is not None
        code = 1 if self.signal is None else 128 + self.signal
        if finished and len(self.failed) < self.learners:
            return self._summary(), 0
        if self.stop_reason:
            saved = (
                f"the run was saved and stopped; go on with:\n  {self.command}\n"
                if self._saved()
                else "nothing was saved\n"
            )
            return f"roundelay: error: {self.stop_reason}; {saved}", 1
        if self.joined and not self.failed:
            return f"left the run; join it again with:\n  {self.command}\n", 0 if self.signal is None else code
        if self.signal is not None and self.failed.keys() <= self.lost_before_stop and len(self.failed) < self.learners:
            lost = "".join(f"learner {learner} was lost before ({self.failed[learner]})\n" for learner in self.failed)
            return f"{lost}stopped and saved; go on with:\n  {self.command}\n", code
        if self.killed or (self.signal is not None and self._interrupted()):
            how = "killed" if self.killed else "stopped before training began"
            again = (
                f"go on from the last checkpoint with:\n  {self.command}\n" if self._saved() else "nothing was saved\n"
            )
            return f"{how}; {again}", code
        return self._ended_early(), code

    def results(self) -> dict[str, Any] | None:
        """What the run has found; None if it is not finished."""
        path = self.folder / run_directory.RESULTS
        return json.loads(path.read_text()) | {"run": str(self.folder)} if path.exists() else None

    def _interrupted(self) -> bool:
        """Whether the signal came before the learners were ready to stop and save at one."""
        ways = ("KeyboardInterrupt", "SIGINT", "SIGTERM")
        return all(any(way in reason for way in ways) for reason in self.failed.values())

    def _saved(self) -> bool:
        saved = "learner-*.json" if self.several_machines else "manifest.json"
        return any((self.folder / "checkpoints").glob(f"*/{saved}"))

    def _ended_early(self) -> str:
        first = next(iter(self.failed), None)
        why = "no learner finished it" if first is None else f"learner {first} was lost first ({self.failed[first]})"
        lines = "" if first is None else _traceback(self.folder / "logs" / f"learner-{first}.log")
        if 1 < len(self.failed) == self.learners and len(set(self.failed.values())) == 1:
            why = f"all learners failed in the same way: {next(iter(self.failed.values()))}"
        lines += f"roundelay: error: the run ended early: {why}; logs are in '{self.folder / 'logs'}'\n"
        if self._saved():
            lines += f"go on from the last checkpoint with:\n  {self.command}\n"
        return lines

    def _summary(self) -> str:
        results = self.results()
        assert results is not None
        lines = []
        for split in ("valid", "test"):
            figures = ", ".join(f"{name} {value:.4f}" for name, value in results[split].items())
            lines.append(f"mean model, {split}: {figures}")
        if isinstance(results.get("sample"), str):
            lines.append(f"the mean model writes:\n\n{results['sample'].strip()}\n")
        for learner, reason in self.failed.items():
            lines.append(f"learner {learner} was lost on the way ({reason}); logs are in '{self.folder / 'logs'}'")
        problems = self.folder / run_directory.PROBLEMS
        if problems.is_file():
            kinds = Counter(line.partition(":")[0] for line in problems.read_text(encoding="utf-8").splitlines())
            counted = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
            lines.append(f"problems with the data: {counted}; one line each: '{problems}'")
        place = results.get(run_directory.MODEL_PLACE)
        model = f"the model is on {place}" if place else self.folder / run_directory.MODEL
        lines.append(f"finished in {results['elapsed_s']:.1f} s: {model}")
        return "\n".join(lines) + "\n"


def _traceback(log: Path) -> str:
    """The last traceback in the log of a learner; empty if there is none."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    _, begin, last = text.rpartition("Traceback (most recent call last):\n")
    return begin + last if begin else ""


def sentence(event: Message) -> str:
    """The event as a line for the terminal."""
    learner = "" if event["learner"] is None else f"learner {event['learner']} "
    reason = f" ({event['reason']})" if event["reason"] else ""
    if event["event"] == "recovered":
        living = "1 learner goes" if event["living"] == 1 else f"{event['living']} learners go"
        return f"recovered after {event['seconds']:.1f} s: {living} on"
    if event["event"] in ("stopping", "stopped"):
        return f"stopping: {event['reason']}"
    return f"{learner}{event['event']}{reason}; {event['living']} live"
