"""The documentation in a real browser, opened from disk: search works, formulas are set well, copies have no prompts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chromium import CHROMIUM, Page, chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium"),
]

ROOT = Path(__file__).parents[2]
FOUND = """new Promise((done) => {
  const field = document.querySelector(".md-search__input"), wait = (left) => {
    const found = [...document.querySelectorAll(".md-search-result__link")].map((each) => each.href);
    if (found.length || !left) done(found); else setTimeout(() => wait(left - 1), 100);
  };
  document.querySelector("#__search").click();
  field.focus();
  field.value = "%s";
  field.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
  field.dispatchEvent(new Event("input", { bubbles: true }));
  wait(150);
})"""
COPIED = """(() => {
  let copied = null;
  document.execCommand = () => { copied = document.activeElement.value; return true; };  // the real one needs a user's click
  document.querySelector(".language-%s [data-clipboard-target]").click();
  return copied;
})()"""
# How far a subscript reaches below its base, and how far a superscript hangs above the bottom of its base, in ems.
SCRIPTS = """(() => {
  const parts = (each) => [...each.children].map((part) => part.getBoundingClientRect());
  const em = (each) => parseFloat(getComputedStyle(each).fontSize);
  const heights = (name, above) => [...document.querySelectorAll(name)].map((each) => above(...parts(each)) / em(each));
  return {
    sub: heights("msub", (base, script) => script.bottom - base.bottom),
    sup: heights("msup", (base, script) => base.bottom - script.bottom),
  };
})()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(words, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


@pytest.fixture(scope="module")
def browser():
    with chromium() as page:
        yield page


@pytest.fixture
def tab(browser):
    """The browser's tab; the test fails if the page logged an error or asked another server for anything."""
    browser.errors.clear()
    browser.requests.clear()
    yield browser
    assert browser.errors == []
    assert all(address.startswith(("file:", "data:", "blob:")) for address in browser.requests)


@pytest.mark.parametrize(("words", "page"), [("straggler", "speed.html"), ("fMLLR", "speech.html")])
def test_search_finds_pages_of_a_site_on_disk(tab: Page, site, words, page):
    tab.open(site / "index.html")
    found = tab.evaluate(FOUND % words)
    assert any(page in address for address in found), found


def test_search_works_in_pages_of_folders_too(tab: Page, site):
    tab.open(site / "strategies" / "adpsgd.html")
    assert tab.evaluate(FOUND % "rendezvous")


@pytest.mark.parametrize(
    ("page", "language", "copied"),
    [
        ("theory.html", "console", "roundelay topology random-ring --learners 16"),
        ("plan.html", "pycon", "from roundelay.planning import Cluster, best_of_each, ranking, scaling"),
        ("training-loop.html", "diff", "import roundelay"),
    ],
)
def test_a_copy_button_copies_no_prompt_and_no_output(tab: Page, site, page, language, copied):
    tab.open(site / page)
    text = tab.evaluate(COPIED % language)
    assert text.splitlines()[0] == copied
    assert not any(line.startswith(("$", ">>>", "+")) for line in text.splitlines())


@pytest.mark.parametrize("page", ["theory.html", "strategies/local-sgd.html"])
def test_subscripts_stand_low_and_superscripts_are_not_detached(tab: Page, site, page):
    tab.open(site / page)
    assert tab.evaluate("document.fonts.load(`16px Roundelay Math`).then((found) => found.length)")
    scripts = tab.evaluate(SCRIPTS)
    assert min(scripts["sub"]) > 0.1  # 0.0 with a font that has no table for formulas
    assert max(scripts["sup"]) < 0.75  # 0.93 with such a font


@pytest.mark.parametrize("width", [1280, 390])
def test_no_page_is_wider_than_the_window(tab: Page, site, width):
    for page in sorted(site.rglob("*.html")):
        if page.name == "404.html":  # for servers: its addresses begin with /
            continue
        tab.open(page, width=width)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, page.name
