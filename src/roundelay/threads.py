"""The one place that starts threads: named, so that they can be told apart, and daemons, so that none keeps a process alive."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable

NICENESS = 10  # a thread that communicates gets about a tenth of a core that computation wants for itself


def start(name: str, target: Callable[[], None]) -> threading.Thread:
    """Run `target` in a new thread called `roundelay-<name>`. ARCHITECTURE.md lists all of them."""
    thread = threading.Thread(target=target, name=f"roundelay-{name}", daemon=True)
    thread.start()
    return thread


def yield_to_computation() -> None:
    """Give the calling thread a low priority, for good: its work can wait, a step cannot. On Linux only."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        with contextlib.suppress(PermissionError):  # some containers forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
