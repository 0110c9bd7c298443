"""The topologies of runs, drawn."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Sequence
from pathlib import Path

from roundelay.errors import RoundelayError
from roundelay.plots.report.markup import Html, join, tag
from roundelay.plots.report.runs import Run
from roundelay.topology import Mixing, named

ON_A_TOPOLOGY = ("adpsgd", "dpsgd")


def topologies(runs: Sequence[Run]) -> Html:
    """Every topology once, with the runs that are on it."""
    shown: dict[str, list[str]] = {}
    for run in runs:
        shown.setdefault(_drawn(run), []).append(run.name)
    several = len(runs) > 1
    return join(
        tag("figure", Html(picture), tag("figcaption", ", ".join(names)) if several else "", class_="topology")
        for picture, names in shown.items()
    )


def _drawn(run: Run) -> Html:
    strategy = run.config.get("strategy")
    if strategy is None:
        return tag("p", "The run has left no configuration, so its topology is not known.")
    if strategy not in ON_A_TOPOLOGY:
        return tag("p", f"No topology: with {strategy} all learners average with all others.")
    try:
        mixing = _mixing(run)
        return (
            _picture(mixing)
            if mixing
            else tag("p", f"{run.config.get('topology')} over machines: every one is a super-learner.")
        )
    except (RoundelayError, TypeError, ValueError) as error:  # a topology from elsewhere, or too large to be drawn
        return tag("p", f"Not drawn: {error}")


def _mixing(run: Run) -> Mixing | None:
    """Over learners or super-learners; None where a super-learner is a machine, and machines are not known here."""
    group_size = int(run.config.get("group_size", 1))
    if group_size < 1:
        return None
    return named(str(run.config.get("topology")), (run.size or 1) // group_size, int(run.config.get("seed", 0)))


def _picture(mixing: Mixing) -> Html:
    from roundelay.plots.topology import draw_topology

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "topology.svg")
        draw_topology(mixing, path)
        content = base64.b64encode(path.read_bytes()).decode()
    return tag("img", src=f"data:image/svg+xml;base64,{content}", alt=f"{mixing.name} of {mixing.size} learners")
