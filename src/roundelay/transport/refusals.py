"""What a learner did not accept from its peers: counted, and logged at a limited rate so that a flood cannot fill a disk."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

log = logging.getLogger("roundelay")

LINE_EVERY_S = 5.0  # per reason, at most


class Refusals:
    """Counts by reason: `handshake`, `header`, `checksum`, or what a handler gave as its reason.

    >>> refused = Refusals("learner 0")
    >>> refused.count("checksum", "a call of learner 1")
    >>> refused.counts
    Counter({'checksum': 1})
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._said: dict[str, tuple[float, int]] = {}  # time of the last log line, and the count then

    def count(self, reason: str, what: str) -> None:
        """Count something that was refused, and log it unless the last line is too recent."""
        with self._lock:
            self.counts[reason] += 1
            last, before = self._said.get(reason, (-LINE_EVERY_S, 0))
            now, count = time.monotonic(), self.counts[reason]
            if now - last < LINE_EVERY_S:
                return
            self._said[reason] = now, count
        more = f" ({count - before} times since the last such line)" if count > before + 1 else ""
        log.warning("%s refused %s: %s%s", self._owner, what, reason, more)
