"""The page of a report is complete and self-contained, shows the run's numbers, and is safe whatever the files contain."""

from __future__ import annotations

import json
import re

import pytest
from html_pages import HtmlPage
from synthetic_runs import MACHINE, SyntheticRun

from roundelay.errors import MissingExtraError, UsageError
from roundelay.reports.pages import page, write_report
from roundelay.reports.pages.formats import figure
from roundelay.reports.pages.tables import _best
from roundelay.training.config_table import to_toml

EVIL = """</script><script>alert(1)</script><img src=x onerror='alert("2")'>&amp;"""

SECTIONS = ["Results", "Learning", "Speed", "Agreement", "Events", "Topology", "Configuration", "Machine"]
CHARTS = ["loss", "accuracy", "learning rate", "throughput", "time of a step", "exchanges", "spread", "staleness"]


@pytest.fixture(autouse=True)
def without_plotly(monkeypatch):
    """Leave out five megabytes that only the test in a browser needs."""
    monkeypatch.setattr(page, "plotly", lambda: "/* plotly */")


@pytest.fixture
def report(tmp_path):
    """The parsed page about some runs."""

    def make(*folders) -> HtmlPage:
        write_report(folders, tmp_path / "report.html")
        return HtmlPage((tmp_path / "report.html").read_text())

    return make


def table_with(parsed: HtmlPage, head: str) -> list[dict[str, str]]:
    """The rows of the first table that has such a column."""
    rows = next(rows for rows in parsed.tables if head in rows[0])
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def sides(rows: list[list[str]]) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in rows}


def test_the_sections_have_a_fixed_order_and_a_link_each(report, tmp_path):
    parsed = report(SyntheticRun(dies={1: 20.0}).write(tmp_path / "a"))
    assert parsed.titles == SECTIONS
    links = [said["href"] for tag, said in parsed.elements if tag == "a"]
    ids = {said["id"] for tag, said in parsed.elements if tag == "section"}
    assert links == [f"#{title.lower()}" for title in parsed.titles]
    assert {link[1:] for link in links} == ids


def test_the_results_are_the_numbers_of_the_run(report, tmp_path):
    run = SyntheticRun()
    expected = run.results()
    parsed = report(run.write(tmp_path / "a"))
    (row,) = table_with(parsed, "strategy")
    assert row["run"] == "a"
    assert row["strategy"] == "adpsgd"
    assert row["state"] == "finished"
    assert row["samples"] == f"{expected['samples']:,}"
    shown = [float(said["data-value"]) for tag, said in parsed.elements if tag == "td" and "data-value" in said]
    figures = [expected[split][name] for split in ("valid", "test") for name in ("loss", "accuracy")]
    for value in [4, 40.0, expected["samples"], expected["samples"] / 40, *figures]:
        assert value in shown
    assert float(row["test loss"]) == pytest.approx(expected["test"]["loss"], rel=1e-3)


def test_runs_whose_figures_look_equal_are_marked_together():
    assert _best([0.115412, 0.115413, 0.2], "loss") == figure(0.115413)


def test_the_best_run_is_marked_only_for_figures_whose_direction_is_known(report, tmp_path):
    better = SyntheticRun(figure="wer").write(tmp_path / "a")
    worse = SyntheticRun("dpsgd", slow={0: 10.0}, figure="wer").write(tmp_path / "b")
    (better / "results.json").write_text(json.dumps({"finished": True, "valid": {"loss": 1.0, "wer": 0.1, "odd": 3.0}}))
    (worse / "results.json").write_text(json.dumps({"finished": True, "valid": {"loss": 2.0, "wer": 0.2, "odd": 4.0}}))
    parsed = report(better, worse)
    best = [said["data-value"] for tag, said in parsed.elements if "best" in said.get("class", "").split()]
    assert best[1:] == ["1.0", "0.1"]  # after the time to the same loss


