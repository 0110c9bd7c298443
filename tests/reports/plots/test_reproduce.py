"""Pictures of experiments can be read: ticks where values were tried, one legend where all panels show the same."""

from __future__ import annotations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from roundelay.papers.claim import Line, Panel
from roundelay.reports.plots import reproduce
from roundelay.reports.plots.reproduce import plot_panels


def labels(panel: Panel, axis: str) -> list[str]:
    """The ticks that are written along one axis, within what is shown."""
    figure = Figure()
    ax = figure.subplots()
    reproduce._draw(ax, panel)
    FigureCanvasAgg(figure).draw()
    chosen = getattr(ax, f"{axis}axis")
    low, high = chosen.get_view_interval()
    return [tick.label1.get_text() for tick in chosen.get_major_ticks() if low <= tick.get_loc() <= high]


def panel(x: list[float], y: list[float], log: str, label: str = "a") -> Panel:
    return Panel("title", "x", "y", [Line(label, x, [y])], log)


def test_values_that_were_tried_are_the_ticks():
    assert labels(panel([4, 8, 16, 32], [1, 2, 3, 4], "x"), "x") == ["4", "8", "16", "32"]


def test_many_or_long_values_are_not():
    assert "39.4107" not in labels(panel([39.4107, 78.8], [1, 2], "x"), "x")
    assert labels(panel([2.0**k for k in range(12)], [1.0] * 12, "x"), "x") == ["1", "10", "100", "1000"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.3, 1.1], ["0.3", "0.5", "0.7", "1"]),
        ([0.05, 2.0], ["0.05", "0.1", "0.2", "0.5", "1", "2"]),
    ],
)
def test_a_narrow_logarithmic_axis_has_numbers_between_powers_of_ten(values, expected):
    assert labels(panel([1, 2], values, "y"), "y") == expected


def test_a_very_wide_axis_has_powers_of_ten():
    assert any("10^{" in text for text in labels(panel([1, 2], [1.0, 1e9], "y"), "y"))


@pytest.mark.parametrize(("second", "legends"), [("a", 1), ("b", 0)])
def test_panels_that_show_the_same_share_a_legend(tmp_path, monkeypatch, second, legends):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot_panels([panel([1, 2], [1, 2], ""), panel([1, 2], [2, 1], "", second)], tmp_path / "picture.svg")
    (figure,) = drawn
    assert len(figure.legends) == legends
    assert sum(ax.get_legend() is not None for ax in figure.axes) == 2 * (1 - legends)


@pytest.mark.parametrize(("lines", "below"), [(3, False), (8, True)])
def test_a_legend_of_many_lines_stands_below_them(lines, below):
    figure = Figure(layout="constrained")
    ax = figure.subplots()
    many = [Line(str(number), [1, 2], [[number, number]]) for number in range(lines)]
    reproduce._draw(ax, Panel("title", "x", "y", many))
    reproduce._legend(ax, lines)
    FigureCanvasAgg(figure).draw()
    assert (ax.get_legend().get_window_extent().y1 < ax.get_window_extent().y0) == below


def looks(*labels: str) -> list[tuple[str, str]]:
    return reproduce._looks([Line(label, [1], [[1]]) for label in labels])


def test_a_strategy_and_a_topology_have_one_colour_in_all_pictures():
    assert looks("allreduce", "dpsgd ring", "delay-by-one")[1:] == looks("dpsgd ring", "delay-by-one", "allreduce")[:2]
    assert looks("fixed ring", "random ring")[1] == looks("random ring, every 2nd step")[0]
    assert len({colour for colour, _ in looks("allreduce", "dpsgd ring", "fixed ring", "random ring", "other")}) == 5


def test_variants_of_a_strategy_differ_in_dashes_only():
    (first, solid), (second, dashed) = looks("adpsgd ring", "adpsgd random-ring")
    assert first == second
    assert (solid, dashed) == ("-", "--")


def test_a_prediction_is_dashed_and_has_the_colour_of_what_it_predicts():
    measured = Line("fixed ring, measured", [1], [[1]])
    predicted = Line("fixed ring, predicted", [1], [[1]], dashed=True, beside="fixed ring, measured")
    (colour, solid), (same, dashed) = reproduce._looks([measured, predicted])
    assert same == colour
    assert (solid, dashed) == ("-", "--")
