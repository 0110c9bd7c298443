"""The commands of the pages run as printed. The default tests run the scripts alone, in a process with other runs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from integration_programs import DOCS, QUIET, script_of

PAGES = {"lightning": "lightning", "accelerate": "accelerate", "transformers": "peft"}  # page -> the library it needs


def commands(page: str) -> list[str]:
    """The commands of a page that start its script."""
    return re.findall(r"^\$ (.*train\.py.*)$", (DOCS / f"{page}.md").read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("page", "command"), [(page, command) for page in PAGES for command in commands(page)])
def test_the_command_of_the_page_runs_as_printed(page, command, tmp_path):
    if not importlib.util.find_spec(PAGES[page]):
        pytest.skip(f"needs {PAGES[page]}")
    (tmp_path / "train.py").write_text(script_of(page))
    programs = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = subprocess.run(
        command,
        shell=True,
        cwd=tmp_path,
        env=os.environ | QUIET | programs,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    saved = {"lightning": "lightning_logs/version_0/checkpoints/*.ckpt"}.get(page, "trained/*model.safetensors")
    assert len(list(tmp_path.glob(saved))) == 1
