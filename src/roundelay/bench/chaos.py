"""Chaos: a real run with faults, beside the same run without. A fault kills or freezes a learner, or lets one join."""

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

ROW_EVERY_S = 0.2  # how often a learner writes a row of metrics: often enough to see a stall
RECOVERY_S = 5.0  # this long after a loss the pace is measured again
NEAR_BEFORE_S, NEAR_AFTER_S = 6.0, 10.0  # a pause this close to a loss counts as a stall
_LEAST_ELAPSED_S = 0.5  # the pace before that is not steady
_GRAMMAR = re.compile(r"(\d+)@(\d+(?:\.\d+)?)s?(?::(\d+(?:\.\d+)?)s?)?")


@dataclass(frozen=True, order=True)
class Fault:
    """What happens to a learner.

    Attributes:
        at_s: seconds after the first row of metrics of the run.
        learner: its id.
        kind: kill, freeze or join.
        duration_s: how long a freeze lasts.
    """

    at_s: float
    learner: int
    kind: str
    duration_s: float | None = None

    @classmethod
    def parsed(cls, kind: str, text: str) -> Fault:
        """Parse LEARNER@TIME, or LEARNER@TIME:DURATION for a freeze. Raises ConfigError for anything else.

        >>> Fault.parsed("freeze", "1@30s:20s")
        Fault(at_s=30.0, learner=1, kind='freeze', duration_s=20.0)
        """
        match = _GRAMMAR.fullmatch(text)
        lasts = kind == "freeze"
        if match is None or (match[3] is None) == lasts:
            form = "LEARNER@TIME:DURATION, such as 1@30s:20s" if lasts else "LEARNER@TIME, such as 2@20s"
            raise ConfigError(f"--{kind} needs {form}, got '{text}'")
        return cls(float(match[2]), int(match[1]), kind, float(match[3]) if lasts else None)


class FaultInjector:
    """Carries out faults when they are due. The supervisor calls it a few times a second.

    Args:
        faults: in any order.
        metrics: the metrics file of the run; its first row of a learner starts the clock.
    """

    def __init__(self, faults: Iterable[Fault], metrics: Path) -> None:
        self._left, self._metrics = sorted(faults), metrics
        self._frozen: list[tuple[float, int]] = []  # when to wake which learner
        self._began: float | None = None

    def __call__(self, supervisor: Supervisor) -> None:
        """Carry out what is due now."""
        if self._began is None:
            if not self._metrics.exists() or b'"kind": "learner"' not in self._metrics.read_bytes():
                return
            self._began = time.monotonic()
        elapsed = time.monotonic() - self._began
        while self._left and self._left[0].at_s <= elapsed:
            self._carry_out(self._left.pop(0), supervisor)
        for frozen in [frozen for frozen in self._frozen if frozen[0] <= elapsed]:
            self._frozen.remove(frozen)
            supervisor.send(frozen[1], signal.SIGCONT)

    def _carry_out(self, fault: Fault, supervisor: Supervisor) -> None:
        if fault.kind == "join":
            supervisor.start(fault.learner)
        elif fault.kind == "kill":
            supervisor.send(fault.learner, signal.SIGKILL)
        else:
            assert fault.duration_s is not None
            supervisor.send(fault.learner, signal.SIGSTOP)
            self._frozen.append((fault.at_s + fault.duration_s, fault.learner))


def check(config: Config, faults: Sequence[Fault]) -> None:
    """Raise ConfigError for a fault of a learner that does not exist, or a join to a super-learner."""
    joining = {fault.learner for fault in faults if fault.kind == "join"}
    for fault in faults:
        if fault.kind != "join" and fault.learner >= config.learners and fault.learner not in joining:
            raise ConfigError(
                f"--{fault.kind} {fault.learner}@...: the learners are 0 to {config.learners - 1} and those of --join"
            )
        if fault.kind == "join" and config.group_size != 1:
            raise ConfigError("--join: a learner cannot join a super-learner; use group_size=1")


def run(config: Config, faults: Sequence[Fault], folder: Path) -> dict[str, Any]:
    """Train without faults, then with faults; returns the outcome of both."""
    check(config, faults)
    undisturbed = run_once(config, (), folder / "undisturbed")
    disturbed = run_once(config, faults, folder / "disturbed")
    return {"faults": [str(fault) for fault in faults], "undisturbed": undisturbed, "disturbed": disturbed}


def run_once(config: Config, faults: Sequence[Fault], folder: Path) -> dict[str, Any]:
    """Train with these faults, and return the outcome.

    Sharding is dynamic, so that other learners take over the samples of a lost one. The run writes an audit.
    """
    audited = replace(config.metrics, every_s=ROW_EVERY_S, audit=True)
    config = replace(config, metrics=audited, data=replace(config.data, sharding="dynamic"))
    run_directory.begin(folder, config, "roundelay chaos")
    metrics = folder / run_directory.METRICS
    code = Supervisor(config, folder, meanwhile=FaultInjector(faults, metrics)).run()
    return {"exit_code": code} | outcome(folder)


