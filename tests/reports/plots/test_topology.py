"""Pictures: there, the same every time, and showing what they say."""

from __future__ import annotations

import pytest

from roundelay.errors import TopologyError
from roundelay.reports.plots import topology as plots
from roundelay.reports.plots.topology import draw_topology, plot_gaps
from roundelay.topology import TOPOLOGIES, named, random_ring, ring, torus


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("size", [1, 2, 16])
def test_every_topology_can_be_drawn(tmp_path, name, size):
    draw_topology(named(name, size), tmp_path / "a.svg")
    assert f"{name}, {size} learners" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_the_same_graph_gives_the_same_file(tmp_path, suffix):
    for name in ("first", "second"):
        draw_topology(random_ring(8, seed=1), (tmp_path / name).with_suffix(suffix))
    assert (tmp_path / f"first{suffix}").read_bytes() == (tmp_path / f"second{suffix}").read_bytes()


def test_the_same_plot_gives_the_same_file(tmp_path):
    for name in ("first.svg", "second.svg"):
        plot_gaps(16, tmp_path / name)
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()


def test_a_changing_topology_shows_some_rounds_and_a_fixed_one_only_itself(tmp_path):
    draw_topology(random_ring(8), tmp_path / "random.svg")
    draw_topology(ring(8), tmp_path / "fixed.svg")
    assert [f"round {k}" in (tmp_path / "random.svg").read_text() for k in range(5)] == [True] * 4 + [False]
    assert "round 0" not in (tmp_path / "fixed.svg").read_text()


@pytest.mark.parametrize(("size", "wraps"), [(12, True), (4, False), (13, False)])
def test_a_torus_says_that_edges_wrap_around_where_they_do(tmp_path, size, wraps):
    draw_topology(torus(size), tmp_path / "torus.svg")
    assert ("wrap around" in (tmp_path / "torus.svg").read_text()) == wraps


@pytest.mark.parametrize("most", [1, 3, 12, 16])
def test_the_plot_of_gaps_names_every_topology_that_some_size_has(tmp_path, most):
    plot_gaps(most, tmp_path / "gaps.svg")
    text = (tmp_path / "gaps.svg").read_text()
    missing = [name for name in TOPOLOGIES if f"<!-- {name} -->" not in text]
    assert missing == (["hypercube", "one-peer-exponential"] if most == 3 else [])


def test_sizes_are_powers_of_two_and_the_largest_itself():
    assert plots._sizes(64) == [4, 8, 16, 32, 64]
    assert plots._sizes(20) == [4, 8, 16, 20]
    assert plots._sizes(1) == [1]


def test_no_two_curves_look_alike():
    assert set(plots._COLOUR_AND_MARKER) == set(TOPOLOGIES)
    assert len({colour for colour, _ in plots._COLOUR_AND_MARKER.values()}) == len(TOPOLOGIES)


def test_too_many_learners_to_see_anything_are_refused(tmp_path):
    with pytest.raises(TopologyError, match="at most 256 learners, got 257"):
        draw_topology(ring(257), tmp_path / "a.svg")
