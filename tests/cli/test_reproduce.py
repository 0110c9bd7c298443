"""`roundelay reproduce` on the command line."""

from __future__ import annotations

import argparse
import json

import pytest

from roundelay import papers
from roundelay.cli import reproduce
from roundelay.errors import UsageError
from roundelay.papers import Claim, Finding, Line, Panel


def call(*words: str) -> None:
    parser = argparse.ArgumentParser()
    reproduce.add_arguments(parser)
    reproduce.run(parser.parse_args(words))


@pytest.fixture
def small_claims(monkeypatch):
    """Two claims that take no time; the second raises KeyboardInterrupt."""

    def quick(seeds, progress):
        progress(1.0)
        lines = [Line("a", [1, 2], [[1.0, 2.0] for _ in seeds])]
        return Finding("reproduced", "it holds", {"figure": 1.0}, [Panel("t", "x", "y", lines)])

    def interrupted(seeds, progress):
        raise KeyboardInterrupt

    monkeypatch.setitem(papers.CLAIMS, "mixing", Claim("mixing", "s", "setting", "differs", 1.0, quick))
    monkeypatch.setitem(papers.CLAIMS, "rate", Claim("rate", "s", "setting", "differs", 1.0, interrupted))


def test_reproduce_prints_claims_with_name_verdict_and_figures(small_claims, capsys, tmp_path):
    call("mixing", "--json", "--out", str(tmp_path))
    (claim,) = json.loads(capsys.readouterr().out)["claims"]
    assert (claim["name"], claim["verdict"], claim["figures"]) == ("mixing", "reproduced", {"figure": 1.0})
    assert {path.name for path in tmp_path.iterdir()} == {"mixing.json", "mixing.svg"}


def test_ctrl_c_keeps_the_finished_claims(small_claims, capsys, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        call("mixing", "rate", "--json", "--out", str(tmp_path))
    document = json.loads(capsys.readouterr().out)
    assert document["interrupted"]
    assert [claim["name"] for claim in document["claims"]] == ["mixing"]
    assert (tmp_path / "mixing.json").exists()


def test_ctrl_c_before_the_first_claim_is_one_line(small_claims, capsys):
    with pytest.raises(KeyboardInterrupt):
        call("rate")
    assert capsys.readouterr().out == "interrupted before the first claim was complete\n"


def test_an_unknown_claim_is_a_mistake_that_names_the_nearest(capsys):
    with pytest.raises(UsageError, match="did you mean 'mixing'"):
        call("mixng")


def test_two_seeds_are_too_few_for_a_verdict(small_claims, capsys):
    call("mixing", "--seeds", "2", "--json")
    (claim,) = json.loads(capsys.readouterr().out)["claims"]
    assert claim["verdict"] == "inconclusive"  # the rule itself says "reproduced"
    assert claim["found"] == "2 seeds are too few for a verdict, use --seeds 3 or more. it holds"


def test_the_seeds_begin_where_the_user_says(small_claims, capsys):
    call("mixing", "--first-seed", "7", "--json")
    assert json.loads(capsys.readouterr().out)["claims"][0]["seeds"] == [7, 8, 9]


def test_the_time_is_told_before_the_first_run(small_claims, capsys):
    call("mixing", "--seeds", "60")
    assert capsys.readouterr().err.startswith("1 x 60 runs on one core: about 1 minute on an idle machine")


def test_names_on_the_command_line_are_the_claims_that_exist():
    assert set(reproduce.CLAIM_NAMES) == set(papers.CLAIMS)


def test_a_file_in_place_of_the_folder_is_refused(small_claims, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot make the folder '.*file': File exists; choose another --out"):
        call("mixing", "--out", str(tmp_path / "file"))
