"""A finished run: train on tones, decode, transcribe, align, and use the alignment."""

import json
import shutil

import numpy as np
import pytest
import soundfile

pytest.importorskip("kaldi_decoder")

from runs import run_in_threads, tiny_config
from tones import WORDS, RATE_Hz, spoken, tones_config, write_tones

from roundelay.cli import Parser, evaluate
from roundelay.cli.speech import align, transcribe
from roundelay.errors import ConfigError, DataError
from roundelay.speech.corpora.manifest import manifest
from roundelay.speech.decode import Scales
from roundelay.speech.recognise import Recogniser
from roundelay.speech.segments import read_ctm
from roundelay.speech.task import Speech
from roundelay.training.run_result import RunResult

pytestmark = pytest.mark.usefixtures("tones_cache")


def command(module, *words):
    parser = Parser()
    module.add_arguments(parser)
    return module.run(parser.parse_args([str(word) for word in words]))


def figures_of(capsys, *words):
    command(evaluate, *words, "--json")
    return json.loads(capsys.readouterr().out)


def test_a_short_run_on_tones_makes_few_errors(tones_run, capsys):
    figures = figures_of(capsys, tones_run)
    assert figures["wer"] < 0.15
    assert figures["words"] == 18
    assert figures["split"] == "test"
    errors = figures["insertions"] + figures["deletions"] + figures["substitutions"]
    assert figures["wer"] == errors / 18
    assert figures["ci95"][0] <= figures["wer"] <= figures["ci95"][1]
    assert figures["real_time_factor"] > 0
    assert figures["unknown_words"] == {}


def test_an_evaluation_writes_transcripts_errors_and_times_into_the_run(tones_run, capsys):
    figures = figures_of(capsys, tones_run)
    lines = (tones_run / "recogs-test.txt").read_text().splitlines()
    assert len(lines) == 2 * figures["utterances"] == 12
    assert (tones_run / "errs-test.txt").read_text().startswith(f"%WER {100 * figures['wer']:.2f}")
    assert set(read_ctm(tones_run / "words-test.ctm")) <= {f"test{n:03}" for n in range(6)}
    assert json.loads((tones_run / "evaluation-test.json").read_text()) == figures


def test_the_output_is_a_table_with_examples(tones_run, capsys):
    command(evaluate, tones_run, "--split", "valid")
    said = capsys.readouterr().out
    assert said.startswith("WER ")
    assert len([line for line in said.splitlines() if line.startswith("correct")]) == 3
    assert "recogs-valid.txt" in said


def test_scales_are_tuned_on_the_validation_split_once(tones_run, capsys, monkeypatch):
    figures = figures_of(capsys, tones_run)
    kept = json.loads((tones_run / "recogniser" / "scales.json").read_text())
    assert kept["scales"] == figures["scales"]
    monkeypatch.setattr("roundelay.speech.recognise.tuned", lambda *_: pytest.fail("tuned again"))
    Recogniser.of_run(RunResult.read(tones_run))


def test_a_new_network_tunes_its_scales_again(tones_run, tones_folder, tmp_path):
    moved = tmp_path / "again"
    shutil.copytree(tones_run, moved)
    (moved / "recogniser" / "scales.json").write_text("{}")
    Speech(tones_config(tones_folder).settings, seed=0).leave(moved)
    assert not (moved / "recogniser" / "scales.json").exists()


def test_likelihoods_in_several_batches_give_the_same_words(tones_run, capsys, monkeypatch):
    at_once = figures_of(capsys, tones_run)
    monkeypatch.setattr("roundelay.speech.recognise.NUMBERS_AT_ONCE", 12 * 200)
    in_batches = figures_of(capsys, tones_run)
    assert {name: in_batches[name] for name in ("wer", "words", "ci95")} == {
        name: at_once[name] for name in ("wer", "words", "ci95")
    }


def test_audio_with_another_number_of_features_than_the_network_is_refused(tones_run):
    recogniser = Recogniser.of_run(RunResult.read(tones_run))
    with pytest.raises(DataError, match="'u1' has 13 features a frame, and the network was trained on 120"):
        recogniser.recognised({"u1": np.zeros((30, 13), np.float32)})


