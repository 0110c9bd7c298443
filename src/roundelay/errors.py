"""Everything Roundelay raises on purpose.

RoundelayError
├── TopologyError       a graph, a mixing matrix or a number of learners that cannot work
├── UsageError          a command line that cannot be understood
└── MissingExtraError   an optional dependency that this feature needs is not installed
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RoundelayError(Exception):
    """A user's mistake or a broken world; the message says what came, what is allowed and what to do."""


class TopologyError(RoundelayError, ValueError):
    """A graph, a mixing matrix or a number of learners that cannot work."""


class UsageError(RoundelayError):
    """A command line that cannot be understood."""


class MissingExtraError(RoundelayError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs the '{extra}' extra; install it with: pip install 'roundelay[{extra}]'")


def unknown(kind: str, name: str, allowed: Iterable[str]) -> str:
    """Say that `name` is no `kind`, and which one was probably meant.

    >>> unknown("topology", "rnig", ["ring", "star"])
    "unknown topology 'rnig'; did you mean 'ring'? Known: ring, star"
    """
    known = list(allowed)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else "."
    return f"unknown {kind} '{name}'{hint} Known: {', '.join(known)}"