def test_the_page_loads_nothing(report, tmp_path):
    parsed = report(SyntheticRun().write(tmp_path / "a"), SyntheticRun("allreduce").write(tmp_path / "b"))
    assert parsed.addresses
    assert all(address.startswith(("#", "data:")) for address in parsed.addresses)
    style = re.search(r"<style>(.*?)</style>", (tmp_path / "report.html").read_text(), re.DOTALL)
    assert style is not None
    assert "url(" not in style[1]
    assert "@import" not in style[1]


def test_the_page_contains_plotly_once(report, tmp_path):
    parsed = report(SyntheticRun().write(tmp_path / "a"))
    assert [text for _, text in parsed.scripts].count("/* plotly */") == 1


def test_every_chart_has_an_element_a_label_and_data(report, tmp_path):
    parsed = report(SyntheticRun().write(tmp_path / "a"))
    places = [said for tag, said in parsed.elements if said.get("class") == "plot"]
    assert [int(said["data-chart"]) for said in places] == list(range(len(parsed.report["charts"])))
    titles = [said["aria-label"].partition(".")[0] for said in places]
    assert titles == CHARTS


def test_strings_from_files_never_become_markup(report, tmp_path):
    run = SyntheticRun()
    folder = run.write(tmp_path / EVIL.replace("/", "∕"))
    config = to_toml(run.config() | {"topology": EVIL})
    (folder / "config.toml").write_text(f"{json.dumps(EVIL)} = 1\n{config}")
    (folder / "machine.json").write_text(json.dumps(MACHINE | {"command": EVIL, EVIL: EVIL}))
    (folder / "results.json").write_text(json.dumps({"finished": True, "valid": {EVIL: 1.0}}))
    with (folder / "metrics.jsonl").open("a") as file:
        event = {"kind": "event", "event": EVIL, "learner": EVIL, "elapsed_s": 3.0, "reason": EVIL}
        row = {"kind": "evaluation", "split": EVIL, "samples_seen": 1, "elapsed_s": 1.0, EVIL: 2.0}
        file.write(json.dumps(event) + "\n" + json.dumps(row) + "\n")
    parsed = report(folder)
    assert len(parsed.scripts) == 3
    assert not [said for tag, said in parsed.elements if "onerror" in said or said.get("src") == "x"]
    assert EVIL in parsed.text
    assert parsed.report["marks"][0]["text"] == f"{EVIL}, learner {EVIL}"


def test_what_differs_between_runs_is_marked(report, tmp_path):
    parsed = report(SyntheticRun().write(tmp_path / "a"), SyntheticRun("dpsgd").write(tmp_path / "b"))
    configuration = next(rows for rows in parsed.tables if rows[0] == ["", "a", "b"])
    assert sides(configuration)["strategy"] == ["adpsgd", "dpsgd"]
    assert sides(configuration)["data.batch"] == ["32", "32"]
    assert [said.get("class") for tag, said in parsed.elements if tag == "tr"].count("differs") == 1
    machine = next(rows for rows in parsed.tables if rows[0] == ["", "all runs"])
    assert sides(machine)["cpu"] == [MACHINE["cpu"]]


def test_a_key_that_only_one_run_has_differs(report, tmp_path):
    parsed = report(*(SyntheticRun().write(tmp_path / name) for name in "ab"))
    assert "differs" not in [said.get("class") for _, said in parsed.elements]
    (tmp_path / "b" / "config.toml").write_text(to_toml(SyntheticRun().config() | {"extra": True}))
    configuration = next(rows for rows in report(tmp_path / "a", tmp_path / "b").tables if rows[0] == ["", "a", "b"])
    assert sides(configuration)["extra"] == ["–", "true"]


def test_each_topology_is_drawn_once_and_named_by_its_runs(report, tmp_path):
    parsed = report(
        SyntheticRun().write(tmp_path / "a"),
        SyntheticRun("dpsgd").write(tmp_path / "b"),
        SyntheticRun("allreduce").write(tmp_path / "c"),
    )
    pictures = [said["alt"] for tag, said in parsed.elements if tag == "img"]
    assert pictures == ["random-ring of 4"]
    assert "a, b" in parsed.text
    assert "with allreduce all learners average with all others" in parsed.text