def test_a_corpus_that_the_run_never_saw(tones_run, tmp_path, capsys):
    unseen = write_tones(tmp_path / "unseen", alignments=False, seed=7, counts={"test": 4})
    table = (unseen / "manifest.tsv").read_text()
    shutil.copy(unseen / "wav" / "test000.wav", unseen / "wav" / "odd.wav")
    (unseen / "manifest.tsv").write_text(table + "wav/gone.wav\ttest\tx\tABBA\nwav/odd.wav\ttest\tx\tXYLOPHONE\n")
    figures = figures_of(capsys, tones_run, "--corpus", unseen)
    assert figures["corpus"] == "unseen"
    assert (figures["words"], figures["unusable"]) == (14, 1)  # the word of the missing file counts as a deletion
    assert figures["deletions"] >= 1
    assert figures["problems"] == {"missing file": 1}
    assert (tones_run / "problems-unseen-test.txt").read_text().startswith("missing file: gone: ")
    assert figures["unknown_words"] == {"XYLOPHONE": 1}
    assert (tones_run / "recogs-unseen-test.txt").is_file()
    with pytest.raises(ValueError, match="no split 'valid'"):
        figures_of(capsys, tones_run, "--corpus", unseen, "--split", "valid")


def test_any_audio_file_is_transcribed_and_a_broken_one_named(tones_run, tmp_path, capsys):
    phones = ["SIL", *["C", "A", "B"], *["B", "C"], "SIL"]
    mono = spoken(phones, np.random.default_rng(5)).astype(np.float32)
    stereo = np.repeat(np.stack([mono, mono], axis=1), 2, axis=0)  # 32 kHz by holding each sample
    soundfile.write(tmp_path / "stereo.flac", stereo, 2 * RATE_Hz)
    soundfile.write(tmp_path / "mono.wav", mono, RATE_Hz)
    (tmp_path / "broken.wav").write_bytes(b"no sound")
    code = command(transcribe, tones_run, *(tmp_path / name for name in ("mono.wav", "broken.wav", "stereo.flac")))
    said = capsys.readouterr()
    assert code == 1
    assert said.out.splitlines() == [f"{tmp_path}/mono.wav: CAB BACK", f"{tmp_path}/stereo.flac: CAB BACK"]
    assert "unreadable file" in said.err


def test_transcripts_in_json_have_times(tones_run, tones_folder, capsys):
    assert command(transcribe, tones_run, tones_folder / "wav" / "test000.wav", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["text"].split() == [each["word"] for each in found["words"]]
    starts = [each["start_s"] for each in found["words"]]
    assert starts == sorted(starts)
    assert all(0.1 < each["confidence"] <= 1 for each in found["words"])


def test_digital_silence_has_no_words_and_is_named(tones_run, tmp_path, capsys):
    soundfile.write(tmp_path / "nothing.wav", np.zeros(RATE_Hz, np.float32), RATE_Hz)
    assert command(transcribe, tones_run, tmp_path / "nothing.wav") == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path}/nothing.wav: \n"
    assert "silent" in said.err


def test_words_in_white_noise_are_unknown_and_the_file_is_named(tones_run, tmp_path, capsys):
    noise = 0.1 * np.random.default_rng(0).standard_normal(2 * RATE_Hz)
    soundfile.write(tmp_path / "noise.wav", noise.astype(np.float32), RATE_Hz)
    assert command(transcribe, tones_run, tmp_path / "noise.wav", "--json") == 0
    said = capsys.readouterr()
    assert f"no speech: {tmp_path}/noise.wav" in said.err
    assert all(each["confidence"] == 0 for each in json.loads(said.out)[0]["words"])


