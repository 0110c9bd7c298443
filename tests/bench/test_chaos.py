from __future__ import annotations

import pytest

from roundelay.bench.chaos import Fault, check, chunks_used, conservation, pace_after, stalled_s
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


def test_faults_of_learners_that_are_not_there_are_refused():
    config = resolve(table_of("tiny"), [("learners", "3")])
    check(config, [Fault(1.0, 2, "kill"), Fault(2.0, 7, "join"), Fault(3.0, 7, "kill")])
    with pytest.raises(ConfigError, match="the learners are 0 to 2"):
        check(config, [Fault(1.0, 3, "kill")])


def rows_of(times, learner=0):
    return [{"kind": "learner", "learner": learner, "steps": n, "elapsed_s": time} for n, time in enumerate(times)]


def test_a_stall_is_the_longest_pause_near_the_loss_beyond_the_usual_one():
    rows = rows_of([0.0, 1.0, 2.0, 3.0, 6.5, 7.5, 8.5]) + rows_of([0.0, 50.0], learner=1)
    assert stalled_s(rows, at_s=4.0, lost=1) == pytest.approx(2.5)
    assert stalled_s(rows, at_s=40.0, lost=1) == 0.0


def test_the_pace_after_a_loss_is_that_of_the_other_learners_over_their_pace_before():
    steady = [float(second) for second in range(1, 30)]
    rows = rows_of(steady) + rows_of(steady[:10], learner=1)
    assert pace_after(rows, at_s=10.0, lost=1) == pytest.approx(1.0)
    halved = [*steady[:10], *(10.0 + 2 * n for n in range(1, 10))]
    assert pace_after(rows_of(halved) + rows_of(steady[:10], learner=1), at_s=10.0, lost=1) == pytest.approx(0.5)
    assert pace_after(rows_of(steady[:12]), at_s=10.0, lost=1) is None


def test_chunks_are_counted_over_all_learners(tmp_path):
    (tmp_path / "chunks-0.txt").write_text("0\n1\n2\n")
    (tmp_path / "chunks-1.txt").write_text("2\n5\n")
    assert chunks_used(tmp_path) == {"total": 6, "once": 3, "more_than_once": 1, "never": 2}


def test_the_imbalance_is_zero_if_weights_come_from_updates_only():
    def row(learner, initial, updates, weights):
        sums = {"sum_initial": initial, "sum_updates": updates, "sum_weights": weights}
        return {"kind": "learner", "learner": learner} | sums

    kept = [row(0, 1.0, 2.0, 4.0), row(1, 1.0, 3.0, 3.0)]
    assert conservation(kept)["imbalance"] == 0.0
    assert conservation([*kept, row(2, 1.0, 1.0, 2.5)])["relative"] == pytest.approx(0.5 / 6.0)
    twice = [row(0, 1.0, 2.0, 3.0), row(0, 5.0, 1.0, 6.0)]  # it joined again with other weights
    assert conservation(twice)["imbalance"] == 0.0
