"""Charts that compare runs show the runs' own numbers."""

from __future__ import annotations

import json
import math

import pytest
from synthetic_runs import SyntheticRun

from roundelay.reports.pages import charts, run_charts
from roundelay.reports.pages.charts import Chart, Trace
from roundelay.reports.pages.read_runs import read_runs
from roundelay.reports.pages.run import Run


@pytest.fixture
def read(tmp_path):
    """Write synthetic runs and read them."""

    def make(*runs: SyntheticRun) -> list[Run]:
        return read_runs([run.write(tmp_path / f"run-{number}") for number, run in enumerate(runs)])

    return make


def titled(found: list[Chart], title: str) -> Chart:
    (chart,) = [chart for chart in found if chart.title == title]
    return chart


def styled(chart: Chart, style: str) -> list[Trace]:
    return [trace for trace in chart.traces if trace["style"] == style]


def test_loss_and_other_figures_have_time_and_samples_as_x(read):
    run = SyntheticRun(figure="wer")
    found = run_charts.learning(read(run))
    assert [chart.title for chart in found] == ["loss", "wer", "learning rate"]
    (curve,) = styled(titled(found, "wer"), "marked")
    seconds = list(range(0, 41, 4))
    assert curve["x"]["time"] == seconds
    assert curve["x"]["samples"] == [run.samples_seen(second) for second in seconds]
    assert curve["y"] == pytest.approx([run.figures(second)["wer"] for second in seconds], rel=1e-5)


def test_the_training_loss_is_the_mean_of_the_learners(read):
    run = SyntheticRun()
    (faint,) = styled(titled(run_charts.learning(read(run)), "loss"), "faint")
    times = faint["x"]["time"]
    rough = [run.figures(time)["loss"] for time in times]
    assert faint["y"] == pytest.approx(rough, rel=0.2)  # the loss of each learner is up to 15 % off


def test_figures_of_the_test_split_are_drawn_as_points(read):
    (run,) = read(SyntheticRun())
    run.add({"kind": "evaluation", "split": "test", "samples_seen": 9, "elapsed_s": 41.0, "loss": 0.5})
    (points,) = styled(titled(run_charts.learning([run]), "loss"), "points")
    assert points["y"] == [0.5]


def test_throughput_of_a_run_is_the_sum_over_its_living_learners(read):
    runs = read(SyntheticRun(dies={3: 20.0}))
    (curve,) = run_charts.speed(runs)[0].traces
    pairs = list(zip(curve["x"]["time"], curve["y"], strict=True))
    one = 32 / 0.02
    assert len(pairs) == 40
    for time, value in pairs:
        if not 20 <= time <= 22:  # the last row of learner 3 counts until its next row would have been due
            assert value == pytest.approx((4 if time < 20 else 3) * one, rel=0.1)


def test_events_are_marked_at_their_time_and_samples_seen(read):
    run = SyntheticRun(dies={1: 20.0})
    (mark,) = run_charts.marks(read(run))
    assert mark["text"] == "lost, learner 1"
    assert mark["x"]["time"] == 20.0
    assert mark["x"]["samples"] == pytest.approx(run.samples_seen(20), rel=0.05)


def test_many_events_share_marks(read):
    (run,) = read(SyntheticRun())
    for second in range(200):
        run.add({"kind": "event", "event": "lost", "learner": second % 4, "elapsed_s": second / 5})
    marks = run_charts.marks([run])
    assert 20 < len(marks) <= run_charts.MOST_MARKS + 1
    assert marks[0]["text"] == "lost, learner 0; lost, learner 1; lost, learner 2; lost, learner 3; lost, learner 0"
    assert [mark["x"]["time"] for mark in marks] == sorted(mark["x"]["time"] for mark in marks)


def test_non_finite_losses_leave_gaps_and_valid_json(read):
    (run,) = read(SyntheticRun())
    row = {"kind": "evaluation", "split": "valid", "samples_seen": 10**9, "elapsed_s": 50.0, "loss": math.nan}
    run.add(row)
    run.add(row | {"elapsed_s": 51.0, "loss": math.inf})
    chart = titled(run_charts.learning([run]), "loss")
    assert styled(chart, "marked")[0]["y"][-2:] == [None, None]
    json.loads(charts.as_script(chart.data()), parse_constant=pytest.fail)


def test_more_runs_than_colours_are_dashed(read):
    runs = read(*[SyntheticRun(learners=1, seconds=4)] * (charts.COLOURS + 1))
    last = run_charts.learning(runs)[0].traces[-1]
    assert last["dashed"]
    assert last["colour"] == charts.colour(0)


def test_agreement_is_a_chart_of_spread_for_dpsgd_and_none_for_allreduce(read):
    dpsgd, allreduce = read(SyntheticRun("dpsgd"), SyntheticRun("allreduce"))
    assert [chart.title for chart in run_charts.agreement([dpsgd])] == ["spread"]
    assert run_charts.agreement([allreduce]) == []
