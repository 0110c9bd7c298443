from __future__ import annotations

import json
import signal

import pytest

from roundelay.bench import chaos
from roundelay.bench.chaos import Fault, FaultInjector, check
from roundelay.cli import main
from roundelay.errors import ConfigError
from roundelay.training.recipes import resolve, table_of


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("kill", "2@20s", Fault(20.0, 2, "kill")),
        ("kill", "2@20", Fault(20.0, 2, "kill")),
        ("join", "6@1.5s", Fault(1.5, 6, "join")),
        ("freeze", "1@30s:20s", Fault(30.0, 1, "freeze", 20.0)),
        ("freeze", "1@30:20", Fault(30.0, 1, "freeze", 20.0)),
    ],
)
def test_all_faults_have_one_grammar(kind, text, expected):
    assert Fault.parsed(kind, text) == expected


@pytest.mark.parametrize(
    ("kind", "text", "form"),
    [
        ("kill", "2", "LEARNER@TIME"),
        ("kill", "2@3s:4s", "LEARNER@TIME"),
        ("freeze", "2@3s", "LEARNER@TIME:DURATION"),
        ("join", "x@3s", "LEARNER@TIME"),
        ("kill", "-1@3s", "LEARNER@TIME"),
    ],
)
def test_anything_else_is_refused_with_what_is_needed(kind, text, form):
    with pytest.raises(ConfigError, match=f"--{kind} needs {form}.*got '{text}'"):
        Fault.parsed(kind, text)


def parsed(*options: str) -> list[Fault]:
    """Faults from "kill 2@3s" and so on."""
    return [Fault.parsed(*option.split()) for option in options]


def test_a_fault_is_shown_as_the_option_that_gives_it():
    assert [str(fault) for fault in parsed("kill 2@1.5s", "freeze 1@3:20s")] == ["--kill 2@1.5s", "--freeze 1@3s:20s"]


