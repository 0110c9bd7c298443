"""The summary of a corpus."""

from __future__ import annotations

import numpy as np
import pytest
from sounds import cut_off, noise, save, tone

from roundelay.speech.corpora.manifest import manifest
from roundelay.speech.corpus import Corpus, Utterance
from roundelay.speech.describe import SplitSummary, summary


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "a.wav", noise(1.0))
    save(tmp_path / "b.wav", noise(2.0, 8000), 8000)
    save(tmp_path / "loud.wav", np.clip(tone(level=4.0, seconds=3.0), -1, 1))
    cut_off(save(tmp_path / "short.flac", noise(4.0)))
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "align").mkdir()
    (tmp_path / "align" / "phones.ctm").write_text("a 1 0.1 0.5 W\na 1 0.6 0.2 Q\n")
    (tmp_path / "lexicon").mkdir()
    (tmp_path / "lexicon" / "words.dic").write_text("one W AH N\ntwo T UW\n")
    (tmp_path / "manifest.tsv").write_text(
        "path\tsplit\tspeaker\ttext\n"
        "a.wav\ttrain\tann\tone two\n"
        "b.wav\ttrain\tbob\tone\n"
        "loud.wav\ttest\teve\tthree three four\n"
        "short.flac\ttest\teve\ttwo\n"
        "empty.wav\ttest\teve\tone\n"
        "gone.wav\ttest\teve\tone\n"
    )
    return tmp_path


def test_every_figure_of_a_small_corpus(folder):
    found = summary(manifest(folder, "small"))
    assert found.splits["train"] == SplitSummary(2, 0, pytest.approx(3 / 3600), 2, 3, 1)
    test = found.splits["test"]
    assert (test.utterances, test.unusable, test.speakers, test.words, test.aligned) == (2, 2, 1, 4, 0)
    assert 3.5 < test.hours * 3600 < 6
    assert found.vocabulary == 4
    assert found.phones == ("AH", "N", "Q", "SIL", "T", "UW", "W")
    assert found.unknown_words == {"three": 2, "four": 1}
    assert found.rates_Hz == {8000: 1, 16000: 3}
    assert found.problems == {
        "not aligned": 5,
        "missing file": 1,
        "clipped": 1,
        "truncated": 1,
        "empty file": 1,
        "phone outside the lexicon": 1,
    }
    assert "phone outside the lexicon: Q" in found.cases
    assert len(found.cases) == sum(found.problems.values())


def test_without_a_lexicon_words_that_are_not_in_training_are_unknown(tmp_path):
    save(tmp_path / "a.wav", noise(1.0))
    rows = "a.wav\ttrain\tone two\n", "a.wav\ttest\tone zebra zebra\n"
    (tmp_path / "manifest.tsv").write_text(
        "id\tpath\tsplit\ttext\n" + "".join(f"{i}\t{row}" for i, row in enumerate(rows))
    )
    assert summary(manifest(tmp_path)).unknown_words == {"zebra": 2}


def test_headers_alone_give_the_lengths(folder):
    found = summary(manifest(folder), quick=True)
    assert found.splits["train"].hours == pytest.approx(3 / 3600)
    assert "clipped" not in found.problems


def test_describing_leaves_the_corpus_as_it_was(folder):
    corpus = manifest(folder)
    before = list(corpus.problems.cases)
    summary(corpus)
    assert corpus.problems.cases == before


def test_progress_counts_utterances(folder):
    seen = []
    summary(manifest(folder), progress=lambda done, of: seen.append((done, of)))
    assert seen == [(n, 6) for n in range(1, 7)]


def test_a_corpus_of_features_has_the_length_of_its_frames():
    class Source:
        def __call__(self, utterance):
            return np.zeros((360, 13), np.float32)

        def fingerprint(self):
            return ""

    found = summary(Corpus("arks", (Utterance("u", None, "s", "A", "train"),), frames=Source()))
    assert found.splits["train"].hours == pytest.approx(0.001)
