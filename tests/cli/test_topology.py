"""`roundelay topology`: figures as JSON and as tables, files, pictures, and one clear line for every mistake."""

from __future__ import annotations

import json
import math
import re

import networkx as nx
import numpy as np
import pytest

from roundelay.cli import main
from roundelay.topology import TOPOLOGIES, ring

KEYS = [
    "name",
    "learners",
    "spectral_gap",
    "spectral_gap_kind",
    "spectral_gap_error",
    "lambda_min",
    "exact_after",
    "sends_per_round",
    "rounds_to_1_percent",
    "sends_to_1_percent",
    "stationary_variance",
]


@pytest.fixture
def figures(capsys):
    """Run with --json and give back what was printed."""

    def run(*words: str):
        assert main(["topology", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


class TestFigures:
    @pytest.mark.parametrize("name", TOPOLOGIES)
    def test_every_topology_prints_the_same_keys(self, figures, name):
        assert list(figures(name, "--learners", "16")) == KEYS

    @pytest.mark.parametrize(("learners", "gap"), [(16, 0.05075), (64, 0.00321), (128, 0.000803)])
    def test_the_fixed_ring(self, figures, learners, gap):
        found = figures("ring", "--learners", str(learners))
        assert found["spectral_gap"] == pytest.approx(gap, rel=2e-3)
        assert found["spectral_gap_kind"] == "fixed"
        assert found["spectral_gap_error"] is None
        assert found["sends_per_round"] == 2

    def test_the_random_ring(self, figures):
        found = figures("random-ring", "--learners", "128", "--seed", "9")
        assert found["spectral_gap"] == pytest.approx(1 - math.sqrt(125 / (3 * 127)))
        assert found["spectral_gap_kind"] == "expected"

    def test_one_peer_exponential(self, figures):
        found = figures("one-peer-exponential", "--learners", "64")
        assert (found["exact_after"], found["spectral_gap_kind"]) == (6, "periodic")
        assert found["sends_to_1_percent"] == 6

    def test_base_graph_is_exact_for_sizes_that_one_peer_exponential_does_not_support(self, figures):
        assert figures("base-graph", "--learners", "12")["exact_after"] == 5
        assert figures("base-graph", "--learners", "12", "--degree", "2")["exact_after"] == 3

    @pytest.mark.parametrize(("name", "variance"), [("ring", 2.410), ("random-ring", 1.318), ("complete", 0.938)])
    def test_stationary_variance_of_16_learners(self, figures, name, variance):
        assert figures(name, "--learners", "16")["stationary_variance"] == pytest.approx(variance, abs=6e-4)

    def test_a_mixing_that_never_settles_has_nulls(self, figures, tmp_path):
        np.savetxt(tmp_path / "swap.csv", [[0, 1], [1, 0]], delimiter=",")
        found = figures(str(tmp_path / "swap.csv"))
        assert (found["stationary_variance"], found["rounds_to_1_percent"], found["sends_to_1_percent"]) == (None,) * 3

    def test_compare_lists_them_all_widest_gap_first(self, figures):
        rows = figures("compare", "--learners", "16")
        assert {row["name"] for row in rows} == set(TOPOLOGIES)
        assert all(list(row) == KEYS for row in rows)
        gaps = [row["spectral_gap"] for row in rows]
        assert gaps == sorted(gaps, reverse=True)


class TestTables:
    def test_one_topology(self, capsys):
        assert main(["topology", "ring", "--learners", "16"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("ring, 16 learners")
        assert "0.05075" in out
        assert "0.6667 without momentum, 1.267 with 0.9" in out

    def test_an_estimated_variance_is_labelled(self, capsys):
        assert main(["topology", "base-graph", "--learners", "1100"]) == 0
        assert "(estimated, standard error" in capsys.readouterr().out

    @pytest.mark.parametrize("learners", ["1", "12", "64", "2048"])
    def test_compare_fits_80_columns_without_cutting_anything(self, capsys, learners):
        assert main(["topology", "compare", "--learners", learners]) == 0
        out = capsys.readouterr().out
        assert "…" not in out
        assert max(map(len, out.splitlines())) <= 80

    def test_compare_says_what_was_left_out_and_why(self, capsys):
        assert main(["topology", "compare", "--learners", "12"]) == 0
        assert "left out: hypercube needs a power of two learners, got 12" in capsys.readouterr().out

    def test_compare_leaves_out_what_is_too_large_to_compute(self, capsys):
        assert main(["topology", "compare", "--learners", "1025"]) == 0
        out = capsys.readouterr().out
        assert "left out: odd-even-ring(1025) changes from round to round" in out
        assert "random-ring" in out


class TestFiles:
    def test_a_matrix_from_npy_and_csv(self, figures, tmp_path):
        np.save(tmp_path / "w.npy", ring(8).matrix())
        np.savetxt(tmp_path / "w.csv", ring(8).matrix(), delimiter=",")
        expected = figures("ring", "--learners", "8")
        for name in ("w.npy", "w.csv"):
            found = figures(str(tmp_path / name))
            assert found["name"] == name
            assert found["spectral_gap"] == pytest.approx(expected["spectral_gap"])

    def test_a_graph_from_edgelist_and_graphml(self, figures, tmp_path):
        graph = nx.petersen_graph()
        nx.write_edgelist(graph, tmp_path / "g.edgelist")
        nx.write_graphml(graph, tmp_path / "g.graphml")
        for name in ("g.edgelist", "g.graphml"):
            found = figures(str(tmp_path / name), "--learners", "10")
            assert found["spectral_gap"] == pytest.approx(0.5)  # adjacency eigenvalues 3, 1, -2: W = (I + A)/4

    @pytest.mark.parametrize(
        ("name", "content", "complaint"),
        [
            ("w.csv", "", "as .csv: "),
            ("w.csv", "a,b\nc,d\n", "as .csv: could not convert string 'a'"),
            ("w.csv", "0.5,0.5\n0.5\n", "as .csv: "),
            ("w.csv", "0.5,0.5\n0.5,0.4\n", "row 1 sums to 0.9 instead of 1"),
            ("w.csv", "0.5,0.5\n", "is square, got shape (1, 2)"),
            ("w.npy", "nonsense", "as .npy: "),
            ("g.edgelist", "0 1\n2 3\n", "falls into 2 parts"),
            ("g.edgelist", "", "got an empty graph"),
            ("g.graphml", "<not xml", "as .graphml: "),
        ],
    )
    def test_a_bad_file_is_named_with_what_is_wrong(self, mistake, tmp_path, name, content, complaint):
        (tmp_path / name).write_text(content)
        line = mistake("topology", str(tmp_path / name))
        assert complaint in line
        assert name in line

    def test_a_file_that_is_not_there(self, mistake, tmp_path):
        assert mistake("topology", str(tmp_path / "x.csv")).endswith("x.csv: there is no such file")

    def test_a_file_knows_its_own_number_of_learners(self, mistake, tmp_path):
        np.save(tmp_path / "w.npy", ring(8).matrix())
        assert "w.npy(8) is for 8 learners, but there are 9" in mistake(
            "topology", str(tmp_path / "w.npy"), "--learners", "9"
        )


class TestFunctions:
    @pytest.fixture(autouse=True)
    def own_module(self, monkeypatch, tmp_path):
        (tmp_path / "own_topologies.py").write_text(
            "import roundelay\ndef lonely_hub(size):\n    return roundelay.star(size)\n"
        )
        monkeypatch.chdir(tmp_path)

    def test_a_function_of_a_module_is_asked_for_the_number_of_learners(self, figures):
        assert figures("own_topologies:lonely_hub", "--learners", "10")["spectral_gap"] == pytest.approx(1 / 10)

    def test_a_function_does_not_know_the_number_of_learners(self, mistake):
        assert "own_topologies:lonely_hub needs --learners N" in mistake("topology", "own_topologies:lonely_hub")

    def test_a_function_that_is_not_there(self, mistake):
        line = mistake("topology", "own_topologies:absent", "--learners", "4")
        assert "the module 'own_topologies' has no 'absent'" in line


class TestPictures:
    @pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
    def test_a_drawing_is_written_to_the_given_file(self, capsys, tmp_path, suffix):
        path = tmp_path / f"ring{suffix}"
        assert main(["topology", "random-ring", "--learners", "8", "--draw", str(path)]) == 0
        assert path.stat().st_size > 1000
        assert f"drawn to {path}" in capsys.readouterr().out

    def test_a_plot_is_written_to_the_given_file(self, capsys, tmp_path):
        path = tmp_path / "gaps.svg"
        assert main(["topology", "compare", "--learners", "16", "--plot", str(path)]) == 0
        assert path.stat().st_size > 1000
        assert f"plotted to {path}" in capsys.readouterr().out

    def test_json_stays_json_beside_a_picture(self, figures, tmp_path):
        assert figures("ring", "--learners", "8", "--draw", str(tmp_path / "r.svg"))["name"] == "ring"


class TestMistakes:
    @pytest.mark.parametrize(
        ("words", "complaint"),
        [
            ("rnig --learners 8", "unknown topology 'rnig'; did you mean 'ring'?"),
            ("rnig --learners 8", "or a file (.npy, .csv, .edgelist, .graphml), or module:function"),
            ("random_ring --learners 8", "did you mean 'random-ring'?"),
            ("ring --learners 0", "--learners: needs a whole number of at least 1, got '0'"),
            ("ring --learners -4", "--learners: needs a whole number of at least 1, got '-4'"),
            ("ring --learners many", "got 'many'"),
            ("ring --learners 2.5", "got '2.5'"),
            ("ring", "topology ring needs --learners N"),
            ("compare", "topology compare needs --learners N"),
            ("", "the following arguments are required: NAME"),
            ("hypercube --learners 12", "hypercube needs a power of two learners, got 12; base-graph works"),
            ("one-peer-exponential --learners 12", "got 12; base-graph works for any number"),
            ("base-graph --learners 12 --degree 0", "--degree: needs a whole number of at least 1"),
            ("base-graph --learners 8 --degree 99", "--degree must be below the 8 learners, got 99"),
            ("compare --learners 8 --degree 8", "--degree must be below the 8 learners, got 8"),
            ("ring --learners 8 --degree 2", "--degree is for base-graph and compare; ring has no degree"),
            ("random-ring --learners 8 --seed x", "--seed"),
            ("ring --learners 8 --draw picture", "ends in .svg, .png, .pdf, got 'picture'"),
            ("ring --learners 8 --draw nowhere/a.svg", "there is no folder 'nowhere'"),
            ("ring --learners 300 --draw a.svg", "at most 256 learners, got 300"),
            ("ring --learners 8 --plot a.svg", "--plot goes with `topology compare`"),
            ("compare --learners 8 --draw a.svg", "`topology compare` takes --plot"),
            ("ring --learners 8 --colour red", "unrecognized arguments: --colour red"),
            ("complete --learners 1000000000", "at most 1000000 learners, got 1000000000"),
            ("odd-even-ring --learners 1025", "at most 1024 learners"),
        ],
    )
    def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(self, mistake, monkeypatch, tmp_path, words, complaint):
        monkeypatch.chdir(tmp_path)
        assert complaint in mistake("topology", *words.split())
        assert list(tmp_path.iterdir()) == []


def test_a_narrow_terminal_gets_fewer_columns_and_no_name_is_cut(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    assert main(["topology", "compare", "--learners", "64"]) == 0
    printed = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert all(name in printed for name in TOPOLOGIES)
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 60
    assert "too narrow for: sends to 1 %, variance (ασ)²" in " ".join(printed.split())


def test_a_file_gets_all_columns_however_narrow_the_terminal_is(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["topology", "compare", "--learners", "64"]) == 0
    printed = capsys.readouterr().out
    assert "variance" in printed
    assert "…" not in printed
