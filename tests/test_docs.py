"""README, docs and the pages of recipes: Python blocks run, commands are accepted or run, links lead somewhere.

Commands run in this process up to the point where they would start their work, such as learner processes. So a command that
would be refused fails the test, but nothing is trained. Some pages are run to their end, with real learners.
"""

from __future__ import annotations

import doctest
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from commands import Command

from roundelay.cli import main
from roundelay.training import recipes
from roundelay.training.task import Task

ROOT = Path(__file__).parents[1]
TOP_PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [
    *TOP_PAGES,
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(
    r"^(?:\$ )?((?:roundelay|printf) .*)$"  # in a console block; printf makes a file for a later line
    r"|^<!-- run: (roundelay .*) -->$"
    r"|`(roundelay [^`]* --[^`]*)`[.:]?(?: \|)?$",  # with options, at the end of a line
    re.MULTILINE,
)
STARTS = (  # the function with which a command, after all checks, starts its work
    "roundelay.training.supervisor.Supervisor.run",  # train
    "roundelay.cluster.launcher.Launcher.run",  # launch
    "roundelay.training.checkpoint.choose",  # train --resume
    "roundelay.training.run_directory.ticket",  # train --join RUN
    "roundelay.cluster.rendezvous.session.RendezvousSession.__init__",  # train --join HOST:PORT, launch --rendezvous
    "roundelay.simulation.recipe.SimulatedRun.run",  # simulate
    "roundelay.cli.reproduce._test_all",  # reproduce
    "roundelay.bench.throughput.run",  # bench throughput, bench stragglers
    "roundelay.bench.exchange.measure",  # bench exchange
    "roundelay.bench.overhead.measure",  # bench overhead
    "roundelay.bench.accelerator.run",  # bench accelerator
    "roundelay.bench.network.run",  # bench network
    "roundelay.bench.chaos.run_once",  # chaos
    "roundelay.simulation.fault_world.FaultWorld.run",  # chaos --simulated
    "roundelay.cluster.rendezvous.server.open_listener",  # rendezvous
    "roundelay.speech.corpora.catalogue.corpus",  # speech corpus
    "roundelay.speech.synth.generate.synth",  # speech corpus synth
)

LISTENS = re.compile(r"127\.0\.0\.1:[1-9]\d*")  # in what `rendezvous` prints
READS_RUN = "roundelay.training.run_result.RunResult.read"  # evaluate, speech transcribe, speech align


class Started(Exception):  # noqa: N818 - not an error
    """The command has passed all its checks."""


def started(*_: object, **__: object) -> None:
    raise Started


def read_run(folder: Path) -> None:
    assert (folder / "config.toml").is_file(), f"no line of the page before this one trains {folder}"
    (folder / "align").mkdir(exist_ok=True)  # as `speech align` would, for a later line that trains on these times
    (folder / "align" / "phones.ctm").touch()
    raise Started


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in BLOCK.findall(page.read_text()) if found == language]


def commands(page: Path) -> list[str]:
    """Command lines of a page. `[...]` and `...` mark a line that only explains."""
    text = page.read_text().replace("\\\n", " ")
    found = [next(filter(None, match.groups())) for match in COMMAND.finditer(text)]
    return [line for line in found if "..." not in line and "[" not in line and "--help" not in line]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_python_blocks_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": name_of(page)}
    for code in blocks(page, "python"):
        if code.lstrip().startswith(">>>"):
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            test = doctest.DocTestParser().get_doctest(code, names, name_of(page), str(page), 0)
            failed, _ = doctest.DocTestRunner(optionflags=flags).run(test, clear_globs=False)
            assert failed == 0
            names.update(test.globs)
        else:
            exec(compile(code, str(page), "exec"), names)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with the files that pages name as the reader's own."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path, dirs_exist_ok=True)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copy(ROOT / "recipes" / "tiny" / "config.toml", "my-recipe.toml")
    np.save("weights.npy", np.full((4, 4), 0.25))
    Path("cluster.graphml").write_text(GRAPHML)
    Path("shortcut.edgelist").write_text("0 1\n1 2\n2 3\n3 0\n0 2\n")
    Path("train.py").write_text("")
    Path("secret").write_text("0123456789abcdef" * 4)
    Path("out").mkdir()
    with mock.patch.dict(os.environ), mock.patch.object(sys, "path", [*sys.path]):
        yield tmp_path


GRAPHML = """<graphml xmlns="http://graphml.graphdrawing.org/xmlns"><graph edgedefault="undirected">
<node id="0"/><node id="1"/><node id="2"/><edge source="0" target="1"/><edge source="1" target="2"/></graph></graphml>"""


