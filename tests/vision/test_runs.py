"""Whole runs on images, with unreadable files."""

from __future__ import annotations

import json

import pytest
from runs import run_in_threads

from roundelay.cli import main
from roundelay.training.recipes import resolve, table_of

SMALL = {
    "learners": "2",
    "settings.model": "resnet18",
    "settings.image_size": "32",
    "data.batch": "4",
    "data.workers": "0",
    "budget.epochs": "2",
    "schedule.warmup_epochs": "1",
}


@pytest.mark.parametrize("strategy", ["adpsgd", pytest.param("allreduce", marks=pytest.mark.slow)])
def test_a_miniature_imagenet_trains_and_its_damaged_files_are_reported(imagenet, tmp_path, strategy, caplog, capsys):
    folder = tmp_path / "run"
    settings = SMALL | {"settings.data": str(imagenet), "strategy": strategy}
    run_in_threads(resolve(table_of("imagenet"), settings.items()), folder)
    results = json.loads((folder / "results.json").read_text())
    assert results["test"]["unreadable"] == pytest.approx(1 / 17), "one of 18 pictures for validation"
    assert "of 37 training images could not be read and were replaced" in caplog.text
    assert main(["evaluate", str(folder), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["samples"] == 17
    assert figures["top5"] == 1.0, "of three classes"
    assert {name: figures[name] for name in ("top1", "loss")} == pytest.approx(
        {name: results["test"][name] for name in ("top1", "loss")}, rel=1e-4
    )
