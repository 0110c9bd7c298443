"""Numbers over time: resumed runs, missing values, values of several learners at common times."""

from __future__ import annotations

import math

import numpy as np
import pytest

from roundelay.reports.pages.time_series import TimeSeries, common_times, downsampled, values_at


def learner(samples_seen: float, elapsed_s: float, loss: float = 1.0, rank: int = 0) -> dict[str, object]:
    return {"kind": "learner", "learner": rank, "samples_seen": samples_seen, "elapsed_s": elapsed_s, "loss": loss}


def series(*rows: dict[str, object]) -> TimeSeries:
    made = TimeSeries()
    for row in rows:
        made.add(row)
    return made


def test_a_resumed_run_removes_the_rows_after_its_checkpoint():
    resumed = series(learner(10, 1.0, 3.0), learner(20, 2.0, 2.0), learner(30, 3.0, 9.0), learner(25, 2.5, 1.0))
    assert resumed["samples_seen"].tolist() == [10, 20, 25]
    assert resumed["loss"].tolist() == [3.0, 2.0, 1.0]
    assert resumed["elapsed_s"].tolist() == [1.0, 2.0, 2.5]


def test_a_clock_that_restarted_at_zero_continues_from_the_last_row():
    resumed = series(learner(10, 1.0), learner(20, 2.0), learner(15, 0.5), learner(25, 1.5))
    assert resumed["elapsed_s"].tolist() == [1.0, 1.0, 2.0]


def test_a_missing_number_is_nan_and_a_row_without_time_or_samples_seen_is_ignored():
    some = series(
        learner(1, 1.0),
        {"samples_seen": 2, "elapsed_s": 2.0, "wer": 0.5},
        {"samples_seen": 3},
        {"samples_seen": "x", "elapsed_s": 1},
    )
    assert len(some) == 2
    assert math.isnan(some["loss"][1])
    assert math.isnan(some["wer"][0])
    assert "nothing" not in some
    assert np.isnan(some["nothing"]).all()


def test_downsampled_values_keep_the_mean():
    values = np.arange(1000.0)
    assert len(downsampled(values, 100)) == 100
    assert downsampled(values, 100).mean() == pytest.approx(values.mean())


def test_the_values_of_a_dead_learner_end_when_its_next_row_would_have_been_due():
    alive = series(*(learner(k, float(k), 1.0) for k in range(11)))
    dead = series(*(learner(k, float(k), 2.0) for k in range(6)))
    times = common_times([alive, dead])
    assert times.tolist() == list(range(11))
    values = values_at([alive, dead], "loss", times)
    assert values[0].tolist() == [1.0] * 11
    assert values[1][:7].tolist() == [2.0] * 7
    assert np.isnan(values[1][7:]).all()


def test_every_learner_of_a_very_short_run_has_a_value_from_its_single_row():
    once = [series(learner(10, 1.0 + 0.01 * rank, 1.0, rank)) for rank in range(4)]
    assert values_at(once, "loss", common_times(once)).tolist() == [[1.0]] * 4


def test_the_throughput_of_all_learners_does_not_fall_with_the_last_rows_which_have_no_speed():
    def with_speed(first_s: float, *, stopped_at: int | None = None) -> TimeSeries:
        rows = [learner(k, first_s + k) | {"samples_per_s": 5.0} for k in range(9)]
        for last in (8, stopped_at):
            if last is not None:
                del rows[last]["samples_per_s"]
        return series(*rows)

    learners = [with_speed(0.0), with_speed(0.4), with_speed(0.7, stopped_at=3)]
    total = np.nansum(values_at(learners, "samples_per_s", common_times(learners)), axis=0)
    assert total.tolist() == [15.0] * 9


def test_a_learner_without_figures_for_several_rows_has_none_there():
    """As the loss of a learner whose steps were skipped, because they were not finite."""
    rows = [learner(k, float(k)) for k in range(6)]
    for row in rows[3:5]:
        del row["loss"]
    values = values_at([series(*rows)], "loss", np.arange(6.0))[0]
    assert np.isnan(values).tolist() == [False, False, False, True, True, False]
