"""Drawings of the topologies of runs, embedded in the page."""

from __future__ import annotations

import base64
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from roundelay.errors import RoundelayError
from roundelay.reports.pages.markup import Html, join, tag
from roundelay.reports.pages.run import Run
from roundelay.topology import named


def has_topology(run: Run) -> bool:
    """Whether the strategy of the run takes a topology; True if the strategy is a class that cannot be imported here."""
    from roundelay.strategies.registry import takes_option

    try:
        return takes_option(str(run.config.get("strategy")), "topology")
    except RoundelayError:
        return True


def topology_pictures(runs: Sequence[Run]) -> Html:
    """Every topology once, with the names of the runs that used it."""
    shown: dict[Html, list[str]] = {}
    for run in runs:
        shown.setdefault(_picture(run), []).append(run.name)
    several = len(runs) > 1
    return join(
        tag("figure", picture, tag("figcaption", ", ".join(names)) if several else "", class_="topology")
        for picture, names in shown.items()
    )


def _picture(run: Run) -> Html:
    strategy, topology = run.config.get("strategy"), str(run.config.get("topology"))
    if strategy is None:
        return tag("p", "The run has left no configuration, so its topology is not known.")
    if not has_topology(run):
        return tag("p", f"No topology: with {strategy} all learners average with all others.")
    try:
        group_size, seed = int(run.config.get("group_size", 1)), int(run.config.get("seed", 0))
        if group_size < 1:  # one group per machine; the number of machines is not recorded
            return tag("p", f"{topology} between machines: the learners of one machine are a super-learner.")
        drawing = _drawing(topology, (run.size or 1) // group_size, seed)
    except (
        RoundelayError,
        TypeError,
        ValueError,
    ) as error:  # a topology that cannot be loaded here, or is too large to draw
        return tag("p", f"Not drawn: {error}")
    note = (
        tag("p", f"Each circle is a super-learner of {group_size} learners.", class_="note") if group_size > 1 else ""
    )
    return join([drawing, note])


@functools.cache
def _drawing(topology: str, size: int, seed: int) -> Html:
    from roundelay.reports.plots.topology import draw_topology

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "topology.svg")
        draw_topology(named(topology, size, seed), path)
        content = base64.b64encode(path.read_bytes()).decode()
    return tag("img", src=f"data:image/svg+xml;base64,{content}", alt=f"{topology} of {size}")
