"""What every figure shares: matplotlib without a screen, one look, the same file for the same data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundelay.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.hashsalt": "roundelay",
}


def new_figure(rows: int = 1, columns: int = 1, *, size: tuple[float, float]) -> tuple[Figure, list[Any]]:
    """A figure of `rows` x `columns` axes, as a flat list, `size` inches; never a window."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("drawing", "plots") from error
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def save(figure: Figure, path: Path) -> None:
    """Write the figure; without a date in it, so that equal data give equal files."""
    import matplotlib as mpl

    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
    with mpl.rc_context(STYLE):
        figure.savefig(path, dpi=150, metadata=metadata)
