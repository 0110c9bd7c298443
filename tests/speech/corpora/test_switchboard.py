"""A miniature of the LDC's files in the real formats: µ-law sphere audio, transcripts, stm, glm."""

from __future__ import annotations

import numpy as np
import pytest
from runs import run_in_threads
from sounds import cut_off, save, tone

from roundelay.errors import DataError
from roundelay.speech.audio import utterance_audio
from roundelay.speech.corpora.switchboard import reference, switchboard, transcript
from roundelay.speech.describe import summary
from roundelay.speech.evaluation import evaluate_run
from roundelay.speech.features import FeatureConfig, speaker_features
from roundelay.speech.lexicon import Lexicon
from roundelay.training.recipes import resolve, table_of

pytest.importorskip("lhotse", reason="Switchboard needs the extra 'switchboard'")

LOW_Hz, HIGH_Hz = 300, 1200  # the two sides of a call
STM = """\
;; LUR "O" "Overall" "all speech"
;; CATEGORY "0" "" ""
en_4156 A en_4156_A 0.50 1.50 <O,en,F,en-F> (%hesitation) oh yeah
en_4156 B en_4156_B 1.00 2.00 <O,en,M,en-M> { alright / all right } then
sw_4390 A sw_4390_A 0.25 1.25 <O,sw,M,sw-M> i think so
sw_4390 B sw_4390_B 1.25 1.75 <O,sw,F,sw-F> IGNORE_TIME_SEGMENT_IN_SCORING
sw_4999 A sw_4999_A 0.00 1.00 <O,sw,F,sw-F> nobody has this call
broken line
"""


def call(path, seconds=3.0):
    sides = np.stack([tone(LOW_Hz, seconds, 8000), tone(HIGH_Hz, seconds, 8000)], axis=1)
    return save(path, sides, 8000, "ULAW")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.setenv("ROUNDELAY_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "switchboard"
    for number in (2001, 2002, 2003):
        call(root / "LDC97S62" / "swb1d1" / "data" / f"sw0{number}.sph")
        folder = root / "swb_ms98_transcriptions" / "20" / str(number)
        folder.mkdir(parents=True)
        for side in "AB":
            name = f"sw{number}{side}-ms98-a"
            (folder / f"{name}-trans.text").write_text(
                f"{name}-0001 0.000000 0.500000 [silence]\n"
                f"{name}-0002 0.500000 1.500000 Hi um [laughter-yeah] I- th[at]- about_1\n"
                f"{name}-0003 1.500000 2.000000 [noise] [laughter]\n"
                f"{name}-0004 2.000000 3.500000 longer than the call\n"
            )
    (root / "swb_ms98_transcriptions" / "sw-ms98-dict.text").write_text(
        "# the dictionary\n\nabout ax b aw t\nYeah y ae\nabout_1 ax b aw\nth[at]- dh\n[laughter-yeah] y ae\n[noise] spn\n"
    )
    for name in ("sw_4390", "en_4156"):
        call(root / "LDC2002S09" / "hub5e_00" / "english" / f"{name}.sph")
    references = root / "LDC2002T43" / "reference"
    references.mkdir(parents=True)
    (references / "hub5e00.english.000405.stm").write_text(STM)
    (references / "en20000405_hub5.glm").write_text(";; rules\n[uh] => %hesitation / [ ] __ [ ]\n")
    return root


def test_training_speech_has_words_times_and_the_speaker_of_its_channel(tree):
    corpus = switchboard(tree)
    utterances = [*corpus.split("train"), *corpus.split("valid")]
    assert len(utterances) == 6
    for utterance in utterances:
        side = utterance.id[6]
        assert utterance.text == "hi um yeah i- th- about"
        assert utterance.speaker == f"sw0{utterance.id[2:6]}-{side}"
        assert (utterance.start_s, utterance.duration_s, utterance.channel) == (0.5, 1.0, "AB".index(side))
    assert {utterance.id[2:6] for utterance in corpus.split("valid")} == {"2002"}


def test_the_lexicon_has_the_words_that_the_transcripts_have(tree):
    lexicon = Lexicon.read(switchboard(tree).lexicon)
    assert lexicon.words == ("about", "th-", "yeah")
    assert lexicon["about"] == (("ax", "b", "aw", "t"), ("ax", "b", "aw"))


@pytest.mark.parametrize(("side", "pitch_Hz"), [("A", LOW_Hz), ("B", HIGH_Hz)])
def test_the_audio_is_that_of_the_speakers_side(tree, side, pitch_Hz):
    corpus = switchboard(tree)
    audio = utterance_audio(corpus[f"sw2001{side}-ms98-a-0002"])
    assert (audio.rate_Hz, len(audio.samples)) == (8000, 8000)
    spectrum = np.abs(np.fft.rfft(audio.samples))
    assert abs(np.argmax(spectrum) - pitch_Hz) <= 1


def test_hub5_comes_from_the_stm(tree):
    corpus = switchboard(tree)
    test = corpus.split("test")
    assert [(utt.id, utt.speaker, utt.text, utt.channel) for utt in test] == [
        ("en_4156-A-0000050-0000150", "en_4156_A", "oh yeah", 0),
        ("en_4156-B-0000100-0000200", "en_4156_B", "alright then", 1),
        ("sw_4390-A-0000025-0000125", "sw_4390_A", "i think so", 0),
        ("sw_4999-A-0000000-0000100", "sw_4999_A", "nobody has this call", 0),
    ]
    assert corpus.stm.name == "hub5e00.english.000405.stm"
    assert corpus.glm.name == "en20000405_hub5.glm"
    assert len(speaker_features(test, FeatureConfig(rate_Hz=8000)).ids) == 3


def test_utterances_that_are_left_out_are_counted(tree):
    assert switchboard(tree).problems.counts() == {
        "no words": 6,
        "beyond the end": 6,
        "bad line": 1,
    }
    assert summary(switchboard(tree)).problems["missing file"] == 1


def test_a_call_without_transcript_and_a_broken_call_lose_nothing_else(tree):
    next(tree.rglob("sw2001B-ms98-a-trans.text")).unlink()
    (tree / "LDC97S62/swb1d1/data/sw02003.sph").write_text("this is no audio")
    corpus = switchboard(tree)
    counts = corpus.problems.counts()
    assert counts["no transcript"] == 1
    assert counts["unreadable call"] == 2
    assert {utterance.id[:7] for utterance in corpus.split("train")} == {"sw2001A"}


def test_a_truncated_call_ends_where_its_audio_ends(tree):
    cut_off(tree / "LDC97S62/swb1d1/data/sw02001.sph", 0.3)
    corpus = switchboard(tree)
    assert not [utterance for utterance in corpus.utterances if utterance.id.startswith("sw2001")]


def test_one_of_the_two_corpora_is_enough(tree, tmp_path):
    only_test = tree / "LDC2002S09"
    (only_test / "hub5.stm").write_text(STM)
    assert switchboard(only_test).splits == ("test",)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has neither calls"):
        switchboard(tmp_path / "empty")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("[vocalized-noise] uh-huh", "uh-huh"),
        ("[laughter-i'm] [laughter]", "i'm"),
        ("[laughter-th[at]-]", "th-"),
        ("-[o]kay", "-kay"),
        ("them_1", "them"),
        ("<b_aside> hold on <e_aside>", "hold on"),
        ("{alrighty}", "alrighty"),
        ("[silence]", ""),
    ],
)
def test_transcripts_are_normalised(said, words):
    assert transcript(said) == words


