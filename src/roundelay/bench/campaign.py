"""A campaign: many random faults in one real run, one after the other, and what they have cost."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roundelay.bench.chaos import Fault
from roundelay.bench.fault_outcome import CLOCKS_S, NEAR_AFTER_S, step_times
from roundelay.errors import ConfigError
from roundelay.training import run_directory
from roundelay.training.config import Config
from roundelay.training.metrics import Row, read_rows

SHORT_S, LONG_S = 2.0, 7.0  # a frozen learner is silent for a while, or so long that it is lost
AWAY = 0.4  # a killed learner is started again after this part of the time between two faults
FREEZES = 0.3  # this part of the faults freezes a learner; the others kill one


def drawn(config: Config, count: int, every_s: float, seed: int) -> list[Fault]:
    """`count` random faults, one every `every_s` seconds; a learner that was killed is started again.

    A learner cannot join a super-learner, so there learners only freeze for a while.
    """
    if config.learners < 2:
        raise ConfigError("a campaign needs at least two learners, so that one of them can be lost")
    draw, faults, awake_at = (
        random.Random(f"campaign {seed}"),
        list[Fault](),
        dict.fromkeys(range(config.learners), 0.0),
    )
    for number in range(1, count + 1):
        at_s = number * every_s
        learner = draw.choice([each for each, since_s in awake_at.items() if since_s <= at_s])
        if config.group_size > 1 or draw.random() < FREEZES:
            lasts_s = SHORT_S if config.group_size > 1 else draw.choice((SHORT_S, LONG_S))
            faults.append(Fault(at_s, learner, "freeze", lasts_s))
            awake_at[learner] = at_s + lasts_s + every_s
        else:
            faults.append(Fault(at_s, learner, "kill"))
            faults.append(Fault(at_s + AWAY * every_s, learner, "join"))
            awake_at[learner] = at_s + 2 * every_s  # until it has joined, it cannot be killed again
    return faults


def summary(result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Faults injected and survived, seconds lost per fault, samples lost, and the final loss, of the outcome of `chaos.run`."""
    rows = list(read_rows(folder / "disturbed" / run_directory.METRICS))
    harmful = [fault for fault in result["faults"] if fault["kind"] != "join"]
    injected = [fault for fault in harmful if fault["happened_s"] is not None]
    lost_s = sorted(_lost_s(rows, fault, injected) for fault in injected)
    disturbed, undisturbed = result["disturbed"], result["undisturbed"]
    return {
        "planned": len(harmful),
        "injected": len(injected),
        "survived": len(injected) if disturbed["finished"] else None,
        "lost_s": {"median": _quantile(lost_s, 0.5), "p99": _quantile(lost_s, 0.99)},
        "chunks": disturbed["chunks"],
        "valid_loss": [(run["valid"] or {}).get("loss") for run in (disturbed, undisturbed)],
        "elapsed_s": [disturbed["elapsed_s"], undisturbed["elapsed_s"]],
    }


def _lost_s(rows: Sequence[Row], fault: dict[str, Any], injected: Sequence[dict[str, Any]]) -> float:
    """The longest pause of a learner that was not harmed itself, near the fault, minus its median pause."""
    at_s, longest = fault["happened_s"], 0.0
    for learner in {row["learner"] for row in rows if row["kind"] == "learner"}:
        own = [each["happened_s"] for each in injected if each["learner"] == learner]
        gaps = list(itertools.pairwise(step_times(rows, learner)))
        usual = statistics.median([after - before for before, after in gaps]) if gaps else 0.0
        for before, after in gaps:
            near = after > at_s and before < at_s + NEAR_AFTER_S
            if near and not any(before - CLOCKS_S < each < after for each in own):
                longest = max(longest, after - before - usual)
    return longest


def _quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value that is not exceeded by a part `q` of the values."""
    if not values:
        return None
    return round(statistics.median(values) if q == 0.5 else values[min(int(q * len(values)), len(values) - 1)], 2)