@pytest.mark.parametrize(
    ("changed", "explained"),
    [
        ({"topology": "spider"}, "unknown topology"),
        ({"learners": 1000}, "at most 256 learners, got 1000"),
        ({"group_size": 0}, "random-ring between machines"),
        ({"group_size": "two"}, "Not drawn"),
        ({"group_size": 2}, "a super-learner of 2 learners"),
    ],
)
def test_a_topology_that_cannot_be_drawn_is_explained(report, tmp_path, changed, explained):
    folder = SyntheticRun().write(tmp_path / "a")
    (folder / "config.toml").write_text(to_toml(SyntheticRun().config() | changed))
    assert explained in report(folder).text


def test_a_run_under_way_shows_its_last_evaluation_and_its_progress(report, tmp_path):
    run = SyntheticRun(finished=False)
    folder = run.write(tmp_path / "a")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) | {"total": 2 * run.samples_seen(40)} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + lines[-1][:40])
    (row,) = table_with(report(folder), "strategy")
    assert row["state"] == "not finished: 50% of its budget, last row after 40.0 s"
    assert float(row["valid loss"]) == pytest.approx(run.figures(40)["loss"], rel=1e-3)
    assert "test loss" not in row


@pytest.mark.parametrize("left", ["config.toml", "metrics.jsonl"])
def test_an_almost_empty_run_has_a_page(report, tmp_path, left):
    whole = SyntheticRun().write(tmp_path / "whole")
    (tmp_path / "a").mkdir()
    content = (whole / left).read_text() if left == "config.toml" else ""
    (tmp_path / "a" / left).write_text(content)
    parsed = report(tmp_path / "a")
    assert "no figures yet" in parsed.text
    assert "No figures yet." in parsed.text
    assert parsed.report["charts"] == []


def test_a_dead_learner_is_in_the_events_and_in_the_table_of_learners(report, tmp_path):
    parsed = report(SyntheticRun(dies={2: 20.0}).write(tmp_path / "a"))
    (event,) = table_with(parsed, "reason")
    assert (event["event"], event["learner"], event["reason"]) == ("lost", "2", "no heartbeat for 5 s")
    learners = table_with(parsed, "last row")
    assert [row["last event"] for row in learners] == ["", "", "lost", ""]
    assert [row["last row"] for row in learners] == ["40.0 s", "40.0 s", "20.0 s", "40.0 s"]
    assert [row["steps"] for row in learners] == ["2,000", "2,000", "1,000", "2,000"]


def test_long_tables_are_cut_and_say_so(report, tmp_path):
    run = SyntheticRun(learners=260, seconds=2, dies=dict.fromkeys(range(257), 1.0), strategy="dpsgd")
    parsed = report(run.write(tmp_path / "a"))
    assert "and 4 more learners" in parsed.text
    assert "and 1 more events" in parsed.text
    (mark,) = parsed.report["marks"]
    assert mark["text"].endswith("lost, learner 5; and 251 more")


def test_the_title_is_the_run_or_the_number_of_runs(report, tmp_path):
    one = SyntheticRun(learners=1).write(tmp_path / "a")
    assert "Digits, adpsgd, one learner: finished" in report(one).text
    assert "2 runs" in report(one, SyntheticRun().write(tmp_path / "b")).text


