"""The scripts in benchmarks/: each tells its options, and the commands that they start are accepted."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from roundelay.cli import main

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text())


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_tells_its_options(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}")


def test_train_accepts_every_case_of_the_comparison_on_speech(capsys):
    compared = runpy.run_path(str(BENCHMARKS / "speech_strategies.py"))
    for case in compared["CASES"]:
        words = ["train", "an4", *case.arguments, *compared["SETTINGS"], "--slow", "0:10", "--show-config"]
        assert main(words) == 0, f"{case.name}: {capsys.readouterr().err}"
