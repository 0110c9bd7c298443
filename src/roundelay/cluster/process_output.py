"""Shows what learner processes write, line by line, with the learner in front of each line."""

from __future__ import annotations

import os
import selectors
import time
from typing import IO

from roundelay.cluster.learner_process import LearnerProcess


class ProcessOutput:
    """The lines of several processes. A process that writes to a log shows none."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def follow(self, process: LearnerProcess) -> None:
        """Show the lines of a process that was just started."""
        for pipe, ours in process.streams:
            self._selector.register(pipe, selectors.EVENT_READ, (f"[{process.label}] ", ours, bytearray()))

    def show(self, timeout_s: float) -> None:
        """Show new lines. Waits for some, or, if all processes write to logs, the whole time."""
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
            _write(ours, label, lines)
            rest[:] = last

    def close(self) -> None:
        """Show what is there already, and end."""
        self.show(0.0)
        self._selector.close()


def _write(stream: IO[str], label: str, lines: list[bytes]) -> None:
    for line in lines:
        stream.write(label + line.decode(errors="replace") + "\n")
    stream.flush()
