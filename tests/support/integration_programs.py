"""Starts the programs of tests/integrations with several processes, and reads what each of them saw."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PROGRAMS = Path(__file__).parents[1] / "integrations" / "programs"
DOCS = Path(__file__).parents[2] / "docs"
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}


def run(*command: object, timeout: float = 250, **settings: Any) -> subprocess.CompletedProcess[str]:
    """A Python process, which must end well."""
    environment = os.environ | QUIET | settings.pop("env", {})
    ended = subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **settings,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended


def torchrun(program: str, folder: Path, *, learners: int = 2, page: str = "", **settings: Any) -> list[dict[str, Any]]:
    """What each process of the program has saved to `folder`. The script of the page is there as train.py."""
    if page:
        (folder / "train.py").write_text(script_of(page))
    run("-m", "torch.distributed.run", "--nproc-per-node", learners, PROGRAMS / program, folder, **settings)
    return what_each_saw(folder, learners)


def what_each_saw(folder: Path, learners: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"saw {rank}.pt", weights_only=True) for rank in range(learners)]


def script_of(page: str) -> str:
    """The complete script of a page of the documentation."""
    (script,) = re.findall(r"^```py\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    return script
