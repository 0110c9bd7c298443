from __future__ import annotations

import json

import numpy as np
import pytest

from roundelay.errors import RoundelayError
from roundelay.simulation.compute import constant, frozen, lognormal, measured, slow_period, slowed, trace


def test_lognormal_times_have_the_mean_and_spread_asked_for():
    compute = lognormal(0.3, 0.2, seed=1)
    times = np.array([compute(learner, step, 0.0) for learner in range(20) for step in range(500)])
    assert times.mean() == pytest.approx(0.3, rel=0.01)  # 10,000 draws: the standard error is 0.2 %
    assert times.std() == pytest.approx(0.06, rel=0.05)


def test_times_are_a_pure_function_of_seed_learner_and_step():
    assert lognormal(1.0, 0.1, seed=3)(5, 700, 0.0) == lognormal(1.0, 0.1, seed=3)(5, 700, 9.0)
    assert lognormal(1.0, 0.1, seed=3)(5, 700, 0.0) != lognormal(1.0, 0.1, seed=4)(5, 700, 0.0)
    assert lognormal(1.0, 0.1)(0, 0, 0.0) != lognormal(1.0, 0.1)(1, 0, 0.0)


def test_only_the_slow_learners_are_slow():
    compute = slowed(constant(2.0), {1: 10.0, 3: 1.5})
    assert [compute(learner, 0, 0.0) for learner in range(4)] == [2.0, 20.0, 2.0, 3.0]


def test_a_slow_period_begins_and_ends():
    compute = slow_period(constant(1.0), learner=0, factor=5.0, begin_s=10.0, end_s=20.0)
    assert [compute(0, 0, now) for now in (9.9, 10.0, 19.9, 20.0)] == [1.0, 5.0, 5.0, 1.0]
    assert compute(1, 0, 15.0) == 1.0


def test_a_freeze_lengthens_the_step_that_is_under_way():
    compute = frozen(constant(1.0), learner=2, at_s=3.5, for_s=7.0)
    assert [compute(2, 0, now) for now in (2.0, 3.0, 4.0)] == [1.0, 8.0, 1.0]
    assert compute(0, 0, 3.0) == 1.0


def test_a_trace_repeats():
    compute = trace([[0.1, 0.2], [0.3]])
    assert [compute(0, step, 0.0) for step in range(4)] == [0.1, 0.2, 0.1, 0.2]
    assert compute(1, 7, 0.0) == 0.3


def test_an_empty_trace_is_refused_and_the_error_names_the_learner():
    with pytest.raises(RoundelayError, match="learner 1"):
        trace([[0.1], []])


def rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(learner: int, steps: int, compute_s: float) -> dict[str, object]:
    return {"kind": "learner", "learner": learner, "steps": steps, "compute_s": compute_s}


def test_measured_times_are_those_between_the_rows_of_each_learner(tmp_path):
    path = rows(
        tmp_path / "metrics.jsonl",
        row(0, 1, 0.5),  # 0.5 s in all
        row(1, 2, 0.3),  # 0.6 s
        {"kind": "evaluation", "split": "valid"},
        row(0, 3, 0.3),  # 0.9 s in all, so 0.2 s for each of steps 2 and 3
        row(0, 3, 0.4),  # the last row comes twice at the end of a run
    )
    compute = measured(path)
    assert [compute(0, step, 0.0) for step in range(3)] == pytest.approx([0.5, 0.2, 0.2])
    assert [compute(1, step, 0.0) for step in range(2)] == pytest.approx([0.3, 0.3])


def test_the_metrics_of_a_resumed_run_are_refused(tmp_path):
    path = rows(tmp_path / "metrics.jsonl", row(0, 1, 0.5), {"kind": "event", "event": "resumed"}, row(0, 2, 0.5))
    with pytest.raises(RoundelayError, match="resumed"):
        measured(path)


def test_a_learner_without_a_row_is_named_in_the_error(tmp_path):
    with pytest.raises(RoundelayError, match="learner 0"):
        measured(rows(tmp_path / "metrics.jsonl", row(1, 1, 0.5)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"kind": "learner", "learner": 0}\n', "is no metrics file of a run: KeyError: 'steps'"),
        (
            b'{"kind": "learner", "learner": null, "steps": 1, "compute_s": 1}\n',
            "is no metrics file of a run: TypeError",
        ),
        (
            b'{"kind": "learner", "learner": "x", "steps": 1, "compute_s": 1}\n',
            "is no metrics file of a run: ValueError",
        ),
        (b'{"kind": "learner", "learner": 0, "steps": 1, "compute_s": NaN}\n', "learner 0 with 1 steps of nan s"),
        (b'{"kind": "learner", "learner": 0, "steps": -3, "compute_s": 1}\n', "learner 0 with -3 steps of 1 s"),
        (b'{"kind": "learner", "learner": 9999999999, "steps": 1, "compute_s": 1}\n', "a row of learner 9999999999"),
        (b"\xff\xfe\x00", "has no row of a learner"),
        (b"garbage\n", "has no row of a learner"),
    ],
)
def test_a_file_that_is_no_metrics_file_is_refused_in_one_line(tmp_path, content, message):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(RoundelayError, match=message) as refused:
        measured(tmp_path / "metrics.jsonl")
    assert "\n" not in str(refused.value)