def test_an_evaluation_tells_confusions_speakers_and_confidences(tones_run, capsys):
    figures = figures_of(capsys, tones_run)
    assert sum(each["words"] for each in figures["by_speaker"].values()) == figures["words"]
    errors = sum(figures[kind] for kind in ("substitutions", "deletions", "insertions"))
    assert sum(each["errors"] for each in figures["by_speaker"].values()) == errors
    assert sum(count for _, _, count in figures["confusions"]) == errors
    assert figures["wer_by_pass"] == [figures["wer"]], "without fMLLR one pass is enough"
    columns = [line.split() for line in (tones_run / "words-test.ctm").read_text().splitlines()]
    assert all(0 <= float(each[5]) <= 1 for each in columns)


def test_realignment_is_one_command_and_its_times_can_be_trained_on(tones_run, tones_folder, tmp_path, capsys):
    command(align, tones_run, "--out", tmp_path)
    assert "36 of 36 utterances are aligned" in capsys.readouterr().out
    given = {u.id: u.phones for u in manifest(tones_folder).utterances}
    found = read_ctm(tmp_path / "phones.ctm")
    offsets = [
        abs(a - b)
        for name, phones in found.items()
        if phones.symbols == given[name].symbols
        for a, b in zip(phones.starts_s, given[name].starts_s, strict=True)
    ]
    assert len(offsets) > 300
    assert np.median(offsets) <= 0.02
    words = read_ctm(tmp_path / "words.ctm")["train000"]
    assert " ".join(words.symbols) == manifest(tones_folder)["train000"].text
    assert tones_config(tones_folder, labels=str(tmp_path)).settings.labels == str(tmp_path)


def test_a_run_without_its_corpus_and_without_tuned_scales_uses_the_default_scales(tones_run, tmp_path, caplog):
    moved = tmp_path / "moved"
    shutil.copytree(tones_run, moved)
    (moved / "recogniser" / "scales.json").unlink(missing_ok=True)
    path = moved / "config.json"
    described = json.loads(path.read_text())
    described["settings"]["data"] = str(tmp_path / "nowhere")
    path.write_text(json.dumps(described))
    assert Recogniser.of_run(RunResult.read(moved)).scales == Scales()
    assert "using the default scales" in caplog.text


def test_a_run_can_be_moved_away_from_its_corpus(tones_run, tmp_path, capsys):
    figures_of(capsys, tones_run)
    moved = tmp_path / "moved"
    shutil.copytree(tones_run, moved)
    path = moved / "config.json"
    described = json.loads(path.read_text())
    described["settings"]["data"] = "/nowhere"
    path.write_text(json.dumps(described))
    phones = ["SIL", *["A", "B", "A"], "SIL"]
    soundfile.write(tmp_path / "a.wav", spoken(phones, np.random.default_rng(1)), RATE_Hz)
    command(transcribe, moved, tmp_path / "a.wav")
    assert set(capsys.readouterr().out.split(": ")[1].split()) <= set(WORDS)


def test_runs_of_other_tasks_are_judged_by_their_own_figures(tmp_path, capsys):
    run_in_threads(tiny_config(learners=1, strategy="allreduce", budget={"epochs": 1.0}), tmp_path / "run")
    figures = figures_of(capsys, tmp_path / "run", "--split", "test")
    kept = json.loads((tmp_path / "run" / "results.json").read_text())["test"]
    assert figures["samples"] == 247
    assert figures["accuracy"] == pytest.approx(kept["accuracy"])
    assert figures["loss"] == pytest.approx(kept["loss"], rel=1e-5)
    with pytest.raises(ConfigError, match="did you mean 'test'"):
        figures_of(capsys, tmp_path / "run", "--split", "tset")
    with pytest.raises(ConfigError, match="--corpus is for runs of speech"):
        figures_of(capsys, tmp_path / "run", "--corpus", tmp_path)
    with pytest.raises(ConfigError, match="not a run of speech recognition, but of Digits"):
        Recogniser.of_run(RunResult.read(tmp_path / "run"))


def test_a_folder_without_a_finished_run_is_refused(tmp_path, tones_run):
    with pytest.raises(ConfigError, match="holds no run"):
        RunResult.read(tmp_path)
    shutil.copy(tones_run / "config.toml", tmp_path)
    with pytest.raises(ConfigError, match="is not finished"):
        RunResult.read(tmp_path)
