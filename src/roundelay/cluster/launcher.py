"""The launcher starts one process per learner on this machine. Every process is its own failure domain.

torchrun ends all processes when one of them fails. Here the others go on, and a process that failed may be started again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from roundelay.cluster.elastic_world import JOINS, LEARNER, PROCESS
from roundelay.cluster.ticket import TICKET

LOOK_EVERY_S = 0.2
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0  # before a process is started again; doubled every time
_OTHER_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # they would describe another run
_PR_SET_PDEATHSIG = 1


class LearnerProcess:
    """One process of a run.

    Args:
        command: what to run.
        environment: variables that the process gets in addition to those of the launcher.
        output: a file for all that the process writes; None gives lines to `read`.

    Attributes:
        name: name of the process, unique among all machines of the run.
        starts: how often it was started.
    """

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], output: Path | None) -> None:
        self.name, self._command, self._output = name, list(command), output
        inherited = {key: value for key, value in os.environ.items() if key not in _OTHER_LAUNCHERS}
        self._environment = {"PYTHONUNBUFFERED": "1"} | inherited | environment | {PROCESS: name}
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, joins: bool) -> None:
        """Start the process. It may have run before. With `joins`, it must join a run that is under way."""
        self.starts += 1
        with contextlib.ExitStack() as stack:
            file: IO[bytes] | int = subprocess.PIPE
            if self._output is not None:
                file = stack.enter_context(self._output.open("ab"))
            self._process = subprocess.Popen(
                self._command,
                env=self._environment | {JOINS: str(int(joins))},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT if self._output else subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches the launcher only, which passes it on once
                preexec_fn=_end_with_the_launcher,  # noqa: PLW1509 - the function only makes a system call
            )

    @property
    def streams(self) -> list[tuple[IO[bytes], IO[str]]]:
        """The pipes of the process, each with the launcher's stream that its lines go to."""
        if self._process is None or self._process.stdout is None or self._process.stderr is None:
            return []
        return [(self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)]

    @property
    def exit_code(self) -> int | None:
        """None while the process runs; negative if a signal ended it."""
        return None if self._process is None else self._process.poll()

    def send(self, number: int) -> None:
        """Send a signal to the process and all that it has started."""
        if self._process is not None and self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def how_it_ended(self) -> str:
        """The exit code or the signal, in words."""
        code = self.exit_code or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Launcher:
    """Starts the learners of this machine, shows what they write, and starts those again that fail.

    Args:
        command: what every learner runs.
        ticket: the file with the ticket of the run.
        learners: ids of the learners to start here; None lets the rendezvous choose.
        restarts: how often one learner may be started again; -1 for no limit.
        logs: a folder for one file per learner; by default lines are shown after the learner's id or process name.
        died: called with the name of a process that failed and how it ended; tells the rendezvous.
        waiting: returns a sentence that says which learners are missing; empty if none is.
    """

    def __init__(
        self,
        command: Sequence[str],
        ticket: Path,
        learners: Sequence[int | None],
        *,
        restarts: int = 0,
        logs: Path | None = None,
        died: Callable[[str, str], None],
        waiting: Callable[[], str] = lambda: "",
    ) -> None:
        self._restarts, self._died, self._waiting = restarts, died, waiting
        threads = str(max(1, len(os.sched_getaffinity(0)) // len(learners)))
        node = f"{platform.node()}-{os.getpid()}"
        self._processes: list[LearnerProcess] = []
        for index, learner in enumerate(learners):
            environment = {TICKET: str(ticket), "LOCAL_RANK": str(index), "LOCAL_WORLD_SIZE": str(len(learners))}
            environment |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
            if learner is not None:
                environment[LEARNER] = str(learner)
            log = None if logs is None else logs / f"learner-{index if learner is None else learner}.log"
            self._processes.append(LearnerProcess(f"{node}-{index}", command, environment, log))
        self._labels = {
            id(each): str(each.name if learners[i] is None else learners[i]) for i, each in enumerate(self._processes)
        }
        self._running: set[int] = set()  # indices of processes
        self._again_at: dict[int, float] = {}  # by index of a process that waits to be started again
        self._signals: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._said = 0.0
        self._was_waiting = False

    def run(self) -> int:
        """Run until every process has ended for good.

        Returns 0 if a learner has finished, 128 + the number of the signal if a signal ended the run, else 1.
        """
        before = {number: signal.signal(number, self._signalled) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for index in range(len(self._processes)):
                self._start(index)
            while self._running or self._again_at:
                self._show_output(LOOK_EVERY_S)
                self._look()
                self._say_who_is_missing()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for process in self._processes:
                process.send(signal.SIGKILL)
            self._show_output(0.0)
            self._selector.close()
        return self._verdict()

    def _start(self, index: int) -> None:
        process = self._processes[index]
        process.start(joins=process.starts > 0 and bool(self._running))
        self._running.add(index)
        for pipe, ours in process.streams:
            self._selector.register(pipe, selectors.EVENT_READ, (f"[{self._labels[id(process)]}] ", ours, bytearray()))

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        self._again_at.clear()
        for process in self._processes:
            process.send(number if len(self._signals) == 1 else signal.SIGKILL)

    def _look(self) -> None:
        """Notice processes that have ended, and start failed ones again when their waiting time is over."""
        for index in [index for index in self._running if self._processes[index].exit_code is not None]:
            self._running.discard(index)
            if self._processes[index].exit_code:
                self._failed(index)
        for index, due in list(self._again_at.items()):
            if time.monotonic() >= due:
                del self._again_at[index]
                self._start(index)

    def _failed(self, index: int) -> None:
        process, label = self._processes[index], self._labels[id(self._processes[index])]
        self._died(process.name, process.how_it_ended())
        finished = any(each.exit_code == 0 for each in self._processes)
        limited = self._restarts >= 0 and process.starts > self._restarts
        if self._signals:
            return
        if limited or (finished and not self._running):
            self._say(f"learner {label} is lost ({process.how_it_ended()}); the others go on")
            return
        wait_s = min(FIRST_WAIT_S * 2 ** (process.starts - 1), LONGEST_WAIT_S)
        self._again_at[index] = time.monotonic() + wait_s
        self._say(f"learner {label} has failed ({process.how_it_ended()}); it is started again in {wait_s:g} s")

    def _show_output(self, timeout_s: float) -> None:
        if not self._selector.get_map():
            time.sleep(timeout_s)
            return
        for key, _ in self._selector.select(timeout_s):
            label, ours, rest = key.data
            read = os.read(key.fd, 65536)
            rest += read
            *lines, last = rest.split(b"\n")
            if not read:
                self._selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                lines, last = [line for line in (*lines, last) if line], bytearray()
            for line in lines:
                ours.write(label + line.decode(errors="replace") + "\n")
            ours.flush()
            rest[:] = last

    def _say_who_is_missing(self) -> None:
        """Say which learners are missing, at once and then every few seconds."""
        if time.monotonic() - self._said < 5.0:
            return
        if waiting := self._waiting():
            self._said, self._was_waiting = time.monotonic(), True
            self._say(waiting)
        elif self._was_waiting:
            self._was_waiting = False
            self._say("all learners are here")

    def _say(self, sentence: str) -> None:
        sys.stderr.write(f"roundelay: {sentence}\n")
        sys.stderr.flush()

    def _verdict(self) -> int:
        codes = [process.exit_code for process in self._processes]
        if self._signals:
            return 128 + self._signals[0]
        if 0 in codes:
            return 0
        self._say("no learner has finished; the first one ended with " + self._processes[0].how_it_ended())
        return 1


def _end_with_the_launcher() -> None:
    """Runs in the new process: the kernel will kill it when the launcher ends for any reason. On Linux only."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
