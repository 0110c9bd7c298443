from __future__ import annotations

import json

import pytest

from roundelay.bench.fault_outcome import chunks_used, conservation, outcome, pace_after, stalled_s


def rows_of(times, learner=0):
    return [{"kind": "learner", "learner": learner, "steps": n, "elapsed_s": time} for n, time in enumerate(times)]


def test_a_stall_is_the_longest_pause_near_the_loss_beyond_the_usual_one():
    rows = rows_of([0.0, 1.0, 2.0, 3.0, 6.5, 7.5, 8.5]) + rows_of([0.0, 50.0], learner=1)
    assert stalled_s(rows, at_s=4.0, lost=1) == pytest.approx(2.5)
    assert stalled_s(rows, at_s=40.0, lost=1) == 0.0


def test_the_pace_after_a_loss_is_that_of_the_other_learners_over_their_pace_before():
    steady = [float(second) for second in range(1, 30)]
    rows = rows_of(steady) + rows_of(steady[:10], learner=1)
    assert pace_after(rows, 10.0, 10.0, lost=1) == pytest.approx(1.0)
    halved = [*steady[:10], *(10.0 + 2 * n for n in range(1, 10))]
    assert pace_after(rows_of(halved) + rows_of(steady[:10], learner=1), 10.0, 10.0, lost=1) == pytest.approx(0.5)
    assert pace_after(rows_of(steady[:12]), 10.0, 10.0, lost=1) is None


def test_the_stall_between_a_fault_and_its_discovery_is_no_part_of_the_pace_before(tmp_path):
    """One step a second, frozen at 10 s, noticed at 15 s without a step in between, then one step a second again."""
    times = [*range(1, 11), *range(16, 40)]
    rows = rows_of(times) + rows_of(range(1, 11), learner=1)
    event = {"kind": "event", "event": "dropped", "learner": 1, "reason": "silent", "elapsed_s": 15.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, event]))
    (told,) = outcome(tmp_path, [(2.0, 0), (10.0, 1)])["events"]
    assert told["pace_after"] == pytest.approx(1.0)
    assert told["stalled_s"] == pytest.approx(5.0)


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
