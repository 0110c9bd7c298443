"""A worker process, as the supervisor of its machine sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from roundelay.training.worker import WorkerSpec


class Worker:
    """A worker process on this machine.

    Args:
        spec: sent to the process.
        log: the file that the process writes its output to.
        threads: how many threads torch may use, unless OMP_NUM_THREADS is set.
        keep_open: file descriptors that the process holds open as long as it runs, such as the lock of the run's directory.

    Threads of torch that wait for each other sleep. If they kept a core busy instead, which is the default, a learner with two
    threads would be up to 100 times slower on a machine whose cores other programs use.
    """

    def __init__(self, spec: WorkerSpec, log: Path, threads: int, keep_open: Sequence[int] = ()) -> None:
        self.log = log
        inherited = {name: value for name, value in os.environ.items() if name not in spec.security}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "roundelay.training.worker"],
                env={"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"} | inherited,
                stdin=subprocess.PIPE,  # stays open: it closes when this process ends, and the worker then stops
                stdout=output,
                stderr=output,
                pass_fds=keep_open,
                start_new_session=True,  # Ctrl-C reaches the supervisor only, which passes it on once
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended already; see `exit_code`
            self._process.stdin.write(spec.to_line())
            self._process.stdin.flush()

    @property
    def exit_code(self) -> int | None:
        """None while the process runs; negative if a signal ended it."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send a signal if the process still runs."""
        if self.exit_code is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kill the process if it still runs, and release its resources."""
        self.send(signal.SIGKILL)
        self._process.wait()
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def last_line(self) -> str:
        """The last line of the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")
