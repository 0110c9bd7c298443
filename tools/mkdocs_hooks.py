"""Hooks of MkDocs: formulas become MathML, and pages show what commands print at build time.

* `$...$` and `$$...$$`, in pages and in docstrings, become MathML, so the site needs no script for them.
* A line `<!-- run: roundelay topology ring --learners 16 -->` becomes the command with its output, so that no figure on
  the site is out of date. A command that fails breaks the build.
* A line `<!-- commands -->` becomes the help of every command.
* A line `<!-- include: CHANGELOG.md -->` becomes that file, with its links changed to work from docs/.
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
WIDTH = {"COLUMNS": "78", "NO_COLOR": "1"}


def on_page_markdown(markdown: str, **_: Any) -> str:  # noqa: ANN401 - MkDocs passes page, config and files
    """Expand the lines `include`, `commands` and `run` of a page."""
    markdown = INCLUDE.sub(lambda found: _included(ROOT / found[1]), markdown)
    markdown = COMMANDS.sub(lambda found: _help(), markdown)
    return RUN.sub(lambda found: _console(found[1]), markdown)


def on_page_content(content: str, **_: Any) -> str:  # noqa: ANN401
    """Replace the formulas of a page by MathML."""
    content = DISPLAY.sub(lambda found: _mathml(found[1], "block"), content)
    return INLINE.sub(lambda found: _mathml(found[1], "inline"), content)


def _included(path: Path) -> str:
    text = path.read_text(encoding="utf-8").replace("](docs/", "](")
    return re.sub(r"\]\(([A-Z]+\.md)", lambda link: link[0].lower(), text)


def _mathml(latex: str, display: str) -> str:
    return str(convert(html.unescape(latex).strip(), display=display))


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
