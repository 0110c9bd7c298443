"""`roundelay bench` refuses wrong options before it starts anything; rows become a table, JSON and a plot."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from roundelay.bench import overhead, speech, throughput
from roundelay.cli import main


def row(strategy: str, topology: str | None, transport: str | None, wire: str | None, ratio: float) -> throughput.Row:
    return throughput.Row(
        strategy,
        topology,
        transport,
        wire,
        "emulated",
        100_000,
        10.0,
        100 * ratio,
        ratio,
        (ratio, ratio),
        2 * ratio,
        ratio,
        0.9,
    )


@pytest.fixture
def measured(monkeypatch):
    """What the command asks for; nothing is measured."""
    asked = {}

    def run(cases, **settings):
        asked.update(settings, cases=cases)
        settings["progress"](cases[0])
        return [row("none", None, None, None, 1.0), row("adpsgd", "random-ring", "sockets", "bfloat16", 0.95)]

    monkeypatch.setattr(throughput, "run", run)
    return asked


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench", "the following arguments are required: WHAT"),
        ("bench overhead --slow 0:10", "unrecognized arguments: --slow 0:10"),
        ("bench overhead --repetitions 3", "unrecognized arguments: --repetitions 3"),
        ("bench speed", "unknown value 'speed'"),
        ("bench throughput --slow 0:10", "unrecognized arguments: --slow 0:10"),
        ("bench stragglers --slow 10", "needs LEARNER:FACTOR"),
        ("bench stragglers --slow 0:0.5", "a factor of at least 1"),
        ("bench stragglers --slow 4:10", "names learner 4, but the learners are 0 to 3"),
        ("bench throughput --learners 1", "needs 2 to 64 learners, one process each on this machine, got 1"),
        ("bench throughput --parameters 1Q", "such as 43M or 500K, got '1Q'"),
        ("bench throughput --parameters 10", "at least 1000"),
        ("bench throughput --seconds now", "got 'now'"),
        ("bench throughput --seconds 0", "--seconds: must be more than 0, got '0'"),
        ("bench overhead --seconds 0", "--seconds: must be more than 0, got '0'"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys, measured):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not measured


def test_the_straggler_is_learner_0_ten_times_slower_by_default(measured, capsys):
    assert main(["bench", "stragglers", "--parameters", "1M"]) == 0
    assert {(case.slow, case.slow_learner) for case in measured["cases"]} == {(1.0, 0), (10.0, 0)}
    assert main(["bench", "stragglers", "--slow", "2:3", "--parameters", "1M,2M"]) == 0
    assert {(case.slow, case.slow_learner) for case in measured["cases"]} == {(1.0, 2), (3.0, 2)}
    assert {case.parameters for case in measured["cases"]} == {1_000_000, 2_000_000}


def test_it_is_said_beforehand_how_long_a_benchmark_takes(measured, capsys):
    assert main(["bench", "throughput", "--parameters", "1M", "--seconds", "28.5s", "--repetitions", "4"]) == 0
    cases = len(measured["cases"])
    said = capsys.readouterr().err
    assert f"{4 * cases} measurements of 28.5 s: about {2 * cases} minutes on an idle machine" in said


def test_the_table_names_strategy_topology_and_transport(measured, capsys):
    assert main(["bench", "throughput", "--repetitions", "2"]) == 0
    out = capsys.readouterr().out
    longest = next(line for line in out.splitlines() if line.startswith("adpsgd"))
    assert longest.split() == [
        "adpsgd",
        "random-ring",
        "(sockets",
        "bfloat16)",
        "0.1",
        "M",
        "95.0",
        "0.95",
        "1.90",
        "0.95",
        "0.90",
    ]
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert measured["repetitions"] == 2


def test_json_has_rows_the_command_and_the_machine(measured, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        sys, "argv", ["bin/roundelay", "bench", "throughput", "--json", "--plot", str(tmp_path / "bench.svg")]
    )
    assert main() == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rows"][1]["ratio_to_none"] == 0.95
    assert document["command"] == shlex.join(["roundelay", *sys.argv[1:]])
    assert document["machine"].keys() >= {"cores", "cpu", "torch", "commit", "started"}
    assert (tmp_path / "bench.svg").stat().st_size > 1000


def test_the_overhead_is_printed_as_json(monkeypatch, capsys):
    monkeypatch.setattr(overhead, "measure", lambda **_: [overhead.Row("metrics", 180.0, 0.001, (0.0, 0.002))])
    assert main(["bench", "overhead", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["seconds"] == 60.0
    assert document["rows"] == [{"case": "metrics", "steps_per_s": 180.0, "overhead": 0.001, "ci95": [0.0, 0.002]}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "5 s a case, and a flat start: about 2 minutes on an idle machine"),
        ("--seconds 2 --hours 0.2", "2 s a case, and a flat start: about 37 s"),
        ("--hours 20", "about 31 minutes"),
    ],
)
def test_bench_speech_says_beforehand_how_long_it_takes(words, said, monkeypatch, capsys):
    monkeypatch.setattr(speech, "measure", lambda *_: iter(()))
    assert main(["bench", "speech", *words.split()]) == 0
    assert said in " ".join(capsys.readouterr().err.split())
