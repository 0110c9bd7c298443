"""The hooks of MkDocs expand pages as their module says."""

from __future__ import annotations

import html
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from roundelay.cli import COMMANDS
from roundelay.cli.bench import SUMMARIES

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("latex2mathml")
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", TOOLS / "mkdocs_hooks.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mkdocs_hooks", module)
    spec.loader.exec_module(module)
    return module


def test_formulas_become_mathml(hooks):
    page = hooks.on_page_content('a <span class="arithmatex">\\(n &lt; 3\\)</span> b')
    assert page.startswith("a <math")
    assert page.endswith("</math> b")
    assert "arithmatex" not in page
    assert 'display="block"' in hooks.on_page_content('<div class="arithmatex">\\[x^2\\]</div>')


def test_a_command_is_shown_with_its_output(hooks):
    page = hooks.on_page_markdown("before\n<!-- run: roundelay topology ring --learners 16 -->\nafter")
    assert "```console\n$ roundelay topology ring --learners 16\nring, 16 learners\n" in page
    assert "0.05075" in page


def test_a_command_that_fails_breaks_the_build(hooks, capsys):
    with pytest.raises(RuntimeError, match="exit code 2"):
        hooks.on_page_markdown("<!-- run: roundelay topology rnig --learners 16 -->")
    assert "did you mean 'ring'" in capsys.readouterr().err


def test_the_command_reference_has_every_command(hooks):
    page = hooks.on_page_markdown("<!-- commands -->")
    for command in COMMANDS:
        assert re.search(rf"^## {command}", page, re.MULTILINE)
    for command in ("chaos", "launch", "rendezvous", *(f"bench {name}" for name in SUMMARIES)):
        assert f"## {command}\n\n```text\nusage: roundelay {command} " in page


@pytest.mark.parametrize(
    ("language", "shown", "copied"),
    [
        ("console", "$ roundelay train tiny   # four learners\nepoch 1\n", "roundelay train tiny"),
        ("console", "$ a --b \\\n    --c '#1'\nsays &lt;c&gt;\n$ d\n", "a --b \\\n    --c '#1'\nd"),
        ("console", "no prompt, so it is copied as it is\n", "no prompt, so it is copied as it is"),
        ("pycon", "&gt;&gt;&gt; for x in y:\n...     x\n3\n", "for x in y:\n    x"),
        ("diff", "+import roundelay\n-old()\n kept()\n", "import roundelay\nkept()"),
    ],
)
def test_copy_buttons_copy_what_a_reader_would_run(hooks, language, shown, copied):
    code = f'<pre><span></span><code><span class="gp">{shown}</span></code></pre>'
    block = f'<div class="language-{language} highlight">{code}</div>'
    found = re.search(r'data-copy="([^"]*)"', hooks.on_page_content(block))
    assert html.unescape(found[1]) == copied


def test_doctests_are_console_sessions_so_their_prompts_are_not_copied(hooks):
    assert hooks.on_page_markdown("```python\n>>> 1\n1\n```") == "```pycon\n>>> 1\n1\n```"
    assert hooks.on_page_markdown("```python\nx = 1\n```") == "```python\nx = 1\n```"


def test_links_of_included_files_work_from_docs(hooks):
    page = hooks.on_page_markdown("<!-- include: CONTRIBUTING.md -->")
    assert "](concepts.md)" in page
    assert "](architecture.md)" in page
