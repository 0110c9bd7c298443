"""What README and docs show is run: Python blocks, command lines, and the links between the pages."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest

from roundelay.cli import COMMANDS, build_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in BLOCK.findall(page.read_text()) if found == language]


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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_command_lines_are_understood(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    lines = [line.removeprefix("$ ") for code in blocks(page, "console") for line in code.splitlines()]
    for line in lines:
        words = shlex.split(line, comments=True) if line.startswith("roundelay ") else []
        if words and words[1] in COMMANDS and "--help" not in words:
            build_parser().parse_args(words[1:])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_pictures_are_there(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith(("http", "mailto")):
            assert (page.parent / target).exists(), f"{target} is linked from {name_of(page)}"
