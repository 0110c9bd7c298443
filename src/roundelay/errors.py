"""Everything Roundelay raises on purpose.

RoundelayError
├── TopologyError       a graph, a mixing matrix or a number of learners that cannot work
├── StrategyError       a model, an optimizer or a setting that a strategy cannot work with
├── PeerLostError       a peer that was needed died, froze or left; names it
├── RefusedError        a message that one end did not accept; nothing of it was applied
├── DroppedError        the others go on without this learner, which was silent for too long
├── RendezvousLostError the rendezvous could not be reached for too long
├── MembershipChangedError   the membership has changed, so synchronous learners must meet
├── MissingLearnersError     learners that were waited for have not come; names them
├── LaunchError         an environment that does not say which learner this is
├── ConfigError         a key, a value or a combination of settings that a run cannot have
│   └── DataError       data that are not there, or not what they should be
├── SpeechError         a lexicon, an alignment, a language model or a score that cannot work
├── CheckpointError     a checkpoint that is incomplete, altered or not there
├── DivergedError       training whose loss or gradients stay non-finite
├── HandshakeError      a connection whose other end is not a learner of this run
├── DeadlockError       on the virtual clock, learners wait and nothing can happen any more
├── UsageError          a command line that cannot be understood
└── MissingExtraError   an optional dependency that this feature needs is not installed
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any


class RoundelayError(Exception):
    """A user's mistake, or a failure of a peer, a machine or a file. The message says what came, what is allowed, what to do."""


class TopologyError(RoundelayError, ValueError):
    """A graph, a mixing matrix or a number of learners that cannot work."""


class StrategyError(RoundelayError, ValueError):
    """A model, an optimizer or a setting that a strategy cannot work with."""


class PeerLostError(RoundelayError, ConnectionError):
    """A peer that was needed died, froze or left."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(f"lost learner {peer}: {reason}")
        self.peer, self.reason = peer, reason

    def __reduce__(self) -> tuple[Any, ...]:  # pickle would call PeerLostError(message)
        return type(self), (self.peer, self.reason), vars(self)


class RefusedError(RoundelayError):
    """A message that was not accepted: nothing of it was applied, and the peer is not given up.

    A handler that raises it refuses a call; the caller's future fails with it.
    """

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(f"an exchange with learner {peer} was refused: {reason}")
        self.peer, self.reason = peer, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.peer, self.reason), vars(self)


class DroppedError(RoundelayError, ConnectionError):
    """The others go on without this learner, which was silent for too long."""


class RendezvousLostError(RoundelayError, ConnectionError):
    """The rendezvous could not be reached for too long."""


class MembershipChangedError(RoundelayError):
    """The membership has changed, so synchronous learners must meet."""


class MissingLearnersError(RoundelayError, TimeoutError):
    """A learner has waited long enough for others: `learners` have not come."""

    def __init__(self, waited_s: float, learners: Sequence[int]) -> None:
        self.waited_s, self.learners = waited_s, list(learners)
        missing = ", ".join(map(str, learners))
        super().__init__(
            f"waited {waited_s:g} s for all learners; missing: {missing}. Give a longer timeout_s, or go on without them"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.waited_s, self.learners), vars(self)


class LaunchError(RoundelayError, RuntimeError):
    """An environment that does not say which learner this is."""


class ConfigError(RoundelayError, ValueError):
    """A key, a value or a combination of settings that a run cannot have."""


class DataError(ConfigError):
    """Data that are not there, or not what they should be."""


class SpeechError(RoundelayError, ValueError):
    """A lexicon, an alignment, a language model or a score that cannot work."""


class CheckpointError(RoundelayError, OSError):
    """A checkpoint that is incomplete, altered or not there."""


class DivergedError(RoundelayError, ArithmeticError):
    """Training whose loss or gradients stay non-finite."""


class HandshakeError(RoundelayError, ConnectionError):
    """A connection whose other end is not a learner of this run."""


class DeadlockError(RoundelayError, RuntimeError):
    """On the virtual clock, learners wait and nothing can happen any more."""


class UsageError(RoundelayError):
    """A command line that cannot be understood."""


class MissingExtraError(RoundelayError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs the '{extra}' extra; install it with: pip install 'roundelay[{extra}]'")
        self._feature, self._extra = feature, extra

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._feature, self._extra), vars(self)


def check_installed(package: str, feature: str, extra: str) -> None:
    """Raise MissingExtraError if an optional package is not installed. The package is not imported.

    A command that needs it at its end asks at its beginning, so that no result of a long computation is lost.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(feature, extra)


def unknown(kind: str, name: str, allowed: Iterable[str]) -> str:
    """Say that `name` is no `kind`, and which one was probably meant.

    >>> unknown("topology", "rnig", ["ring", "star"])
    "unknown topology 'rnig'; did you mean 'ring'? Known: ring, star"
    """
    known = list(allowed)
    return f"unknown {kind} '{name}'{closest(name, known) or '.'} Known: {', '.join(known)}"


def closest(name: str, allowed: Iterable[str]) -> str:
    """Say which of `allowed` was probably meant by `name`; empty if none is similar.

    >>> closest("--learner", ["--learners", "--seed"])
    "; did you mean '--learners'?"
    """
    close = difflib.get_close_matches(name, list(allowed), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def described(error: BaseException) -> str:
    """The kind and the message of an error, on one line.

    >>> described(KeyError("x"))
    "KeyError: 'x'"
    """
    return f"{type(error).__name__}: {error}"
