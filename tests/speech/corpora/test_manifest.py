"""Manifest folders: a bad row is counted, and the others are used."""

from __future__ import annotations

from pathlib import Path

import pytest
from sounds import noise, save

from roundelay.errors import DataError
from roundelay.speech.corpora.manifest import manifest, write_manifest
from roundelay.speech.segments import segments, write_ctm


@pytest.fixture
def folder(tmp_path):
    for name in ("a/one.wav", "a/two.wav", "b/two.wav"):
        save(tmp_path / name, noise(1.0))
    return tmp_path


def table(folder, text):
    (folder / "manifest.tsv").write_text(text)
    return manifest(folder)


def counts(corpus):
    """Problems, but for the one that these short tables have all: they say nothing about splits."""
    return {kind: count for kind, count in corpus.problems.counts().items() if kind != "no split"}


def test_path_and_text_are_enough(folder):
    corpus = table(folder, "path\ttext\na/one.wav\tone\na/two.wav\ttwo\nb/two.wav\t two  two \n")
    assert [(utt.id, utt.speaker, utt.text, utt.split) for utt in corpus.utterances] == [
        ("one", "one", "one", "test"),
        ("a-two", "a-two", "two", "test"),
        ("b-two", "b-two", "two two", "test"),
    ]
    assert corpus.problems.summary() == [
        "no split: 1, first 3 of 3 utterances count as test; write train, valid or test into the column split"
    ]


def test_all_columns_in_any_order_and_others_beside_them(folder):
    corpus = table(
        folder,
        "text\tgender\tspeaker\tsplit\tseconds\tstart\tchannel\tid\tpath\nyes\tf\tann\tdev\t0.5\t0.25\t1\tu7\ta/one.wav\n",
    )
    (only,) = corpus.utterances
    assert (only.id, only.speaker, only.split, only.text) == ("u7", "ann", "valid", "yes")
    assert (only.channel, only.start_s, only.duration_s, only.audio) == (1, 0.25, 0.5, folder / "a/one.wav")


def test_absolute_paths_windows_line_ends_and_a_byte_order_mark_are_fine(folder):
    path = folder / "a/one.wav"
    (folder / "manifest.tsv").write_bytes(f'\ufeffpath\ttext\r\n{path}\tone "quoted\r\n'.encode())
    (only,) = manifest(folder / "manifest.tsv").utterances
    assert (only.audio, only.text) == (path, 'one "quoted')


def test_bad_rows_are_counted_and_the_others_used(folder):
    corpus = table(
        folder,
        "id\tpath\tsplit\tstart\ttext\n"
        "u1\ta/one.wav\ttrain\t0\tone\n"
        "u1\ta/two.wav\ttrain\t0\ttwo\n"
        "u2\tgone.wav\ttrain\t0\tgone\n"
        "u3\ta/two.wav\ttrain\tsoon\ttwo\n"
        "u4\tb/two.wav\ttrain\t0\t\n"
        "u5\tb/two.wav\n",
    )
    assert [utterance.id for utterance in corpus.utterances] == ["u1", "u2", "u4", "u5"]
    assert counts(corpus) == {"duplicate utterance": 1, "bad row": 1, "no text": 2}
    assert corpus["u5"].split == "test"


@pytest.mark.parametrize("numbers", ["-1\t0\t1", "0\tnan\t1", "0\t0\tinf", "0\t-1\t1", "left\t0\t1"])
def test_impossible_numbers_are_bad_rows(folder, numbers):
    corpus = table(folder, f"path\ttext\tchannel\tstart\tseconds\na/one.wav\tone\t{numbers}\na/two.wav\ttwo\t0\t0\t1\n")
    assert [utterance.id for utterance in corpus.utterances] == ["two"]
    assert counts(corpus) == {"bad row": 1}


def test_the_current_folder_gives_the_corpus_its_name(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert table(Path(), "path\ttext\na/one.wav\tone\n").name == folder.name


def test_rows_without_a_path_are_counted_unless_they_are_empty(folder):
    corpus = table(folder, "path\tspeaker\ttext\na/one.wav\tann\tone\n\t\ttwo\n\t\t\n\n")
    assert ("bad row", "line 3 has no path") in corpus.problems.cases
    assert counts(corpus) == {"bad row": 1}


def test_several_utterances_of_one_file_have_their_start_in_their_ids(folder):
    corpus = table(
        folder, "path\tstart\tseconds\ttext\na/one.wav\t0\t0.5\tone\na/one.wav\t0.5\t0.5\ttwo\na/two.wav\t\t\tthree\n"
    )
    assert {utterance.id: utterance.text for utterance in corpus.utterances} == {
        "a-one-0": "one",
        "a-one-0.5": "two",
        "two": "three",
    }


def test_the_error_for_another_encoding_says_how_to_convert_the_table(folder):
    (folder / "manifest.tsv").write_bytes("path\ttext\na/one.wav\tgrüße\n".encode("latin-1"))
    with pytest.raises(DataError, match="is not in UTF-8: it has the byte 0xfc; convert it, for instance: iconv"):
        manifest(folder)


def test_times_are_attached_and_checked_against_text_and_length(folder):
    (folder / "align").mkdir()
    phones = {id: segments([("A", 0.0, length)]) for id, length in (("u1", 0.9), ("u2", 1.5), ("u3", 0.9), ("u9", 0.9))}
    words = {"u1": segments([("one", 0.0, 0.9)]), "u3": segments([("won", 0.0, 0.9)])}
    write_ctm(folder / "align/phones.ctm", phones)
    write_ctm(folder / "align/words.ctm", words)
    rows = [
        {"id": f"u{n}", "path": path, "seconds": 1.0, "text": "one"}
        for n, path in enumerate(("a/one.wav", "a/two.wav", "b/two.wav", "b/two.wav"), 1)
    ]
    write_manifest(folder / "manifest.tsv", rows)
    corpus = manifest(folder)
    assert corpus["u1"].phones == phones["u1"]
    assert corpus["u1"].words == words["u1"]
    assert [corpus[id].phones for id in ("u2", "u3", "u4")] == [None, None, None]
    assert counts(corpus) == {
        "alignment too long": 1,
        "alignment of other words": 1,
        "not aligned": 1,
        "stray alignment": 1,
    }


def test_a_lexicon_beside_it_is_found(folder):
    (folder / "lexicon").mkdir()
    (folder / "lexicon/mine.dic").write_text("one W AH N\n")
    assert table(folder, "path\ttext\na/one.wav\tone\n").lexicon == folder / "lexicon/mine.dic"


def test_a_folder_without_a_manifest_is_refused(folder):
    with pytest.raises(DataError, match=r"has no manifest.tsv: a table with the columns id, path"):
        manifest(folder)
    with pytest.raises(DataError, match=r"lacks the column text; its first line is path \| words"):
        table(folder, "path\twords\na/one.wav\tone\n")
    with pytest.raises(DataError, match="lacks the column path and text"):
        table(folder, "")
