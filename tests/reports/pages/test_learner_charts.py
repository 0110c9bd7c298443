"""Charts of the learners of one run: lines for few learners, bands and heat maps for many."""

from __future__ import annotations

import pytest
from synthetic_runs import SyntheticRun

from roundelay.reports.pages.charts import Chart
from roundelay.reports.pages.learner_charts import learner_charts, throughput_top
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


def test_few_learners_are_lines_and_many_are_bands_and_a_heat_map(read):
    few, many = read(SyntheticRun(learners=10), SyntheticRun(learners=64, dies={5: 20.0}))
    lines = titled(learner_charts(few, 0, None), "throughput")
    assert [trace["name"] for trace in lines.traces] == [f"learner {rank}" for rank in range(10)]
    assert len(lines.legend) == 10
    found = learner_charts(many, 1, None)
    assert [trace["style"] for trace in titled(found, "throughput").traces] == ["band", "band", "line"]
    (heat,) = titled(found, "throughput by learner").traces
    assert heat["y"] == list(range(64))
    assert {len(row) for row in heat["z"]} == {len(heat["x"]["time"])}
    assert heat["z"][5][0] is not None
    assert heat["z"][5][-1] is None
    assert not any(chart.traces[0].get("name") == "learner 0" for chart in found)


def test_bands_contain_the_quantiles(read):
    (run,) = read(SyntheticRun(learners=64, slow={7: 2.0}))
    whole, middle, median = titled(learner_charts(run, 0, None), "throughput").traces
    for outer_low, low, line, high, outer_high in zip(
        whole["low"], middle["low"], median["y"], middle["high"], whole["high"], strict=True
    ):
        assert outer_low <= low <= line <= high <= outer_high
    assert max(whole["low"]) < 900 < min(middle["low"])  # the slow learner is in the range, not in the middle half


def test_a_step_is_split_into_compute_mix_and_wait_in_milliseconds(read):
    (run,) = read(SyntheticRun("dpsgd", slow={0: 10.0}))
    parts = {trace["name"]: trace["y"] for trace in titled(learner_charts(run, 0, None), "time of a step").traces}
    assert parts["compute"] == pytest.approx([186, 18.6, 18.6, 18.6])
    assert parts["mix"] == pytest.approx([8, 0.8, 0.8, 0.8])
    assert parts["wait"] == pytest.approx([26, 200.6, 200.6, 200.6])


def test_exchanges_are_a_matrix_with_an_empty_diagonal(read):
    (run,) = read(SyntheticRun())
    (heat,) = titled(learner_charts(run, 0, None), "exchanges").traces
    last = [series.last for series in run.learners.values()]
    assert heat["z"] == [[row.get(f"exchanges_with_{peer}") for peer in range(4)] for row in last]
    assert all(heat["z"][rank][rank] is None for rank in range(4))


def test_the_throughput_charts_of_several_runs_share_an_axis(read):
    fast, slow = read(SyntheticRun(), SyntheticRun("dpsgd", slow={0: 10.0}))
    top = throughput_top([fast, slow])
    assert top == pytest.approx(1.05 * 1600, rel=0.06)
    assert titled(learner_charts(slow, 1, top), "throughput").top == top
    assert throughput_top([Run("empty")]) is None


def test_synchronous_runs_have_no_chart_of_exchanges(read):
    (dpsgd,) = read(SyntheticRun("dpsgd"))
    assert "exchanges" not in [chart.title for chart in learner_charts(dpsgd, 0, None)]
