"""What charts show: the run's own numbers, lines for few learners, bands and heat maps for many."""

from __future__ import annotations

import json
import math

import pytest
from synthetic_runs import SyntheticRun

from roundelay.reports.pages import charts, curves, panels
from roundelay.reports.pages.charts import Chart, Trace
from roundelay.reports.pages.runs import Run, read_runs


@pytest.fixture
def made(tmp_path):
    """Synthetic runs, read."""

    def make(*runs: SyntheticRun) -> list[Run]:
        return read_runs([run.write(tmp_path / f"run-{number}") for number, run in enumerate(runs)])

    return make


def titled(found: list[Chart], title: str) -> Chart:
    (chart,) = [chart for chart in found if chart.title == title]
    return chart


def styled(chart: Chart, style: str) -> list[Trace]:
    return [trace for trace in chart.traces if trace["style"] == style]


def test_loss_and_other_figures_stand_over_time_and_over_samples(made):
    run = SyntheticRun(figure="wer")
    found = curves.learning(made(run))
    assert [chart.title for chart in found] == ["loss", "wer", "learning rate"]
    (curve,) = styled(titled(found, "wer"), "marked")
    seconds = list(range(0, 41, 4))
    assert curve["x"]["time"] == seconds
    assert curve["x"]["samples"] == [run.samples_seen(second) for second in seconds]
    assert curve["y"] == pytest.approx([run.figures(second)["wer"] for second in seconds], rel=1e-5)


def test_the_training_loss_is_the_mean_of_the_learners(made):
    run = SyntheticRun()
    (faint,) = styled(titled(curves.learning(made(run)), "loss"), "faint")
    times = faint["x"]["time"]
    rough = [run.figures(time)["loss"] for time in times]
    assert faint["y"] == pytest.approx(rough, rel=0.2)  # every learner's is up to 15 % off


def test_a_test_is_drawn_as_points(made, tmp_path):
    (run,) = made(SyntheticRun())
    run.add({"kind": "evaluation", "split": "test", "samples_seen": 9, "elapsed_s": 41.0, "loss": 0.5})
    (points,) = styled(titled(curves.learning([run]), "loss"), "points")
    assert points["y"] == [0.5]


def test_throughput_of_a_run_is_the_sum_over_its_living_learners(made):
    runs = made(SyntheticRun(dies={3: 20.0}))
    (curve,) = curves.speed(runs)[0].traces
    pairs = list(zip(curve["x"]["time"], curve["y"], strict=True))
    one = 32 / 0.02
    assert len(pairs) == 40
    for time, value in pairs:
        if not 20 <= time <= 22:  # its last row holds until the next one would have been due
            assert value == pytest.approx((4 if time < 20 else 3) * one, rel=0.1)


def test_few_learners_are_lines_and_many_are_bands_and_a_heat_map(made):
    few, many = made(SyntheticRun(learners=10), SyntheticRun(learners=64, dies={5: 20.0}))
    lines = titled(panels.learners(few, 0, None), "throughput")
    assert [trace["name"] for trace in lines.traces] == [f"learner {rank}" for rank in range(10)]
    assert len(lines.legend) == 10
    found = panels.learners(many, 1, None)
    assert [trace["style"] for trace in titled(found, "throughput").traces] == ["band", "band", "line"]
    (heat,) = titled(found, "throughput by learner").traces
    assert heat["y"] == list(range(64))
    assert {len(row) for row in heat["z"]} == {len(heat["x"]["time"])}
    assert heat["z"][5][0] is not None
    assert heat["z"][5][-1] is None
    assert not any(chart.traces[0].get("name") == "learner 0" for chart in found)


def test_bands_hold_the_quantiles(made):
    (run,) = made(SyntheticRun(learners=64, slow={7: 2.0}))
    whole, middle, median = titled(panels.learners(run, 0, None), "throughput").traces
    for outer_low, low, line, high, outer_high in zip(
        whole["low"], middle["low"], median["y"], middle["high"], whole["high"], strict=True
    ):
        assert outer_low <= low <= line <= high <= outer_high
    assert max(whole["low"]) < 900 < min(middle["low"])  # the slow one is in the range, not in the middle half


def test_a_step_is_split_into_compute_mix_and_wait_in_milliseconds(made):
    (run,) = made(SyntheticRun("dpsgd", slow={0: 10.0}))
    parts = {trace["name"]: trace["y"] for trace in titled(panels.learners(run, 0, None), "time of a step").traces}
    assert parts["compute"] == pytest.approx([186, 18.6, 18.6, 18.6])
    assert parts["mix"] == pytest.approx([8, 0.8, 0.8, 0.8])
    assert parts["wait"] == pytest.approx([26, 200.6, 200.6, 200.6])


def test_exchanges_are_a_matrix_with_an_empty_diagonal(made):
    (run,) = made(SyntheticRun())
    (heat,) = titled(panels.learners(run, 0, None), "exchanges").traces
    told = [track.last for track in run.learners.values()]
    assert heat["z"] == [[row.get(f"exchanges_with_{peer}") for peer in range(4)] for row in told]
    assert all(heat["z"][rank][rank] is None for rank in range(4))


def test_synchronous_runs_have_no_exchanges_and_allreduce_no_spread(made):
    dpsgd, allreduce = made(SyntheticRun("dpsgd"), SyntheticRun("allreduce"))
    assert "exchanges" not in [chart.title for chart in panels.learners(dpsgd, 0, None)]
    assert [chart.title for chart in curves.agreement([dpsgd])] == ["spread"]
    assert curves.agreement([allreduce]) == []


def test_events_are_marked_at_their_time_and_place(made):
    run = SyntheticRun(dies={1: 20.0})
    (mark,) = curves.marks(made(run))
    assert mark["text"] == "lost, learner 1"
    assert mark["x"]["time"] == 20.0
    assert mark["x"]["samples"] == pytest.approx(run.samples_seen(20), rel=0.05)


def test_panels_of_several_runs_share_an_axis(made):
    fast, slow = made(SyntheticRun(), SyntheticRun("dpsgd", slow={0: 10.0}))
    top = panels.fastest([fast, slow])
    assert top == pytest.approx(1.05 * 1600, rel=0.06)
    assert titled(panels.learners(slow, 1, top), "throughput").top == top
    assert panels.fastest([Run("empty")]) is None


def test_losses_that_are_no_numbers_leave_gaps_and_valid_json(made):
    (run,) = made(SyntheticRun())
    row = {"kind": "evaluation", "split": "valid", "samples_seen": 10**9, "elapsed_s": 50.0, "loss": math.nan}
    run.add(row)
    run.add(row | {"elapsed_s": 51.0, "loss": math.inf})
    chart = titled(curves.learning([run]), "loss")
    assert styled(chart, "marked")[0]["y"][-2:] == [None, None]
    json.loads(charts.as_script(chart.data()), parse_constant=pytest.fail)


def test_more_runs_than_colours_are_dashed(made):
    runs = made(*[SyntheticRun(learners=1, seconds=4)] * (charts.COLOURS + 1))
    last = curves.learning(runs)[0].traces[-1]
    assert last["dashed"]
    assert last["colour"] == charts.colour(0)
