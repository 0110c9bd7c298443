"""The result of a run is read again, and a damaged file is one clear line."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from roundelay.cli import main
from roundelay.training import run_directory
from roundelay.training.recipes import resolve, table_of, task_of
from roundelay.training.run_result import RunResult, write_result


@pytest.fixture
def run(tmp_path):
    config = resolve(table_of("tiny"), [("settings.hidden", "8"), ("seed", "3")])
    task = task_of(config)
    run_directory.begin(tmp_path / "run", config, "a test")
    write_result(tmp_path / "run", config, task, task.module(), {"elapsed_s": 1.0})
    return tmp_path / "run"


def test_the_same_model_comes_back(run):
    result = RunResult.read(run)
    first, again = result.task().module(), result.with_weights(result.task().module())
    assert result.settings.hidden == 8
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert json.loads((run / "results.json").read_text()) == {"finished": True, "elapsed_s": 1.0}


DAMAGES = {
    "config.json": [b"", b"{", b"\xff\xfe", b"[]", b"{}", b'{"task": 3, "settings": 5, "seed": 0}', b'"x"'],
    "model.safetensors": [b"", b"\x00" * 100, b"{}"],
}


@pytest.mark.parametrize(("name", "content"), [(name, each) for name, every in DAMAGES.items() for each in every])
def test_a_damaged_file_is_named_in_one_line(run, capsys, name, content):
    (run / name).write_bytes(content)
    assert main(["evaluate", str(run)]) == 2
    said = capsys.readouterr().err
    assert f"{name}' is damaged (" in said
    assert said.count("\n") == 1


def test_the_weights_of_another_model_are_named_in_one_line(run, capsys):
    save_file({"weight": torch.zeros(3)}, run / "model.safetensors")
    assert main(["evaluate", str(run)]) == 2
    said = capsys.readouterr().err
    assert "model.safetensors' is damaged (RuntimeError: Error(s) in loading state_dict for Sequential)" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "value", "message"), [("task", "x", "task must be"), ("settings", {"a": 1}, "unknown key")]
)
def test_a_task_or_a_setting_that_is_not_there_is_named(run, capsys, key, value, message):
    described = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(described | {key: value}))
    assert main(["evaluate", str(run)]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_run_and_a_run_that_is_not_finished(run, tmp_path, capsys):
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "holds no run: there is no config.toml" in capsys.readouterr().err
    (run / "model.safetensors").unlink()
    assert main(["evaluate", str(run)]) == 2
    assert f"is not finished; go on with it: roundelay train --out {run} --resume" in capsys.readouterr().err
