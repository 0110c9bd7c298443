"""Chaos: a real run whose learners are killed, frozen, slowed and joined by others, beside the same run undisturbed."""

from __future__ import annotations

import itertools
import json
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roundelay.errors import ConfigError
from roundelay.training import run_directory
from roundelay.training.config import Config
from roundelay.training.metrics import Row, read_rows
from roundelay.training.supervisor import Supervisor

EVERY_S = 0.2  # rows of every learner, so that a stall can be seen
RECOVERED_S = 5.0  # after a loss
_GRAMMAR = re.compile(r"(\d+)@(\d+(?:\.\d+)?)s?(?::(\d+(?:\.\d+)?)s?)?")


@dataclass(frozen=True, order=True)
class Fault:
    """What happens to a learner, so many seconds after the first step of the run."""

    at_s: float
    learner: int
    kind: str
    duration_s: float | None = None

    @classmethod
    def parsed(cls, kind: str, text: str) -> Fault:
        """From LEARNER@TIME, or LEARNER@TIME:DURATION for a freeze. Raises ConfigError for anything else.

        >>> Fault.parsed("freeze", "1@30s:20s")
        Fault(at_s=30.0, learner=1, kind='freeze', duration_s=20.0)
        """
        match = _GRAMMAR.fullmatch(text)
        lasting = kind == "freeze"
        if match is None or (match[3] is None) == lasting:
            form = "LEARNER@TIME:DURATION, such as 1@30s:20s" if lasting else "LEARNER@TIME, such as 2@20s"
            raise ConfigError(f"--{kind} needs {form}, got '{text}'")
        return cls(float(match[2]), int(match[1]), kind, float(match[3]) if lasting else None)


class Disturber:
    """Carries faults out when they are due; to be called a few times a second by the supervisor."""

    def __init__(self, faults: Iterable[Fault], metrics: Path) -> None:
        self._left, self._metrics = sorted(faults), metrics
        self._thaws: list[tuple[float, int]] = []
        self._began: float | None = None

    def __call__(self, supervisor: Supervisor) -> None:
        """What is due now."""
        if self._began is None:
            if not self._metrics.exists() or b'"kind": "learner"' not in self._metrics.read_bytes():
                return
            self._began = time.monotonic()
        elapsed = time.monotonic() - self._began
        while self._left and self._left[0].at_s <= elapsed:
            self._carry_out(self._left.pop(0), supervisor)
        for thaw in [thaw for thaw in self._thaws if thaw[0] <= elapsed]:
            self._thaws.remove(thaw)
            supervisor.send(thaw[1], signal.SIGCONT)

    def _carry_out(self, fault: Fault, supervisor: Supervisor) -> None:
        if fault.kind == "join":
            supervisor.start(fault.learner)
        elif fault.kind == "kill":
            supervisor.send(fault.learner, signal.SIGKILL)
        else:
            assert fault.duration_s is not None
            supervisor.send(fault.learner, signal.SIGSTOP)
            self._thaws.append((fault.at_s + fault.duration_s, fault.learner))


def check(config: Config, faults: Sequence[Fault]) -> None:
    """Raise ConfigError for faults that cannot happen."""
    joining = {fault.learner for fault in faults if fault.kind == "join"}
    for fault in faults:
        if fault.kind != "join" and fault.learner >= config.learners and fault.learner not in joining:
            raise ConfigError(
                f"--{fault.kind} {fault.learner}@...: the learners are 0 to {config.learners - 1} and those that join"
            )
        if fault.kind == "join" and config.group_size != 1:
            raise ConfigError("--join: a learner cannot join a super-learner; use group_size=1")


def run(config: Config, faults: Sequence[Fault], folder: Path) -> dict[str, Any]:
    """Train undisturbed, then with faults; what they have cost."""
    check(config, faults)
    undisturbed = once(config, (), folder / "undisturbed")
    disturbed = once(config, faults, folder / "disturbed")
    return {"faults": [str(fault) for fault in faults], "undisturbed": undisturbed, "disturbed": disturbed}


def once(config: Config, faults: Sequence[Fault], folder: Path) -> dict[str, Any]:
    """Train with these faults; data are drawn from the shared cursor, so that what a lost learner leaves is not lost."""
    audited = replace(config.metrics, every_s=EVERY_S, audit=True)
    config = replace(config, metrics=audited, data=replace(config.data, sharding="dynamic"))
    run_directory.begin(folder, config, "roundelay chaos")
    metrics = folder / run_directory.METRICS
    code = Supervisor(config, folder, meanwhile=Disturber(faults, metrics)).run()
    return {"exit_code": code} | account(folder)


