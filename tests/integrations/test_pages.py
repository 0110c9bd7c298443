"""The complete scripts of the pages run as written, with two learners."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"lightning": "lightning", "accelerate": "accelerate", "transformers": "peft"}  # page -> the library it needs


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PAGES)
def test_the_script_of_the_page_runs_as_written(page, tmp_path):
    if not importlib.util.find_spec(PAGES[page]):
        pytest.skip(f"needs {PAGES[page]}")
    (script,) = re.findall(r"^```py\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
