"""Hooks of MkDocs: formulas become MathML, and pages show what commands print at build time.

* `$...$` and `$$...$$`, in pages and in docstrings, become MathML, so the site needs no script for them.
* A line `<!-- run: roundelay topology ring --learners 16 -->` becomes the command with its output, so that no figure on
  the site is out of date. A command that fails breaks the build.
* A line `<!-- commands -->` becomes the help of every command.
* A line `<!-- include: CHANGELOG.md -->` becomes that file, with its links changed to work from docs/.
* The copy button of a block copies what a reader would run: no prompts, no output, no comments, no marks of a diff.
"""

from __future__ import annotations

import contextlib
import html
import io
import os
import re
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

from latex2mathml.converter import convert

from roundelay.cli import all_commands, build_parser, main

ROOT = Path(__file__).parents[1]
INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)
COMMANDS = re.compile(r"^<!-- commands -->$", re.MULTILINE)
RUN = re.compile(r"^<!-- run: roundelay (.*) -->$", re.MULTILINE)
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
DISPLAY = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
DOCTEST = re.compile(r"^```python\n(?=>>> )", re.MULTILINE)
BLOCK = re.compile(r'<div class="language-(console|pycon|diff) highlight">(?=<pre>(.*?)</pre>)', re.DOTALL)
WIDTH = {"COLUMNS": "78", "NO_COLOR": "1"}


def on_page_markdown(markdown: str, **_: Any) -> str:  # noqa: ANN401 - MkDocs passes page, config and files
    """Expand the lines `include`, `commands` and `run` of a page."""
    markdown = INCLUDE.sub(lambda found: _included(ROOT / found[1]), markdown)
    markdown = COMMANDS.sub(lambda found: _help(), markdown)
    markdown = RUN.sub(lambda found: _console(found[1]), markdown)
    return DOCTEST.sub("```pycon\n", markdown)


def on_page_content(content: str, **_: Any) -> str:  # noqa: ANN401
    """Replace the formulas of a page by MathML, and say what copy buttons copy."""
    content = BLOCK.sub(_with_copy, content)
    content = DISPLAY.sub(lambda found: _mathml(found[1], "block"), content)
    return INLINE.sub(lambda found: _mathml(found[1], "inline"), content)


def _included(path: Path) -> str:
    text = path.read_text(encoding="utf-8").replace("](docs/", "](")
    return re.sub(r"\]\(([A-Z]+\.md)", lambda link: link[0].lower(), text)


def _mathml(latex: str, display: str) -> str:
    return str(convert(html.unescape(latex).strip(), display=display))


def _with_copy(found: re.Match[str]) -> str:
    shown = html.unescape(re.sub("<[^>]*>", "", found[2]))
    lines = shown.rstrip("\n").split("\n")
    copied = html.escape("\n".join(COPIED[found[1]](lines)))
    return f'<div class="language-{found[1]} highlight" data-copy="{copied}">'


def _typed(lines: list[str]) -> list[str]:
    """The commands of a console block, with continued lines and without comments, because zsh does not ignore them."""
    typed: list[str] = []
    continued = False
    for line in lines:
        if continued or line.startswith("$ "):
            typed.append(re.sub(r"\s+#\s.*", "", line.removeprefix("$ ")))
            continued = line.endswith("\\")
    return typed or lines


def _statements(lines: list[str]) -> list[str]:
    return [line[4:] for line in lines if line.startswith((">>>", "..."))]


def _after_change(lines: list[str]) -> list[str]:
    return [line[1:] for line in lines if not line.startswith("-")]


COPIED = {"console": _typed, "pycon": _statements, "diff": _after_change}


def _help() -> str:
    with mock.patch.dict(os.environ, WIDTH):
        return "\n".join(
            f"## {name}\n\n```text\n{parser.format_help().rstrip()}\n```\n"
            for name, parser in all_commands(build_parser()).items()
        )


def _console(words: str) -> str:
    printed = io.StringIO()
    with mock.patch.dict(os.environ, WIDTH), contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        code = main(shlex.split(words))
        if code:
            raise RuntimeError(f"`roundelay {words}` ended with exit code {code}")
    lines = "\n".join(line.rstrip() for line in printed.getvalue().rstrip().splitlines())
    return f"```console\n$ roundelay {words}\n{lines}\n```"