def account(folder: Path) -> dict[str, Any]:
    """What a run with an audit says about itself."""
    rows = list(read_rows(folder / run_directory.METRICS))
    events = [row for row in rows if row["kind"] == "event"]
    results = folder / run_directory.RESULTS
    told = json.loads(results.read_text()) if results.exists() else {}
    return {
        "finished": bool(told),
        "elapsed_s": told.get("elapsed_s"),
        "valid": told.get("valid"),
        "test": told.get("test"),
        "events": [_event(event, rows) for event in events],
        "samples": samples_used(folder, rows),
        "balance": balance(rows),
    }


def _event(event: Row, rows: Sequence[Row]) -> dict[str, Any]:
    kept: dict[str, Any] = {
        key: event[key] for key in ("event", "learner", "reason", "elapsed_s", "seconds") if key in event
    }
    if event["event"] in ("died", "dropped"):
        kept["stalled_s"] = round(stalled_s(rows, event["elapsed_s"], event["learner"]), 2)
        kept["recovered"] = recovered(rows, event["elapsed_s"], event["learner"])
    return kept


def recovered(rows: Sequence[Row], at_s: float, lost: int) -> float | None:
    """Steps a second of those who stay, from five seconds after a loss on, over theirs before it; None: not known."""
    before = after = 0.0
    for learner in {row["learner"] for row in rows if row["kind"] == "learner"} - {lost}:
        points = [
            (row["elapsed_s"], row["steps"]) for row in rows if row["kind"] == "learner" and row["learner"] == learner
        ]
        earlier, later = _pace(points, 0.5, at_s), _pace(points, at_s + RECOVERED_S, at_s + 2 * RECOVERED_S)
        if earlier is not None and later is not None:  # who has joined or left meanwhile says nothing
            before, after = before + earlier, after + later
    return round(after / before, 3) if before else None


def _pace(points: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> float | None:
    within = [point for point in points if begin_s <= point[0] <= end_s]
    if len(within) < 2 or within[-1][0] == within[0][0]:
        return None
    return (within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0])


def stalled_s(rows: Sequence[Row], at_s: float, lost: int, horizon_s: float = 10.0) -> float:
    """The longest time around a loss in which one of the others wrote no new step, beyond what it usually takes."""
    longest = 0.0
    for learner in {row["learner"] for row in rows if row["kind"] == "learner"} - {lost}:
        times = _times_of_steps(rows, learner)
        gaps = [(after - before, before, after) for before, after in itertools.pairwise(times)]
        usual = sorted(gap for gap, *_ in gaps)[len(gaps) // 2] if gaps else 0.0
        near = [gap for gap, before, after in gaps if after > at_s - 6.0 and before < at_s + horizon_s]
        longest = max(longest, max(near, default=0.0) - usual)
    return longest


def _times_of_steps(rows: Sequence[Row], learner: int) -> list[float]:
    times, steps = [], -1
    for row in rows:
        if row["kind"] == "learner" and row["learner"] == learner and row["steps"] != steps:
            steps = row["steps"]
            times.append(float(row["elapsed_s"]))
    return times


def samples_used(folder: Path, rows: Sequence[Row]) -> dict[str, int]:
    """Chunks of the run by how often they were used."""
    used: Counter[int] = Counter()
    for path in folder.glob("chunks-*.txt"):
        used.update(int(line) for line in path.read_text().split())
    often = Counter(used.values())
    total = max(used, default=-1) + 1
    return {"chunks": total, "once": often[1], "more_than_once": len(used) - often[1], "never": total - len(used)}


def balance(rows: Sequence[Row]) -> dict[str, float]:
    """Sum of weights - sum of beginnings - sum of updates, over all learners: zero but for rounding if nothing was lost.

    Of a learner that died the last row is what is known, some steps before its end; that bounds nothing exactly.
    """
    last: dict[tuple[int, float], Row] = {}
    for row in rows:
        if row["kind"] == "learner" and "sum_weights" in row:
            last[row["learner"], row["sum_initial"]] = row  # who comes back begins anew
    imbalance = sum(row["sum_weights"] - row["sum_initial"] - row["sum_updates"] for row in last.values())
    moved = sum(abs(row["sum_updates"]) for row in last.values())
    return {"imbalance": imbalance, "moved": moved, "relative": imbalance / moved if moved else 0.0}
