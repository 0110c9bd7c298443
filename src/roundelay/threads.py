"""The one place that starts threads: named, so that they can be told apart, and daemons, so that none keeps a process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable


def start(name: str, target: Callable[[], None]) -> threading.Thread:
    """Run `target` in a new thread called `roundelay-<name>`. ARCHITECTURE.md lists all of them."""
    thread = threading.Thread(target=target, name=f"roundelay-{name}", daemon=True)
    thread.start()
    return thread