@pytest.mark.parametrize(
    ("written", "words"),
    [("{ a / b } { c / @ }", "a c"), ("%hesitation (%hesitation)", "%hesitation"), ("{ @ / well } UH-HUH", "uh-huh")],
)
def test_references_are_normalised(written, words):
    assert reference(written) == words


def test_the_recipe_runs_from_the_ldcs_files_to_hub5_figures(tree, tmp_path):
    lexicon = {"hi": "h ay", "um": "ah m", "yeah": "y ae", "i-": "ay", "th-": "dh", "about": "ax b aw t"}
    dictionary = tree / "swb_ms98_transcriptions" / "sw-ms98-dict.text"
    dictionary.write_text("".join(f"{word} {phones}\n" for word, phones in lexicon.items()))
    small = {
        "settings.model.layers": 1,
        "settings.model.width": 8,
        "settings.model.bottleneck": 4,
        "settings.states": 60,
    }
    here = {"settings.data": tree, "learners": 2, "data.batch": 4, "data.workers": 0}
    config = resolve(table_of("switchboard"), [(key, str(value)) for key, value in (small | here).items()])
    run_in_threads(config, tmp_path / "run")
    figures = evaluate_run(tmp_path / "run", "test")
    assert (figures["words"], figures["unusable"]) == (11, 1)
    assert sum(figures["unknown_words"].values()) == 10  # of what the stm has, only yeah is in this lexicon
    assert figures["problems"]["missing file"] == 1
    assert set(figures["parts"]) == {"switchboard", "callhome"}
    assert set(figures["hub5"]) in ({"error"}, {"switchboard", "callhome", "all"})
