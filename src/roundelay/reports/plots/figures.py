"""What all plots share: matplotlib without a display, one style, and equal files for equal data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundelay.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.hashsalt": "roundelay",
}
COLOURS = {
    "none": "#999999",
    "ddp": "#555555",
    "allreduce": "#66ccee",
    "delay-by-one": "#ccbb44",
    "dpsgd": "#228833",
    "adpsgd": "#4477aa",
    "local-sgd": "#ee6677",
}
DASHES = ("-", "--", ":", "-.")  # of variants of one strategy, which have one colour
UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def strategy_colour(name: str) -> str:
    """The colour of a strategy in pictures of benchmarks. Variants have the colour of their strategy.

    >>> strategy_colour("local-sgd pairs int8") == strategy_colour("local-sgd complete")
    True
    """
    return COLOURS.get(name.partition(" ")[0], COLOURS["none"])


@contextmanager
def picture(
    path: Path, rows: int = 1, columns: int = 1, *, size: tuple[float, float], share_y: bool = False
) -> Iterator[tuple[Figure, list[Any]]]:
    """A figure of `size` inches and its `rows` x `columns` axes as a flat list; written to `path` when the block ends.

    The file has no date in it, so equal data give equal files.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("drawing", "plots") from error
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        yield figure, list(figure.subplots(rows, columns, squeeze=False, sharey=share_y).flat)
        figure.savefig(path, dpi=150, metadata=UNDATED.get(path.suffix))
