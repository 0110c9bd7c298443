"""The words of the synthetic corpus: phones as in CMU's dictionary, vowels with stress (1 primary, 2 secondary, 0 none)."""

from __future__ import annotations

import functools
import re
from typing import TypeAlias

Pronunciation: TypeAlias = tuple[str, ...]

LETTERS = """
a EY1, b B IY1, c S IY1, d D IY1, e IY1, f EH1 F, g JH IY1, h EY1 CH, i AY1, j JH EY1, k K EY1, l EH1 L, m EH1 M,
n EH1 N, o OW1, p P IY1, q K Y UW1, r AA1 R, s EH1 S, t T IY1, u Y UW1, v V IY1, w D AH1 B AH0 L Y UW0, x EH1 K S,
y W AY1, z Z IY1
"""
DIGITS = """
zero Z IH1 R OW0 / Z IY1 R OW0, one W AH1 N, two T UW1, three TH R IY1, four F AO1 R, five F AY1 V, six S IH1 K S,
seven S EH1 V AH0 N, eight EY1 T, nine N AY1 N
"""
TEENS = """
ten T EH1 N, eleven IH0 L EH1 V AH0 N / AH0 L EH1 V AH0 N, twelve T W EH1 L V, thirteen TH ER0 T IY1 N,
fourteen F AO0 R T IY1 N, fifteen F IH0 F T IY1 N, sixteen S IH0 K S T IY1 N, seventeen S EH0 V AH0 N T IY1 N,
eighteen EY0 T IY1 N, nineteen N AY0 N T IY1 N
"""
TENS = """
twenty T W EH1 N T IY0, thirty TH ER1 T IY0, forty F AO1 R T IY0, fifty F IH1 F T IY0, sixty S IH1 K S T IY0,
seventy S EH1 V AH0 N T IY0, eighty EY1 T IY0, ninety N AY1 N T IY0
"""
ORDINALS = """
first F ER1 S T, second S EH1 K AH0 N D, third TH ER1 D, fourth F AO1 R TH, fifth F IH1 F TH, sixth S IH1 K S TH,
seventh S EH1 V AH0 N TH, eighth EY1 T TH, ninth N AY1 N TH, tenth T EH1 N TH, eleventh IH0 L EH1 V AH0 N TH,
twelfth T W EH1 L F TH, thirteenth TH ER0 T IY1 N TH, fourteenth F AO0 R T IY1 N TH, fifteenth F IH0 F T IY1 N TH,
sixteenth S IH0 K S T IY1 N TH, seventeenth S EH0 V AH0 N T IY1 N TH, eighteenth EY0 T IY1 N TH,
nineteenth N AY0 N T IY1 N TH, twentieth T W EH1 N T IY0 IH0 TH, thirtieth TH ER1 T IY0 IH0 TH
"""
MONTHS = """
january JH AE1 N Y UW0 EH2 R IY0, february F EH1 B Y UW0 EH2 R IY0 / F EH1 B R UW0 EH2 R IY0, march M AA1 R CH,
april EY1 P R AH0 L, may M EY1, june JH UW1 N, july JH UH0 L AY1, august AO1 G AH0 S T,
september S EH0 P T EH1 M B ER0, october AA0 K T OW1 B ER0, november N OW0 V EH1 M B ER0, december D IH0 S EH1 M B ER0
"""
DAYS = """
monday M AH1 N D EY0, tuesday T UW1 Z D EY0, wednesday W EH1 N Z D EY0, thursday TH ER1 Z D EY0, friday F R AY1 D EY0,
saturday S AE1 T ER0 D EY0, sunday S AH1 N D EY0
"""
OTHERS = """
hundred HH AH1 N D R AH0 D, thousand TH AW1 Z AH0 N D, point P OY1 N T, percent P ER0 S EH1 N T,
dollars D AA1 L ER0 Z, degrees D IH0 G R IY1 Z, minutes M IH1 N AH0 T S, hours AW1 ER0 Z, code K OW1 D, room R UW1 M,
and AE1 N D / AH0 N D, the DH AH0 / DH IY0, of AH0 V, in IH0 N, at AE1 T, to T UW0 / T AH0, for F AO1 R / F ER0,
on AA1 N, off AO1 F, up AH1 P, down D AW1 N, left L EH1 F T, right R AY1 T, yes Y EH1 S, no N OW1, go G OW1,
stop S T AA1 P, help HH EH1 L P, turn T ER1 N, set S EH1 T, open OW1 P AH0 N, close K L OW1 Z, play P L EY1,
call K AO1 L, show SH OW1, move M UW1 V, start S T AA1 R T, repeat R IH0 P IY1 T, erase IH0 R EY1 S, enter EH1 N T ER0,
wake W EY1 K, me M IY1, light L AY1 T, music M Y UW1 Z IH0 K, radio R EY1 D IY0 OW2, heating HH IY1 T IH0 NG,
window W IH1 N D OW0, door D AO1 R, garage G AH0 R AA1 ZH, kitchen K IH1 CH AH0 N, bedroom B EH1 D R UW2 M,
office AO1 F AH0 S, house HH AW1 S, timer T AY1 M ER0, volume V AA1 L Y UW0 M, weather W EH1 DH ER0, next N EH1 K S T,
channel CH AE1 N AH0 L, song S AO1 NG, boy B OY1, good G UH1 D, morning M AO1 R N IH0 NG, tomorrow T AH0 M AA1 R OW2,
today T AH0 D EY1
"""

