"""`roundelay advise`: a ranking to read, a ranking to parse."""

from __future__ import annotations

import json

import pytest

from roundelay.cli import main

CLUSTER = ["advise", "--learners", "16", "--model-bytes", "165MB", "--step-time", "300ms"]
KEYS = [
    "strategy",
    "topology",
    "step_s",
    "steps_per_s",
    "ratio_to_ideal",
    "exchanges_per_step",
    "stationary_variance",
    "reason",
]


def test_json_has_every_candidate_best_first_and_says_what_is_left_out(capsys):
    assert main([*CLUSTER, "--slowest-factor", "10", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["advice", "left_out"]
    assert all(list(row) == KEYS for row in printed["advice"])
    assert printed["advice"][0]["strategy"] == "adpsgd"
    assert {"allreduce", "dpsgd", "adpsgd", "delay-by-one"} == {row["strategy"] for row in printed["advice"]}
    assert "contention" in printed["left_out"]


def test_the_table_fits_80_columns_and_each_strategy_has_its_reason(capsys):
    assert main([*CLUSTER, "--group-size", "4", "--group-bandwidth", "100Gb/s", "--slowest-factor", "3"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "adpsgd on random-ring: nobody waits; one exchange a step." in out
    assert "super-learner x4, adpsgd on" in out
    assert "Left out:" in out


def test_units_are_understood(capsys):
    words = (
        "advise --learners 4 --model-bytes 1G --step-time 2 --bandwidth 1.25GB/s --latency 5us --step-spread 0 --json"
    )
    assert main(words.split()) == 0
    ring = next(row for row in json.loads(capsys.readouterr().out)["advice"] if row["topology"] == "ring")
    assert ring["step_s"] == pytest.approx(2)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("advise --learners 4", "the following arguments are required: --model-bytes, --step-time"),
        ("advise --learners 4 --model-bytes big --step-time 1", "--model-bytes: needs a size such as 165MB, got 'big'"),
        ("advise --learners 4 --model-bytes 1e999 --step-time 1", "too large"),
        ("advise --learners 4 --model-bytes 0 --step-time 1", "model_bytes must be more than 0"),
        ("advise --learners 4 --model-bytes 1M --step-time 3h", "--step-time: needs a time such as 300ms, got '3h'"),
        ("advise --learners 4 --model-bytes 1M --step-time 1 --bandwidth fast", "a bandwidth such as 100Gb/s"),
        ("advise --learners 4 --model-bytes 1M --step-time 1 --slowest-factor 0.5", "slowest_factor is at least 1"),
        (
            "advise --learners 4 --model-bytes 1M --step-time 1 --step-spread -1",
            "needs a number of at least 0, got '-1'",
        ),
        ("advise --learners 4 --model-bytes 1M --step-time 1 --group-size 3", "group_size must divide 4 learners"),
        ("advise --learners 2000 --model-bytes 1M --step-time 1", "at most 1024 learners"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(mistake, words, complaint):
    assert complaint in mistake(*words.split())
