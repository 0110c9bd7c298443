"""What faults have cost a run that has written an audit: stalls, pace, use of chunks, conservation of weights."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roundelay.training import run_directory
from roundelay.training.metrics import Row, read_rows

PACE_S = 5.0  # the pace is measured over this many seconds
RECOVERY_S = 5.0  # this long after a loss is noticed the pace is measured again
NEAR_BEFORE_S, NEAR_AFTER_S = 6.0, 10.0  # a pause this close to a loss counts as a stall
CLOCKS_S = 0.5  # the time of a fault is known to within this many seconds


def outcome(folder: Path, faults: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """The results, events, use of samples and conservation of weights of a run that has written an audit.

    Args:
        folder: of the run.
        faults: seconds of the run at which learners were killed or frozen, each with the learner.
    """
    rows = list(read_rows(folder / run_directory.METRICS))
    results = folder / run_directory.RESULTS
    figures = json.loads(results.read_text()) if results.exists() else {}
    return {
        "finished": bool(figures),
        "elapsed_s": figures.get("elapsed_s"),
        "valid": figures.get("valid"),
        "test": figures.get("test"),
        "events": [_event(event, rows, faults) for event in rows if event["kind"] == "event"],
        "chunks": chunks_used(folder),
        "conservation": conservation(rows),
    }


def _event(event: Row, rows: Sequence[Row], faults: Sequence[tuple[float, int]]) -> dict[str, Any]:
    kept: dict[str, Any] = {
        key: event[key] for key in ("event", "learner", "reason", "elapsed_s", "seconds") if key in event
    }
    if event["event"] in ("died", "dropped"):
        kept["stalled_s"] = round(stalled_s(rows, event["elapsed_s"], event["learner"]), 2)
        began_s = _began_s(event, faults)
        kept["pace_after"] = pace_after(rows, began_s, event["elapsed_s"], event["learner"])
    return kept


def _began_s(event: Row, faults: Sequence[tuple[float, int]]) -> float:
    """When the fault happened that led to the loss of a learner. The loss of a frozen learner is noticed 5 s later."""
    noticed_s = float(event["elapsed_s"])
    earlier = [at_s for at_s, _ in faults if at_s <= noticed_s + CLOCKS_S]
    own = [at_s for at_s, learner in faults if learner == event["learner"] and at_s in earlier]
    return min(noticed_s, max(own or earlier, default=noticed_s))


def pace_after(rows: Sequence[Row], began_s: float, noticed_s: float, lost: int) -> float | None:
    """Steps per second of the other learners after a loss, divided by their steps per second before the fault.

    "Before" is `PACE_S` until the fault began, and "after" is `PACE_S` from `RECOVERY_S` after the loss was noticed. None if
    there are too few rows.
    """
    before = after = 0.0
    for learner in {row["learner"] for row in rows if row["kind"] == "learner"} - {lost}:
        points = [
            (row["elapsed_s"], row["steps"]) for row in rows if row["kind"] == "learner" and row["learner"] == learner
        ]
        earlier = _pace(points, began_s - CLOCKS_S - PACE_S, began_s - CLOCKS_S)
        later = _pace(points, noticed_s + RECOVERY_S, noticed_s + RECOVERY_S + PACE_S)
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
        times = step_times(rows, learner)
        gaps = [(after - before, before, after) for before, after in itertools.pairwise(times)]
        usual = sorted(gap for gap, *_ in gaps)[len(gaps) // 2] if gaps else 0.0
        near = [gap for gap, before, after in gaps if after > at_s - NEAR_BEFORE_S and before < at_s + NEAR_AFTER_S]
        longest = max(longest, max(near, default=0.0) - usual)
    return longest


def step_times(rows: Sequence[Row], learner: int) -> list[float]:
    """The times of the rows in which a learner had taken more steps than before."""
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
