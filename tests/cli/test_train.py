"""`roundelay train` and commands beside it: what is refused before anything starts or changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from roundelay.bench import speech
from roundelay.speech import prepare
from roundelay.speech.recognise import Recogniser
from roundelay.training.run_result import RunResult


def test_a_recipe_of_another_task_cannot_resume_a_run(mistake, tmp_path):
    (tmp_path / "config.toml").write_text('task = "roundelay.training.tiny:Digits"\n')
    said = mistake("train", "fashion-mnist", "--out", str(tmp_path), "--resume")
    assert "has the task roundelay.training.tiny:Digits, but 'fashion-mnist' has roundelay.vision" in said
    assert said.endswith("leave out 'fashion-mnist', or begin a new run with another --out")


def test_the_recipe_of_a_run_may_be_named_again_to_resume_it(mistake, tmp_path):
    (tmp_path / "config.toml").write_text('task = "roundelay.training.tiny:Digits"\n')
    assert "there is no complete checkpoint" in mistake("train", "tiny", "--out", str(tmp_path), "--resume")


def test_a_file_in_place_of_the_folder_for_logs_is_refused(mistake, tmp_path):
    script, file = tmp_path / "script.py", tmp_path / "file"
    script.touch()
    file.touch()
    said = mistake("launch", "--logs", str(file), str(script))
    assert said.endswith(f"cannot make the folder '{file}': File exists; choose another --logs")


def test_align_refuses_its_folder_before_it_aligns(mistake, monkeypatch, tmp_path):
    def align(corpus):
        pytest.fail("aligned before the folder was made")

    recogniser = SimpleNamespace(config=None, aligned_corpus=align)
    monkeypatch.setattr(RunResult, "read", lambda folder: None)
    monkeypatch.setattr(Recogniser, "of_run", lambda run: recogniser)
    monkeypatch.setattr(prepare, "corpus_of", lambda config: [])
    (tmp_path / "file").touch()
    assert "choose another --out" in mistake("speech", "align", str(tmp_path), "--out", str(tmp_path / "file"))


def test_bench_speech_refuses_a_folder_without_a_run_before_it_measures(mistake, monkeypatch, tmp_path):
    monkeypatch.setattr(speech, "measure", lambda *settings: pytest.fail("measured first"))
    assert "holds no run" in mistake("bench", "speech", "--run", str(tmp_path))
