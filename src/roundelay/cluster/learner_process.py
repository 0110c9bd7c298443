"""One learner process on this machine, as the launcher sees it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from roundelay.cluster.elastic_world import JOINS, LEARNER, PROCESS
from roundelay.transport.security import KEYS

# Not passed on: variables that describe another run, and the secret, which is in the ticket.
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *KEYS)
_PR_SET_PDEATHSIG = 1
KILLED = "killed by"  # begins what is said of a process that a signal has ended


@dataclass(frozen=True)
class Program:
    """What every learner of a run executes.

    Attributes:
        command: the words of the command.
        environment: variables that its processes get in addition to those of the launcher.
        logs: a folder for one file per learner; None shows the lines instead.
        keep_open: file descriptors that a process holds open as long as it runs, such as a lock.
        when_orphaned: the signal that the kernel sends to a process when the launcher ends for any reason. On Linux only.
    """

    command: Sequence[str]
    environment: dict[str, str]
    logs: Path | None = None
    keep_open: Sequence[int] = ()
    when_orphaned: int = signal.SIGKILL


class LearnerProcess:
    """One process of a run. It may be started again after it has ended.

    Args:
        program: what it executes.
        name: the name under which the rendezvous knows the process, unique among all machines of the run.
        learner: the id of its learner; None if the rendezvous chooses it.
        environment: variables of this process.

    Attributes:
        label: the learner's id if it is known, else the name: what the user reads.
        starts: how often it was started.
    """

    def __init__(self, program: Program, name: str, learner: int | None, environment: dict[str, str]) -> None:
        self._program, self.name, self.learner = program, name, learner
        self.label = name if learner is None else str(learner)
        self.log = None if program.logs is None else program.logs / f"learner-{self.label}.log"
        inherited = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
        self._environment = {"PYTHONUNBUFFERED": "1"} | inherited | program.environment | environment | {PROCESS: name}
        if learner is not None:
            self._environment[LEARNER] = str(learner)
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, joins: bool) -> None:
        """Start the process. With `joins`, it must join a run that is under way."""
        self.starts += 1
        launcher, number = os.getpid(), self._program.when_orphaned
        with contextlib.ExitStack() as stack:
            file: IO[bytes] | int = subprocess.PIPE
            if self.log is not None:
                file = stack.enter_context(self.log.open("ab"))
            self._process = subprocess.Popen(
                list(self._program.command),
                env=self._environment | {JOINS: str(int(joins))},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT if self.log else subprocess.PIPE,
                pass_fds=self._program.keep_open,
                start_new_session=True,  # Ctrl-C reaches the launcher only, which passes it on once
                preexec_fn=lambda: _end_with(launcher, number),  # noqa: PLW1509 - it only makes system calls
            )

    @property
    def streams(self) -> list[tuple[IO[bytes], IO[str]]]:
        """The pipes of the process, each with the launcher's stream that its lines go to; none if there is a log."""
        if self._process is None or self._process.stdout is None or self._process.stderr is None:
            return []
        return [(self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)]

    @property
    def exit_code(self) -> int | None:
        """None while the process runs; negative if a signal ended it."""
        return None if self._process is None else self._process.poll()

    def send(self, number: int) -> None:
        """Send a signal to the process, unless it has ended. SIGKILL also goes to all that it has started."""
        if self._process is not None and self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                send = os.killpg if number == signal.SIGKILL else os.kill
                send(self._process.pid, number)

    def end(self) -> None:
        """Kill the process if it still runs."""
        self.send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def how_it_ended(self) -> str:
        """The signal, or the exit code with the last line of the log, in words."""
        code = self.exit_code or 0
        if code < 0:
            return f"{KILLED} {signal.Signals(-code).name}"
        return f"exit code {code}" + (f": {self._last_line()}" if code and self.log else "")

    def _last_line(self) -> str:
        assert self.log is not None
        lines = self.log.read_text(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")
        return last.removeprefix("roundelay: error: ")


def _end_with(launcher: int, number: int) -> None:
    """Runs in the new process: have the kernel send it the signal when the launcher ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != launcher:  # it has ended already
            os._exit(1)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