# espeak-ng's mnemonics of our phones; an unstressed vowel may have another one.
ESPEAK = {
    "AA": "A:", "AE": "a", "AH": "V", "AH0": "@", "AO": "O:", "AW": "aU", "AY": "aI", "EH": "E", "ER": "3:", "ER0": "3",
    "EY": "eI", "IH": "I", "IY": "i:", "IY0": "i", "OW": "oU", "OY": "OI", "UH": "U", "UW": "u:",
    "B": "b", "CH": "tS", "D": "d", "DH": "D", "F": "f", "G": "g", "HH": "h", "JH": "dZ", "K": "k", "L": "l", "M": "m",
    "N": "n", "NG": "N", "P": "p", "R": "r", "S": "s", "SH": "S", "T": "t", "TH": "T", "V": "v", "W": "w", "Y": "j",
    "Z": "z", "ZH": "Z",
}  # fmt: skip
STRESS = {"1": "'", "2": ",", "0": ""}


def words(table: str) -> tuple[str, ...]:
    """The words of one of the tables above.

    >>> words(DIGITS)[:3]
    ('zero', 'one', 'two')
    """
    return tuple(entry.split()[0] for entry in table.replace("\n", " ").split(","))


@functools.cache
def stressed() -> dict[str, tuple[Pronunciation, ...]]:
    """Pronunciations of every word, with stress."""
    found: dict[str, tuple[Pronunciation, ...]] = {}
    for table in (LETTERS, DIGITS, TEENS, TENS, ORDINALS, MONTHS, DAYS, OTHERS):
        for entry in table.replace("\n", " ").split(","):
            word, phones = entry.split(maxsplit=1)
            found[word] = tuple(tuple(one.split()) for one in phones.split("/"))
    return found


def phones(pronunciation: Pronunciation) -> Pronunciation:
    """The pronunciation without stress, as in alignments and in the lexicon file.

    >>> phones(("W", "AH1", "N"))
    ('W', 'AH', 'N')
    """
    return tuple(phone.rstrip("012") for phone in pronunciation)


def mnemonics(pronunciation: Pronunciation) -> str:
    """The pronunciation in espeak-ng's mnemonics.

    >>> mnemonics(("S", "EH1", "V", "AH0", "N"))
    "s'Ev@n"
    """
    written = []
    for phone in pronunciation:
        name, stress = re.fullmatch(r"([A-Z]+)([012]?)", phone).groups()  # type: ignore[union-attr]
        written.append(STRESS.get(stress, "") + ESPEAK.get(phone, ESPEAK[name]))
    return "".join(written)


def dictionary() -> str:
    """The lexicon file: a word and its phones on each line, further pronunciations as word(2)."""
    lines = []
    for word, variants in sorted(stressed().items()):
        for number, pronunciation in enumerate(dict.fromkeys(map(phones, variants)), 1):
            name = word if number == 1 else f"{word}({number})"
            lines.append(f"{name} {' '.join(pronunciation)}\n")
    return "".join(lines)
