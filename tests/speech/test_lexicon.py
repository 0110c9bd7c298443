"""Words, pronunciations, and the marks that make them unambiguous."""

import math
from collections import Counter

import pytest

from roundelay.errors import SpeechError
from roundelay.speech.lexicon import Entry, Lexicon


def test_cmu_variants_and_kaldi_repetitions_read_as_the_same_lexicon(tmp_path):
    (tmp_path / "cmu.dic").write_text("A                    AH\nA(2)                 EY\nB B IY\n")
    (tmp_path / "lexicon.txt").write_text("!SIL SIL\nA AH\nB B IY\nA EY\n")
    cmu, kaldi = Lexicon.read(tmp_path / "cmu.dic"), Lexicon.read(tmp_path / "lexicon.txt")
    assert cmu.words == kaldi.words == ("A", "B")
    assert cmu["A"] == kaldi["A"] == (("AH",), ("EY",))
    assert cmu.phones == ("SIL", "AH", "B", "EY", "IY")


def test_a_word_that_ends_in_a_number_in_brackets_stays_itself_when_there_is_no_such_base(tmp_path):
    (tmp_path / "lexicon.txt").write_text("F(2) EH F T UW\n")
    assert Lexicon.read(tmp_path / "lexicon.txt").words == ("F(2)",)


def test_a_written_lexicon_is_read_back(tmp_path):
    lexicon = Lexicon({"TO": [("T", "UW"), ("T", "AH")], "TWO": [("T", "UW")]})
    lexicon.write(tmp_path / "lexicon.txt")
    again = Lexicon.read(tmp_path / "lexicon.txt")
    assert again.entries() == lexicon.entries()


def test_homophones_and_beginnings_of_other_words_are_marked_and_nothing_else():
    lexicon = Lexicon({"CAR": ["KAR"], "CARD": ["KARD"], "TO": ["TU"], "TOO": ["TU"], "TWO": ["TU"]})
    marks = {entry.word: entry.mark for entry in lexicon.entries()}
    assert marks == {"CAR": 1, "CARD": 0, "TO": 1, "TOO": 2, "TWO": 3}


def test_marked_pronunciations_are_prefix_free():
    lexicon = Lexicon({"A": ["a"], "AB": ["ab", "aab"], "AAB": ["aab"], "B": ["ab", "b"]})
    sounds = [(*e.phones, f"#{e.mark}") if e.mark else e.phones for e in lexicon.entries()]
    assert len(set(sounds)) == len(sounds)
    assert not [(x, y) for x in sounds for y in sounds if x != y and y[: len(x)] == x]


def test_unknown_words_are_counted():
    assert Lexicon({"A": ["a"]}).unknown(["A B", "B C A"]) == Counter({"B": 2, "C": 1})


def test_repeated_pronunciations_count_once():
    assert Lexicon({"A": ["a", "a"]}).entries() == (Entry("A", ("a",), 0),)


def test_a_pronunciation_costs_what_it_is_rarer_than_the_most_frequent_one():
    lexicon = Lexicon({"A": [("AH",), ("EY",)], "B": ["b"], "C": ["c", "k"]})
    assert {entry.cost for entry in lexicon.entries()} == {0.0}
    counted = lexicon.with_counts({("A", ("AH",)): 4, ("A", ("EY",)): 130})
    costs = {entry.phones: entry.cost for entry in counted.entries()}
    assert costs == {("AH",): pytest.approx(math.log(130.5 / 4.5)), ("EY",): 0, ("b",): 0, ("c",): 0, ("k",): 0}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("A", "has no phones"),
        ("A x SIL", "silence phone 'SIL'"),
        ("<s> x", "cannot be a word"),
        ("", "at least one word"),
    ],
)
def test_lines_that_cannot_work_are_named(tmp_path, line, says):
    (tmp_path / "lexicon.txt").write_text(line + "\n")
    with pytest.raises(SpeechError, match=says):
        Lexicon.read(tmp_path / "lexicon.txt")


def test_comments_are_ignored(tmp_path):
    path = tmp_path / "cmudict.dict"
    path.write_text("# a header\n;;; another\naalborg AO L B AO R G # place, danish\n\n#hash HH AE SH\n")
    assert Lexicon.read(path)["aalborg"] == (("AO", "L", "B", "AO", "R", "G"),)
    assert len(Lexicon.read(path)) == 1
