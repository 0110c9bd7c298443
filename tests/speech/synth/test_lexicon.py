"""The lexicon of the synthetic corpus: phones, stress and file format."""

from __future__ import annotations

from roundelay.speech.synth.lexicon import ESPEAK, LETTERS, dictionary, mnemonics, phones, stressed, words

PHONES = "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH"
ARPABET = set(PHONES.split())


def test_the_phones_are_those_of_cmu_and_all_of_them_occur():
    used = {phone for variants in stressed().values() for one in variants for phone in phones(one)}
    assert used == ARPABET
    assert {name.rstrip("0") for name in ESPEAK} == ARPABET


def test_every_letter_has_its_name():
    assert words(LETTERS) == tuple("abcdefghijklmnopqrstuvwxyz")


def test_every_word_has_one_main_stress_or_is_a_weak_form():
    for word, variants in stressed().items():
        stresses = [sum(phone.endswith("1") for phone in one) for one in variants]
        assert max(stresses) == 1 or word in ("the", "of", "in", "to"), word
        assert all("1" not in phone or phone[0] in "AEIOU" for one in variants for phone in one)


def test_the_dictionary_numbers_further_pronunciations():
    entries = dict(line.split(maxsplit=1) for line in dictionary().splitlines())
    assert entries["zero"] == "Z IH R OW"
    assert entries["zero(2)"] == "Z IY R OW"
    assert entries["and"] == "AE N D"
    assert len({name.split("(")[0] for name in entries}) == len(stressed())
    assert len(entries) == len(dictionary().splitlines())


def test_stress_is_written_before_the_vowel():
    assert mnemonics(("B", "EH1", "D", "R", "UW2", "M")) == "b'Edr,u:m"
