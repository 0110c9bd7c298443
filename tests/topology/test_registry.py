"""Topologies by name."""

from __future__ import annotations

import pytest

from roundelay.errors import TopologyError
from roundelay.topology import TOPOLOGIES, every, family, named, random_ring, ring


def test_a_topology_knows_its_own_name(topology):
    assert named(topology, 4).name == topology


def test_seed_and_degree_reach_those_that_have_them():
    assert named("random-ring", 9, seed=3).seed == 3
    assert named("base-graph", 27, degree=2).period == 3


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(TopologyError, match="unknown topology 'random_ring'; did you mean 'random-ring'"):
        named("random_ring", 4)


def test_every_topology_or_the_reason_why_not():
    possible, refused = every(12)
    assert set(refused) == {"hypercube", "one-peer-exponential"}
    assert {mixing.name for mixing in possible} | set(refused) == set(TOPOLOGIES)
    assert every(16)[1] == {}


def test_a_family_takes_a_name_a_function_a_file_or_a_path_of_a_function(tmp_path, monkeypatch):
    (tmp_path / "pair.edgelist").write_text("0 1\n1 2\n")
    (tmp_path / "own_graphs.py").write_text(
        "import roundelay\ndef doubled(size):\n    return roundelay.complete(size)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert repr(family("random-ring", seed=3)(5)) == repr(random_ring(5, seed=3))
    assert repr(family(ring)(5)) == "ring(5)"
    assert family("pair.edgelist")(3).neighbours(1) == (0, 2)
    assert family("own_graphs:doubled")(4).neighbours(0) == (1, 2, 3)


def test_one_mixing_is_a_family_of_one_size():
    assert family(ring(5))(5).size == 5
    with pytest.raises(TopologyError, match=r"ring\(5\) is for 5 learners, but there are 4; use .* random-ring"):
        family(ring(5))(4)


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("own_module_that_is_not:there", "cannot import the topology"),
        ("math:absent", "has no 'absent'"),
        ("math:pi", "must be a function"),
        ("math:sqrt", "must return a Mixing of 4 learners, got 2.0"),
        ("absent.edgelist", "there is no such file"),
    ],
)
def test_a_family_that_cannot_be_says_why(topology, words):
    with pytest.raises(TopologyError, match=words):
        family(topology)(4)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def graph(size):\n    raise ValueError('no')\n", r"failed for 4 learners: ValueError: no \(.*py, line 2\)"),
        ("def (\n", r"cannot import the topology .*SyntaxError: invalid syntax .*py, line 1\)"),
        ("x = 1\n1 / 0\n", r"cannot import the topology .*ZeroDivisionError: .*py, line 2\)"),
    ],
    ids=["raises", "syntax", "import"],
)
def test_an_error_in_the_users_own_code_is_named_with_its_line(code, words, tmp_path, monkeypatch, request):
    name = f"own_{request.node.callspec.id}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TopologyError, match=words):
        family(f"{name}:graph")(4)


def test_a_file_that_is_no_matrix_of_numpy_is_refused_without_advice_to_unpickle_it(tmp_path):
    (tmp_path / "text.npy").write_text("no")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(TopologyError, match=r"cannot read .*text.npy as .npy") as refused:
        family(str(tmp_path / "text.npy"))
    assert "pickle" not in str(refused.value)
    with pytest.raises(TopologyError, match=r"folder.csv: it is a folder"):
        family(str(tmp_path / "folder.csv"))


@pytest.mark.parametrize("topology", [None, 3])
def test_what_is_no_topology_is_refused_with_what_is_one(topology):
    with pytest.raises(TopologyError, match=rf"a topology is a name, .* or a Mixing, got {topology}"):
        family(topology)


@pytest.mark.parametrize("size", [2.5, "8"])
def test_a_number_of_learners_that_is_not_whole_is_refused(size):
    with pytest.raises(TopologyError, match=f"ring needs a whole number of learners, got {size!r}"):
        ring(size)
