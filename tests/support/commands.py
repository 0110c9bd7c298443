"""`roundelay` commands in the background, whose learners a test kills, freezes and waits for."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from roundelay.training.metrics import read_rows

PROGRAMS = Path(__file__).parents[1] / "integration" / "programs"
PATIENCE_S = 120.0


class Command:
    """`roundelay ...` in the background; whatever happens, nothing of it is left after the block."""

    def __init__(self, *words: object, inside: tuple[str, ...] = (), **variables: str) -> None:
        path = os.pathsep.join([str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by __exit__
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-m", "roundelay", *map(str, words)],
            env=os.environ | {"PYTHONPATH": path} | variables,
            stdout=self._output,
            stderr=self._output,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        learners = self.learners() if self.process.poll() is None else []
        for pid in [*learners, self.process.pid]:
            if self.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._output.close()

    def said(self) -> str:
        """All output so far."""
        self._output.flush()
        return Path(f"/proc/self/fd/{self._output.fileno()}").read_text()

    def learners(self) -> list[int]:
        """Process ids of the learners, in the order of their start."""
        pid = self.process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def wait_for(self, condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
        """Wait until `condition()` is true while the command runs."""
        deadline = time.monotonic() + patience_s
        while not condition():
            assert self.process.poll() is None, f"ended before {what}: {self.said()}"
            assert time.monotonic() < deadline, f"no {what} in {patience_s:g} s: {self.said()}"
            time.sleep(0.05)

    def ended(self, patience_s: float = PATIENCE_S) -> int:
        """Wait for the end; the exit code. A run that hangs fails the test."""
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"hangs: {self.said()}") from None

    def finished(self, patience_s: float = PATIENCE_S) -> str:
        """Wait for a good end; all output."""
        code, said = self.ended(patience_s), self.said()
        assert code == 0, said
        return said

    @contextlib.contextmanager
    def frozen(self, *learners: int, launcher: bool = False) -> Iterator[None]:
        """These learners, by the order of their start, stand still in this block; with `launcher`, the command, too."""
        pids = [self.learners()[learner] for learner in learners] + [self.process.pid] * launcher
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


def rows_of(folder: Path, kind: str, name: str = "metrics.jsonl") -> list[dict[str, object]]:
    """The rows of the metrics of this kind so far."""
    path = folder / name
    return [row for row in read_rows(path) if row["kind"] == kind] if path.exists() else []


def trains(folder: Path, *learners: int) -> bool:
    """Whether all these learners have written a row."""
    return {row["learner"] for row in rows_of(folder, "learner")} >= set(learners)


def events_of(folder: Path) -> list[tuple[object, object]]:
    """All events so far, as (event, learner)."""
    return [(row["event"], row["learner"]) for row in rows_of(folder, "event")]


def logs_of(folder: Path) -> str:
    """The logs of all learners."""
    return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted((folder / "logs").glob("*.log")))