@pytest.mark.parametrize(
    "options",
    [
        ["kill 2@1", "join 7@2", "kill 7@3", "join 7@4"],
        ["freeze 1@1:3", "freeze 1@4:1", "kill 1@4.5", "join 1@5"],
        ["kill 0@1", "kill 1@1"],
    ],
)
def test_faults_that_can_happen_in_their_order_are_accepted(tmp_path, options):
    check(resolve(table_of("tiny"), [("learners", "3")]), parsed(*options), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["kill 3@1"], "learner 3 does not live at that time; the living learners are 0, 1, 2"),
        (["kill 6@1", "join 6@3"], "--kill 6@1s: learner 6 does not live"),
        (["join 2@1"], "learner 2 lives at that time; --kill it before"),
        (["kill 2@1", "join 2@3", "join 2@4"], "--join 2@4s: learner 2 lives"),
        (["freeze 1@1:5", "join 1@3"], "learner 1 lives at that time"),
        (["kill 1@1", "kill 1@2"], "--kill 1@2s: learner 1 does not live"),
        (["kill 1@1", "freeze 1@2:1"], "--freeze 1@2s:1s: learner 1 does not live"),
        (["freeze 1@1:5", "freeze 1@3:1"], "is frozen already"),
        (["kill 0@1", "kill 1@1", "kill 2@1"], "this was the last living learner"),
    ],
)
def test_faults_that_cannot_happen_are_refused_before_anything_starts(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        check(resolve(table_of("tiny"), [("learners", "3")]), parsed(*options), tmp_path)


@pytest.mark.parametrize("inside", ["", "undisturbed", "disturbed"])
def test_a_directory_with_a_run_is_refused(tmp_path, capsys, inside):
    (tmp_path / inside).mkdir(exist_ok=True)
    (tmp_path / inside / "config.toml").write_text("")
    assert main(["chaos", "tiny", "--out", str(tmp_path)]) == 2
    assert "holds a run already; choose another --out" in capsys.readouterr().err


class Processes:
    """A supervisor whose processes only have a name."""

    def __init__(self, *running: int) -> None:
        self.running, self.sent, self.started = frozenset(running), [], []

    def send(self, learner: int, number: int) -> None:
        self.sent.append((learner, signal.Signals(number).name))

    def start(self, learner: int) -> None:
        self.started.append(learner)


@pytest.fixture
def injected(tmp_path, monkeypatch):
    """Carry out faults in a run that ends 10 s after its first row, which it writes after 2 s."""

    def run(processes, *options):
        metrics = tmp_path / "metrics.jsonl"
        injector = FaultInjector(parsed(*options), metrics)
        injector(processes)  # there is no row yet
        metrics.write_text(json.dumps({"kind": "learner", "learner": 0, "elapsed_s": 2.0}) + "\n")
        for second in range(11):
            monkeypatch.setattr(chaos.time, "monotonic", lambda second=second: 1000.0 + second)
            injector(processes)
        return {each["option"]: (each["happened_s"], each["reason"]) for each in injector.report()}

    return run


def test_a_fault_of_a_campaign_waits_until_another_learner_trains(tmp_path, monkeypatch):
    metrics, processes = tmp_path / "metrics.jsonl", Processes(0, 1)
    injector = FaultInjector(parsed("kill 1@1", "join 1@2", "kill 0@3"), metrics, patient=True)
    trains = {1: range(11), 0: range(4, 11)}  # learner 0 takes no step before 4 s, and learner 1 dies at 4 s
    for second in range(11):
        monkeypatch.setattr(chaos.time, "monotonic", lambda second=second: 1000.0 + second)
        with metrics.open("a") as file:
            for learner, when in trains.items():
                if second in when and learner in processes.running:
                    row = {"kind": "learner", "learner": learner, "elapsed_s": 2.0 + second}
                    file.write(json.dumps(row) + "\n")
            file.write('{"kind": "learner", "lear')  # a row that is being written
        injector(processes)
        with metrics.open("r+") as file:
            file.truncate(metrics.stat().st_size - 25)
        killed = {learner for learner, _ in processes.sent}
        processes.running = frozenset({0, 1} - killed) | (frozenset({1}) if second >= 8 else frozenset())
    assert processes.sent == [(1, "SIGKILL"), (0, "SIGKILL")]
    happened = {each["option"]: each["happened_s"] for each in injector.report()}
    # Learner 0 dies once learner 1 trains again. All times are later by the 3 s for which the first fault has waited.
    assert happened == {"--kill 1@1s": 6.0, "--join 1@2s": 7.0, "--kill 0@3s": 11.0}


def test_faults_are_carried_out_when_they_are_due_and_told_in_seconds_of_the_run(injected):
    processes = Processes(0, 1, 2)
    assert injected(processes, "kill 2@3", "freeze 1@4:2", "join 3@5") == {
        "--kill 2@3s": (5.0, None),
        "--freeze 1@4s:2s": (6.0, None),
        "--join 3@5s": (7.0, None),
    }
    assert processes.sent == [(2, "SIGKILL"), (1, "SIGSTOP"), (1, "SIGCONT")]
    assert processes.started == [3]


def test_a_fault_that_did_not_happen_is_told_with_the_reason(injected):
    processes = Processes(0, 1)
    assert injected(processes, "kill 1@30", "kill 2@3", "join 0@4") == {
        "--kill 1@30s": (None, "the run had ended before"),
        "--kill 2@3s": (None, "learner 2 had ended before"),
        "--join 0@4s": (None, "learner 0 still ran"),
    }
    assert not processes.sent
    assert not processes.started


def outcome_of(finished=True):
    chunks = {"once": 1, "more_than_once": 0, "never": 0}
    figures = dict.fromkeys(("valid", "test", "elapsed_s"))
    return figures | {"finished": finished, "events": [], "chunks": chunks, "conservation": {"relative": 0.0}}


def test_a_command_whose_fault_did_not_happen_fails_and_its_json_is_whole(tmp_path, monkeypatch, capsys):
    def run_once(config, faults, folder, **patience):
        injector = FaultInjector(faults, folder / "metrics.jsonl")
        return {"exit_code": 0, "faults": injector.report()} | outcome_of()

    monkeypatch.setattr(chaos, "run_once", run_once)
    words = ["chaos", "tiny", "--kill", "2@6s", "--freeze", "1@1s:2s", "--out", str(tmp_path)]
    assert main([*words, "--json"]) == 2
    said = capsys.readouterr()
    assert "2 of 2 faults did not happen (--freeze 1@1s:2s: the run had ended before; --kill 2@6s: " in said.err
    assert said.err.count("\n") == 1
    freeze, kill = json.loads(said.out)["faults"]
    assert (kill["kind"], kill["learner"], kill["at_s"], kill["happened_s"]) == ("kill", 2, 6.0, None)
    assert freeze["duration_s"] == 2.0
    assert main(words) == 2
    assert "chunks never used" in capsys.readouterr().out


def test_if_the_run_without_faults_fails_there_is_nothing_to_compare(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(chaos, "run_once", lambda *_: outcome_of(finished=False))
    assert main(["chaos", "tiny", "--out", str(tmp_path)]) == 2
    assert "the run without faults failed" in capsys.readouterr().err
