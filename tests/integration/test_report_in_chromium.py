"""Reports in a real browser open without an error, draw their charts, and react to the reader's choices."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from chromium import CHROMIUM, Page, chromium
from synthetic_runs import SyntheticRun

from roundelay.reports.pages import write_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium"),
]

EVIL = """<img src=x onerror='alert("1")'><a href='javascript:alert(2)'>a</a>"""
# Charts are drawn when they come near the screen: scroll to each, and wait for it.
SCROLL = """(async () => {
  for (const plot of document.querySelectorAll(".plot")) {
    plot.scrollIntoView({ behavior: "instant" });
    for (let left = 100; left && !plot.querySelector(".main-svg"); left--) await new Promise((done) => setTimeout(done, 20));
  }
  scrollTo(0, 0);
})()"""
TICKS = "[...document.querySelectorAll('.ytick text')].map(each => each.textContent)"
# Elements that go on beyond the right edge of the screen, and are in nothing that scrolls with a shadow at its edge.
CUT_OFF = """[...document.querySelectorAll("body *")].filter((each) => {
  const box = each.getBoundingClientRect();
  if (box.right <= innerWidth + 1 || !box.width || !box.height || each.closest(".main-svg, .plot")) return false;
  for (let inside = each.parentElement; inside; inside = inside.parentElement) {
    const style = getComputedStyle(inside), scrolls = style.overflowX === "auto" && inside.scrollWidth > inside.clientWidth;
    if (scrolls && style.backgroundAttachment.includes("local")) return false;
  }
  return true;
}).map((each) => each.outerHTML.slice(0, 80))"""
DRAWN = "[...document.querySelectorAll('.plot')].map(each => each.querySelectorAll('.main-svg').length > 0)"
TITLES = "[...new Set([...document.querySelectorAll('.curves .xtitle')].map(each => each.textContent))]"
TRACES = "[...document.querySelectorAll('.curves .scatterlayer .trace')].length"


@pytest.fixture(scope="module")
def browser():
    """One browser for all tests of this file."""
    with chromium() as page:
        yield page


@pytest.fixture
def tab(browser):
    """The browser's tab; the test fails if the page logged an error or loaded anything."""
    browser.errors.clear()
    browser.requests.clear()
    yield browser
    browser.evaluate("new Promise(done => setTimeout(done, 200))")  # until its log messages have arrived
    assert browser.errors == []
    assert all(address.startswith(("file:", "data:", "blob:")) for address in browser.requests)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three strategies with a straggler; one run lost a learner, one is not finished."""
    root = tmp_path_factory.mktemp("three")
    runs = [
        SyntheticRun(slow={0: 10.0}).write(root / "adpsgd"),
        SyntheticRun("dpsgd", slow={0: 10.0}, dies={2: 30.0}).write(root / "dpsgd"),
        SyntheticRun("allreduce", slow={0: 10.0}, finished=False).write(root / "allreduce"),
    ]
    write_report(runs, root / "report.html")
    return root / "report.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_chart_is_drawn_in_every_scheme_and_width(tab: Page, three, scheme, width):
    tab.open(three, width=width, scheme=scheme)
    tab.evaluate(SCROLL)
    drawn = tab.evaluate(DRAWN)
    assert len(drawn) == 13  # 3 of learning, 1 of speed, 3 + 2 + 2 of learners, 2 of agreement
    assert all(drawn)
    assert tab.evaluate(TRACES) > 20
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(CUT_OFF) == []
    bright = tab.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (min(bright) > 200) if scheme == "light" else (max(bright) < 60)


def test_the_reader_chooses_the_x_axis(tab: Page, three):
    tab.open(three)
    tab.evaluate(SCROLL)
    assert tab.evaluate(TITLES) == ["time (s)"]
    tab.evaluate("document.querySelector('.axis input[value=samples]').click()")
    assert tab.evaluate(TITLES) == ["samples"]


def test_the_reader_hides_a_run_and_chooses_a_logarithmic_loss(tab: Page, three):
    tab.open(three)
    tab.evaluate(SCROLL)
    before = tab.evaluate(TRACES)
    tab.evaluate("document.querySelector('.runs input[value=\"1\"]').click()")
    assert tab.evaluate(TRACES) < before
    assert tab.evaluate("document.querySelector('.run[data-run=\"1\"]').offsetHeight") == 0
    tab.evaluate("document.querySelector('.runs input[value=\"1\"]').click()")
    assert tab.evaluate(TRACES) == before
    tab.evaluate("document.querySelector('.log input').click()")
    assert tab.evaluate("document.querySelector('.plot').layout.yaxis.type") == "log"


def test_a_comparison_at_a_small_loss_begins_with_a_logarithmic_axis(tab: Page, tmp_path):
    runs = [SyntheticRun(name, slow={0: 2.0}).write(tmp_path / name) for name in ("adpsgd", "allreduce")]
    write_report(runs, tmp_path / "report.html")
    tab.open(tmp_path / "report.html")
    tab.evaluate(SCROLL)
    assert tab.evaluate("document.querySelector('.plot').layout.yaxis.type") == "log"
    assert tab.evaluate("document.querySelector('.log input').checked")
    assert {"0.1", "0.2", "0.5"} <= set(tab.evaluate(TICKS))
    level = tab.evaluate("document.querySelector('.plot').layout.shapes[0].y0")
    assert tab.evaluate("document.querySelector('.plot')._fullLayout.yaxis.range.map(each => 10 ** each)[0]") <= level


def test_charts_follow_a_change_of_the_colour_scheme(tab: Page, three):
    tab.open(three, scheme="light")
    tab.evaluate(SCROLL)
    line = "document.querySelector('.plot .scatterlayer .js-line').style.stroke"
    light = tab.evaluate(line)
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert tab.evaluate(f"new Promise(done => setTimeout(() => done({line}), 500))") != light


def test_only_differing_settings_are_shown_until_the_reader_asks_for_all(tab: Page, three):
    tab.open(three)
    rows = "[...document.querySelectorAll('#configuration tbody tr')].filter(each => each.offsetHeight).length"
    assert tab.evaluate(rows) == 1
    tab.evaluate("document.querySelector('#configuration .only input').click()")
    assert tab.evaluate(rows) > 10


def test_a_report_can_be_printed(tab: Page, three, tmp_path):
    tab.open(three, scheme="dark")
    tab.print(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    assert not tab.evaluate("document.documentElement.classList.contains('printing')")


def test_sixty_four_learners_are_bands_and_a_heat_map(tab: Page, tmp_path):
    run = SyntheticRun(learners=64, slow={5: 3.0}, dies={9: 20.0}).write(tmp_path / "big")
    write_report([run], tmp_path / "report.html")
    tab.open(tmp_path / "report.html")
    tab.evaluate(SCROLL)
    assert all(tab.evaluate(DRAWN))
    assert tab.evaluate("document.querySelectorAll('.plot .hm').length") == 2
    assert (
        tab.evaluate("document.querySelectorAll('.run .scatterlayer .trace').length") == 6
    )  # two bands, a line and marks


def test_ten_thousand_rows_of_64_learners_open_within_a_second(tab: Page, tmp_path):
    run = SyntheticRun(learners=64, slow={5: 3.0}, dies={9: 20.0}, seconds=160).write(tmp_path / "big")
    assert len((run / "metrics.jsonl").read_text().splitlines()) > 10_000
    write_report([run], tmp_path / "report.html")
    assert min(seconds_to_open(tab, tmp_path / "report.html") for _ in range(3)) < 1.0
    assert tab.evaluate(DRAWN)[0]


def seconds_to_open(tab: Page, page: Path) -> float:
    """Time of the page's thread on a core until what is on the screen is drawn: other processes may use the cores, too."""
    tab.call("Performance.enable", timeDomain="threadTicks")
    tab.open(page)
    tab.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    figures = {each["name"]: each["value"] for each in tab.call("Performance.getMetrics")["metrics"]}
    tab.call("Performance.disable")
    assert figures["TaskDuration"] > 0.05
    return float(figures["TaskDuration"])


