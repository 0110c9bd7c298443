"""LibriSpeech in a miniature of its folders."""

import pytest
from sounds import noise, save

from roundelay.errors import DataError
from roundelay.speech.corpora.catalogue import corpus
from roundelay.speech.corpora.librispeech import librispeech
from roundelay.speech.prepare import lexicon_of


@pytest.fixture
def folder(tmp_path):
    """Two utterances of one chapter in each of four parts."""
    root = tmp_path / "LibriSpeech"
    for number, part in enumerate(("train-clean-100", "train-other-500", "dev-clean", "test-other")):
        chapter = root / part / f"{number}" / "55"
        names = [f"{number}-55-000{i}" for i in range(2)]
        for name in names:
            save(chapter / f"{name}.flac", noise(0.3, 16000), 16000)
        (chapter / f"{number}-55.trans.txt").write_text(f"{names[0]} A MAN SAID\n{names[1]} THE END\n")
    return root


def test_parts_are_splits_and_the_first_number_is_the_speaker(folder):
    found = librispeech(folder)
    assert found.splits == ("train", "valid", "test-other")
    assert [(u.id, u.speaker, u.text) for u in found.split("valid")] == [
        ("2-55-0000", "2", "A MAN SAID"),
        ("2-55-0001", "2", "THE END"),
    ]
    assert len(found.split("train")) == 4
    assert all(utterance.audio.is_file() for utterance in found.utterances)


def test_the_folder_above_and_the_name_work_too(folder, monkeypatch):
    assert len(librispeech(folder.parent)) == 8
    monkeypatch.setenv("ROUNDELAY_DATA", str(folder.parent))
    assert len(corpus("librispeech")) == 8


def test_the_lexicon_is_the_users_or_the_letters(folder):
    assert lexicon_of(librispeech(folder))["MAN"] == (("M", "A", "N"),)
    (folder / "librispeech-lexicon.txt").write_text("MAN M AE1 N\nA AH0\nSAID S EH1 D\nTHE DH AH0\nEND EH1 N D\n")
    assert lexicon_of(librispeech(folder))["MAN"] == (("M", "AE1", "N"),)


def test_a_line_without_words_is_a_problem_and_a_folder_without_parts_is_refused(folder, tmp_path):
    table = next(folder.glob("dev-clean/*/*/*.trans.txt"))
    table.write_text(table.read_text() + "2-55-0002\n")
    assert librispeech(folder).problems.counts() == {"no text": 1}
    with pytest.raises(DataError, match="has no part of LibriSpeech"):
        librispeech(tmp_path / "LibriSpeech" / "dev-clean")
