"""`roundelay speech corpus`: a table or JSON; mistakes are found before any work."""

from __future__ import annotations

import json

import pytest
from sounds import noise, save

from roundelay.cli import main
from roundelay.speech.synth import generate


def run(*words):
    assert main(["speech", "corpus", *map(str, words)]) == 0


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "a.wav", noise(1.8))
    (tmp_path / "manifest.tsv").write_text("path\tsplit\ttext\na.wav\ttrain\tone two\ngone.wav\ttrain\tthree\n")
    return tmp_path


def test_the_table_has_splits_words_and_problems(folder, capsys):
    run("manifest", folder)
    out = capsys.readouterr().out
    assert "train           1         1  0.001         1      2        0" in out
    assert "3 different words, 0 phones, 16 kHz." in out
    assert "1 × missing file: gone:" in out.replace("\n", " ")
    assert max(map(len, out.splitlines())) <= 80


def test_json_has_every_figure_and_case(folder, capsys):
    run("manifest", folder, "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["splits"]["train"]["utterances"] == 1
    assert document["splits"]["train"]["unusable"] == 1
    assert document["splits"]["train"]["hours"] == pytest.approx(1.8 / 3600)
    assert document["problems"] == {"missing file": 1}
    assert len(document["cases"]) == 1
    assert document["lexicon"] is None


def test_options_reach_the_synthesiser(folder, capsys, monkeypatch):
    asked = []

    def synth(config, out, workers, progress):
        asked.append((config, out, workers))
        progress(1.0, 2.0)
        (folder / "lexicon").mkdir()
        (folder / "lexicon" / "x.dic").write_text("one W AH N\ntwo T UW\n")
        return generate.manifest(folder, "synth")

    monkeypatch.setattr(generate, "synth", synth)
    run("synth", "--hours", "0.25", "--noise", "10", "--telephone", "--out", folder, "--workers", "1", "--seed", "7")
    assert asked == [(generate.SynthConfig(0.25, 7, 10.0, telephone=True), folder, 1)]
    assert "The corpus is in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "arguments are required"),
        ("an5", "unknown value 'an5'; did you mean 'an4'?"),
        ("manifest", "needs a folder: roundelay speech corpus manifest DIR"),
        ("synth here", "takes no folder; use --out DIR"),
        ("an4 here", "takes no folder; use --data PATH"),
        ("an4 --hours 3", "--hours goes with `speech corpus synth`"),
        ("synth --data x", "--data goes with `speech corpus an4|fsdd|librispeech|switchboard`"),
        ("manifest x --allow-pipes", "--allow-pipes goes with `speech corpus kaldi`"),
        ("synth --hours much", "got 'much'"),
        ("synth --hours 0", "--hours: must be more than 0, got '0'"),
    ],
)
def test_mistakes_are_refused(mistake, words, told):
    assert told in mistake("speech", "corpus", *words.split())


def test_commands_in_a_kaldi_directory_run_only_when_allowed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ROUNDELAY_CACHE", str(tmp_path / "cache"))
    path = save(tmp_path / "a.wav", noise())
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "wav.scp").write_text(f"u1 cat {path} |\nu2 {path}\n")
    (tmp_path / "test" / "text").write_text("u1 A\nu2 B\n")
    run("kaldi", tmp_path / "test")
    assert "pipe refused" in capsys.readouterr().out
    run("kaldi", tmp_path / "test", "--allow-pipes")
    assert "No problems found." in capsys.readouterr().out


def test_quick_is_refused_for_a_corpus_that_is_generated(capsys):
    assert main(["speech", "corpus", "synth", "--quick"]) == 2
    assert "--hours 0.01" in capsys.readouterr().err