def test_small_numbers_are_written_with_an_exponent_and_large_ones_with_all_digits(tab: Page, tmp_path):
    run = SyntheticRun().write(tmp_path / "a")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row | ({"lr": 7.7e-4 * (1 + row["elapsed_s"] / 100)} if "lr" in row else {}) for row in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report([run], tmp_path / "report.html")
    tab.open(tmp_path / "report.html")
    tab.evaluate(SCROLL)
    ticks = tab.evaluate(TICKS)
    assert any(re.fullmatch(r"\d(\.\d+)?e[−-]4|0\.000\d+", tick) for tick in ticks), ticks
    assert "1,000" in ticks
    assert not any(re.search("[µmkMG]", tick) for tick in ticks), ticks


def test_ticks_of_ten_thousand_and_more_have_all_digits(tab: Page, tmp_path):
    write_report([SyntheticRun(step_s=0.005).write(tmp_path / "a")], tmp_path / "report.html")
    tab.open(tmp_path / "report.html")
    tab.evaluate("document.querySelector('.axis input[value=samples]').click()")
    tab.evaluate(SCROLL)
    ticks = tab.evaluate("[...document.querySelectorAll('.xtick text, .ytick text')].map(each => each.textContent)")
    assert any(len(tick) > len("9,999") and tick.replace(",", "").isdigit() for tick in ticks), ticks
    assert not any("e" in tick for tick in ticks), ticks


def test_faults_are_marked_on_the_time_axis(tab: Page, three):
    tab.open(three)
    tab.evaluate(SCROLL)
    points = "document.querySelector('.plot').data.at(-1)"
    assert tab.evaluate(f"{points}.x") == [30]
    assert tab.evaluate(f"{points}.text") == ["lost, learner 2"]


def test_an_empty_run_has_a_page(tab: Page, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    write_report([tmp_path / "empty"], tmp_path / "report.html")
    tab.open(tmp_path / "report.html")
    assert "No figures yet." in tab.evaluate("document.body.textContent")


def test_strings_from_files_never_run_and_never_become_elements(tab: Page, tmp_path):
    folders = [SyntheticRun().write(tmp_path / name) for name in (EVIL.replace("/", "∕"), "b")]
    with (folders[0] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "event", "event": EVIL, "elapsed_s": 20.0, "reason": EVIL}) + "\n")
        row = {"kind": "evaluation", "split": EVIL, "samples_seen": 10**6, "elapsed_s": 20.0, EVIL: 1.0, "loss": 1.0}
        file.write(json.dumps(row) + "\n")
    write_report(folders, tmp_path / "report.html")
    tab.open(tmp_path / "report.html")
    tab.evaluate(SCROLL)
    tab.evaluate("document.querySelectorAll('.plot').forEach(each => Plotly.Fx.hover(each, {xval: 20}))")
    hovered = tab.evaluate("[...document.querySelectorAll('.hoverlayer')].map(each => each.textContent).join()")
    assert "onerror" in hovered
    assert tab.evaluate("document.querySelectorAll('img[src=x], a[href^=javascript], .hoverlayer a').length") == 0