@pytest.fixture
def without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept that the data of a task are missing."""
    real = recipes.task_class

    def task_class(name: str) -> type[Task]:
        found = real(name)
        monkeypatch.setattr(found, "check_data", lambda settings: None)
        return found

    monkeypatch.setattr(recipes, "task_class", task_class)


def accepted(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fail if a command is refused. Absolute paths become relative to the working directory."""
    if line.startswith("printf"):
        subprocess.run(["bash", "-c", line], check=True)
        return
    words = [word.replace("SEED", "1").removeprefix("/") for word in shlex.split(line, comments=True)]
    out = words[words.index("--out") + 1] if "--out" in words else "runs/*-2*-*"
    if out.isupper() or "*" in out:  # RUN stands for a new run in each line; runs without --out are named by the second
        for old in Path().glob(out):
            shutil.rmtree(old)
    with mock.patch.object(sys, "argv", words):
        try:
            code = main(words[1:])
        except Started:
            code = 0
    assert code == 0, f"`{line}` is refused: {capsys.readouterr().err}"


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
@pytest.mark.usefixtures("folder", "without_data")
def test_commands_are_accepted(page, capsys, monkeypatch):
    for path in STARTS:
        monkeypatch.setattr(path, started)
    monkeypatch.setattr(READS_RUN, read_run)
    for line in commands(page):
        accepted(line, capsys)


@pytest.mark.parametrize("path", [*STARTS, READS_RUN])
def test_the_functions_that_start_work_exist(path):
    assert callable(pkgutil.resolve_name(path))


def test_a_command_that_would_be_refused_is_noticed(folder, capsys):
    with pytest.raises(AssertionError, match="--out"):
        accepted("roundelay train tiny --rendezvous 127.0.0.1:29400 --secret-file secret", capsys)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        "docs/getting-started.md",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("README.md", "docs/runs.md", "docs/reports.md")),
    ],
)
def test_commands_work_as_written(name, folder):
    code = "\n".join(blocks(ROOT / name, "console"))
    lines = [line.removeprefix("$ ") for line in code.splitlines()]
    lines = [
        line for line in lines if line.startswith("roundelay ") and " bench " not in line
    ]  # examples: test_examples.py
    assert lines
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for line in lines:
        ended = subprocess.run(
            ["bash", "-c", line.replace("--pause 0.05", "--pause 0")],  # only readers who kill a learner need time
            cwd=folder,
            env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ended.returncode == 0, f"`{line}` fails: {ended.stderr[-2000:]}"


@pytest.mark.timeout(300)
def test_two_terminals_stand_for_two_machines(folder):
    page = ROOT / "docs" / "getting-started.md"
    (rendezvous,) = (line for line in commands(page) if line.startswith("roundelay rendezvous "))
    (launch,) = (line for line in commands(page) if "--rendezvous" in line)
    with Command(*shlex.split(rendezvous)[1:], "--port", "0") as server:
        server.wait_for(lambda: LISTENS.search(server.said()), "address")
        address = LISTENS.search(server.said())[0]
        words = shlex.split(launch.replace("127.0.0.1:29400", address))[1:]
        with Command(*words) as one, Command(*words) as other:
            for machine in (one, other):
                said = machine.finished()
                assert "learners (0, 1, 2, 3)" in said
                assert re.search(r"mean model: accuracy (1|0\.9)", said)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith(("http", "mailto")):
            assert (page.parent / target).exists(), f"{target} is linked from {name_of(page)}"


def test_the_home_page_leads_to_every_page():
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    linked = re.findall(r"\]\(([^)#\s]+\.md)\)", (ROOT / "docs" / "index.md").read_text())
    assert pages - set(linked) == set()


def test_the_navigation_has_the_headings_and_the_order_of_the_home_page():
    home = (ROOT / "docs" / "index.md").read_text()
    wanted = re.findall(
        r"^\| \*\*(.+)\*\* \| \|$|\]\(([^)#\s]+\.md)\)", home.partition("## What do you want")[2], re.MULTILINE
    )
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].partition(": index.md\n")[2]
    found = re.findall(r"^  - (.+):$|: (\S+\.md)$", nav, re.MULTILINE)
    assert found == wanted


@pytest.mark.parametrize("page", [*TOP_PAGES, *sorted((ROOT / "docs").rglob("*.md"))], ids=name_of)
def test_a_page_begins_with_a_sentence(page):
    text = page.read_text()
    included = re.fullmatch(r"<!-- include: (\S+) -->\n", text)
    if included:
        text = (ROOT / included[1]).read_text()
    title, _, rest = text.partition("\n\n")
    assert title.startswith("# ")
    first = rest.partition("\n\n")[0]
    assert re.match(r"[A-Z`*]", first), f"{name_of(page)} begins with {first[:40]!r}"
    assert re.search(r"[.:]$|[.:] ", first.replace("\n", " ")), f"{name_of(page)} begins without a sentence"