def outcome(folder: Path) -> dict[str, Any]:
    """The results, events, use of samples and conservation of weights of a run that has written an audit."""
    rows = list(read_rows(folder / run_directory.METRICS))
    events = [row for row in rows if row["kind"] == "event"]
    results = folder / run_directory.RESULTS
    figures = json.loads(results.read_text()) if results.exists() else {}
    return {
        "finished": bool(figures),
        "elapsed_s": figures.get("elapsed_s"),
        "valid": figures.get("valid"),
        "test": figures.get("test"),
        "events": [_event(event, rows) for event in events],
        "chunks": chunks_used(folder),
        "conservation": conservation(rows),
    }


def _event(event: Row, rows: Sequence[Row]) -> dict[str, Any]:
    kept: dict[str, Any] = {
        key: event[key] for key in ("event", "learner", "reason", "elapsed_s", "seconds") if key in event
    }
    if event["event"] in ("died", "dropped"):
        kept["stalled_s"] = round(stalled_s(rows, event["elapsed_s"], event["learner"]), 2)
        kept["pace_after"] = pace_after(rows, event["elapsed_s"], event["learner"])
    return kept


def pace_after(rows: Sequence[Row], at_s: float, lost: int) -> float | None:
    """Steps per second of the other learners after a loss at `at_s`, divided by their steps per second before the loss.

    "After" is the time from `RECOVERY_S` to 2 * `RECOVERY_S` after the loss. None if there are too few rows.
    """
    before = after = 0.0
    for learner in {row["learner"] for row in rows if row["kind"] == "learner"} - {lost}:
        points = [
            (row["elapsed_s"], row["steps"]) for row in rows if row["kind"] == "learner" and row["learner"] == learner
        ]
        earlier, later = _pace(points, _LEAST_ELAPSED_S, at_s), _pace(points, at_s + RECOVERY_S, at_s + 2 * RECOVERY_S)
        if earlier is not None and later is not None:  # a learner that joined or left meanwhile has no ratio
            before, after = before + earlier, after + later
    return round(after / before, 3) if before else None


def _pace(points: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> float | None:
    within = [point for point in points if begin_s <= point[0] <= end_s]
    if len(within) < 2 or within[-1][0] == within[0][0]:
        return None
    return (within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0])


def stalled_s(rows: Sequence[Row], at_s: float, lost: int) -> float:
    """The longest pause between steps of one of the other learners near a loss, minus its median pause."""
    longest = 0.0
    for learner in {row["learner"] for row in rows if row["kind"] == "learner"} - {lost}:
        times = _step_times(rows, learner)
        gaps = [(after - before, before, after) for before, after in itertools.pairwise(times)]
        usual = sorted(gap for gap, *_ in gaps)[len(gaps) // 2] if gaps else 0.0
        near = [gap for gap, before, after in gaps if after > at_s - NEAR_BEFORE_S and before < at_s + NEAR_AFTER_S]
        longest = max(longest, max(near, default=0.0) - usual)
    return longest


def _step_times(rows: Sequence[Row], learner: int) -> list[float]:
    times, steps = [], -1
    for row in rows:
        if row["kind"] == "learner" and row["learner"] == learner and row["steps"] != steps:
            steps = row["steps"]
            times.append(float(row["elapsed_s"]))
    return times


def chunks_used(folder: Path) -> dict[str, int]:
    """How many chunks of the run were used once, more than once and never, up to the last chunk that was used."""
    used: Counter[int] = Counter()
    for path in folder.glob("chunks-*.txt"):
        used.update(int(line) for line in path.read_text().split())
    often = Counter(used.values())
    total = max(used, default=-1) + 1
    return {"total": total, "once": often[1], "more_than_once": len(used) - often[1], "never": total - len(used)}


def conservation(rows: Sequence[Row]) -> dict[str, float]:
    """Sum of weights - sum of initial weights - sum of updates, over all learners. Averaging keeps it zero, up to rounding.

    Every learner counts with its last row. The last row of a learner that died is some steps old, so the imbalance is
    then only an estimate.
    """
    last: dict[tuple[int, float], Row] = {}
    for row in rows:
        if row["kind"] == "learner" and "sum_weights" in row:
            last[row["learner"], row["sum_initial"]] = row  # a learner that joins again has new initial weights
    imbalance = sum(row["sum_weights"] - row["sum_initial"] - row["sum_updates"] for row in last.values())
    moved = sum(abs(row["sum_updates"]) for row in last.values())
    return {"imbalance": imbalance, "moved": moved, "relative": imbalance / moved if moved else 0.0}
