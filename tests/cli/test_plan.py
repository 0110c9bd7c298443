"""`roundelay plan`: tables to read, JSON to parse, a plot, and one clear line for every mistake."""

from __future__ import annotations

import json

import pytest

from roundelay.cli import main

CLUSTER = ["plan", "--learners", "16", "--model-bytes", "165MB", "--step-time", "300ms"]
RANKING = [
    "strategy",
    "topology",
    "group_size",
    "step_s",
    "steps_per_s",
    "ratio_to_ideal",
    "exchanges_per_step",
    "stationary_variance",
    "adam_lr_factor",
    "reason",
]
SCALING = ["strategy", "topology", "learners", "step_s", "speedup", "efficiency", "epoch_s"]


def test_json_has_every_candidate_every_point_and_what_is_left_out(capsys):
    assert main([*CLUSTER, "--slowest-factor", "10", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["ranking", "scaling", "left_out"]
    assert all(list(row) == RANKING for row in printed["ranking"])
    assert all(list(row) == SCALING for row in printed["scaling"])
    assert printed["ranking"][0]["strategy"] == "adpsgd"
    assert {"allreduce", "dpsgd", "adpsgd", "delay-by-one", "local-sgd"} == {
        row["strategy"] for row in printed["ranking"]
    }
    assert {row["learners"] for row in printed["scaling"]} == {1, 2, 4, 8, 16}
    assert "contention" in printed["left_out"]


def test_the_tables_fit_80_columns_and_each_strategy_has_its_reason(capsys):
    words = ["--group-size", "4", "--group-bandwidth", "100Gb/s", "--slowest-factor", "3", "--epoch-steps", "1000000"]
    assert main([*CLUSTER, *words]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "no learner waits for another; " in out
    assert "\nadpsgd, groups of 4 on " in out
    assert "speed-up (and time per epoch) by number of learners" in out
    assert "With Adam or AdamW" in out
    assert "best topology: the one with the most steps per second" in " ".join(out.split())
    assert "Left out: contention" in out


def test_numbers_of_learners_grow_from_left_to_right_in_at_most_six_columns(capsys):
    assert main(["plan", "--learners", "256", "--model-bytes", "1MB", "--step-time", "1", "--step-spread", "0"]) == 0
    heading = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("strategy") and "256" in line
    )
    assert heading.split() == ["strategy", "1", "4", "16", "64", "256"]


def test_units_are_understood(capsys):
    words = "plan --learners 4 --model-bytes 1G --step-time 2 --bandwidth 1.25GB/s --latency 5us --step-spread 0 --json"
    assert main(words.split()) == 0
    ring = next(row for row in json.loads(capsys.readouterr().out)["ranking"] if row["topology"] == "ring")
    assert ring["step_s"] == pytest.approx(2)


def test_a_plot_is_written_to_the_given_file(capsys, tmp_path):
    path = tmp_path / "scaling.svg"
    assert main(["plan", "--learners", "4", "--model-bytes", "1M", "--step-time", "1", "--plot", str(path)]) == 0
    assert path.stat().st_size > 1000
    assert f"plotted to {path}" in capsys.readouterr().out


def test_the_papers_hours_stand_beside_the_models_and_say_what_was_fitted(capsys):
    assert main(["plan", "--papers"]) == 0
    out = capsys.readouterr().out
    assert "1.98" in out
    assert "Fitted:" in out
    assert "Left out:" in out
    assert main(["plan", "--papers", "--json"]) == 0
    assert [row["published_h"] for row in json.loads(capsys.readouterr().out)["papers"]] == [14.0, 5.2, 2.28, 1.98]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("", "plan needs --learners, --model-bytes, --step-time, or --papers alone"),
        ("--learners 4", "plan needs --model-bytes, --step-time, or --papers alone"),
        (
            "--papers --learners 4 --plot a.svg",
            "--papers is about the papers' own cluster; leave out --learners, --plot",
        ),
        ("--learners 4 --model-bytes big --step-time 1", "--model-bytes: needs a size such as 165MB, got 'big'"),
        ("--learners 4 --model-bytes 1e999 --step-time 1", "too large"),
        ("--learners 4 --model-bytes 0 --step-time 1", "--model-bytes: must be more than 0, got '0'"),
        ("--learners 4 --model-bytes 1M --step-time 0s", "--step-time: must be more than 0, got '0s'"),
        ("--learners 4 --model-bytes 1M --step-time 3h", "--step-time: needs a time such as 300ms, got '3h'"),
        ("--learners 4 --model-bytes 1M --step-time 1 --bandwidth fast", "a bandwidth such as 100Gb/s"),
        (
            "--learners 4 --model-bytes 1M --step-time 1 --slowest-factor 0.5",
            "--slowest-factor: needs a number of at least 1, got '0.5'",
        ),
        ("--learners 4 --model-bytes 1M --step-time 1 --step-spread -1", "needs a number of at least 0, got '-1'"),
        ("--learners 4 --model-bytes 1M --step-time 1 --group-size 3", "group_size must divide the 4 learners"),
        ("--learners 2000 --model-bytes 1M --step-time 1", "at most 1024 learners"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(mistake, words, complaint):
    assert complaint in mistake("plan", *words.split())