@pytest.mark.parametrize(("seconds", "unit"), [(100, "s"), (600, "min"), (20_000, "h")])
def test_the_unit_of_time_follows_the_length_of_the_run(report, tmp_path, seconds, unit):
    folder = tmp_path / "a"
    folder.mkdir()
    row = {"kind": "evaluation", "split": "valid", "samples_seen": 10, "elapsed_s": seconds, "loss": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert report(folder).report["unit"] == unit


def test_a_page_that_cannot_be_written_is_a_usage_error(tmp_path):
    folder = SyntheticRun().write(tmp_path / "a")
    with pytest.raises(UsageError, match=r"cannot write .*directory"):
        write_report([folder], tmp_path)


def test_without_plotly_the_extra_is_named(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    with pytest.raises(MissingExtraError, match=r"roundelay\[plots\]"):
        page.plotly()


def test_a_page_that_compares_runs_begins_with_the_sentence_that_matters_and_one_chart(report, tmp_path):
    slow = SyntheticRun("allreduce", slow={0: 10.0}, seconds=120)
    parsed = report(slow.write(tmp_path / "allreduce"), SyntheticRun(slow={0: 10.0}).write(tmp_path / "adpsgd"))
    loss = slow.figures(120)["loss"]
    sentence = f"allreduce 2 min 0 s, adpsgd 16.0 s to the same validation loss ({loss:.4g})."
    assert parsed.text.index(sentence) < parsed.text.index("Results")
    first = parsed.report["charts"][0]
    assert first["level"] == pytest.approx(loss, rel=1e-5)
    assert [trace["label"] for trace in first["traces"] if trace["style"] == "marked"] == ["allreduce", "adpsgd"]
    titles = [said["aria-label"].partition(".")[0] for _, said in parsed.elements if said.get("class") == "plot"]
    assert titles.count("loss") == 1
    assert titles[0] == "loss"
    rows = table_with(parsed, f"time to loss {loss:.4g}")
    assert [row[f"time to loss {loss:.4g}"] for row in rows] == ["2 min 0 s", "16.0 s"]


def test_a_simulated_run_is_marked_everywhere(report, tmp_path):
    runs = [SyntheticRun(strategy, simulated=True) for strategy in ("dpsgd", "adpsgd")]
    parsed = report(*(run.write(tmp_path / run.strategy) for run in runs))
    named = parsed.text.count("adpsgd (simulated)")
    assert named == parsed.text.count("adpsgd") - sum(
        text == "adpsgd" for rows in parsed.tables for row in rows for text in row
    )
    assert named >= 5  # sentence, choice of runs, results, learners, configuration
    labels = {trace["label"] for chart in parsed.report["charts"] for trace in chart["traces"] if "label" in trace}
    assert labels == {"dpsgd (simulated)", "adpsgd (simulated)"}
    assert parsed.report["time"] == "virtual time"


def test_a_simulated_run_beside_a_real_one_is_the_only_one_marked(report, tmp_path):
    parsed = report(SyntheticRun().write(tmp_path / "a"), SyntheticRun(simulated=True).write(tmp_path / "b"))
    assert "a (simulated)" not in parsed.text
    assert "b (simulated)" in parsed.text
    assert parsed.report["time"] == "time"


def test_one_hue_stands_for_one_run_and_everything_else_has_none(report, tmp_path):
    parsed = report(*(SyntheticRun(strategy).write(tmp_path / strategy) for strategy in ("dpsgd", "adpsgd")))
    for chart in parsed.report["charts"]:
        for trace in chart["traces"]:
            assert trace.get("colour") in ({f"c{trace['run']}"} if "run" in trace else {None, "compute", "mix", "wait"})
    style = re.search(r"<style>(.*?)</style>", (tmp_path / "report.html").read_text(), re.DOTALL)[1]
    colours = re.findall(r"--(\w+): #(\w{2})(\w{2})(\w{2});", style)
    hues = {
        name
        for name, *parts in colours
        if max(int(each, 16) for each in parts) - min(int(each, 16) for each in parts) > 24
    }
    assert hues == {f"c{number}" for number in range(10)}


def test_the_matrix_of_exchanges_says_which_learner_called_which(report, tmp_path):
    parsed = report(SyntheticRun().write(tmp_path / "a"))
    (matrix,) = [chart for chart in parsed.report["charts"] if chart["kind"] == "matrix"]
    assert (matrix["y"], matrix["x"]) == ("calling learner", "called learner")


def test_a_text_that_the_model_has_written_is_shown(report, tmp_path):
    folder = SyntheticRun().write(tmp_path / "a")
    results = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps(results | {"sample": "To be,\nor <b>not</b>"}))
    parsed = report(folder)
    assert "Sample" in parsed.titles
    assert "To be,\nor &lt;b&gt;not&lt;/b&gt;" in (tmp_path / "report.html").read_text()
