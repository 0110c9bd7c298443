"""Random sentences of the synthetic corpus: spelled words, numbers, dates, times and short commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np

from roundelay.speech.synth.lexicon import DAYS, DIGITS, LETTERS, MONTHS, ORDINALS, TEENS, TENS, words

Random: TypeAlias = np.random.Generator
T = TypeVar("T")

_DIGITS, _TEENS, _TENS, _ORDINALS = words(DIGITS), words(TEENS), words(TENS), words(ORDINALS)

TEMPLATES = (
    "turn {switch} the {thing} in the {room}",
    "turn the {thing} {switch}",
    "{shut} the {hole} in the {room}",
    "set the volume to {number}",
    "set the timer for {number} minutes",
    "set the heating to {number} degrees",
    "play the next song",
    "play channel {number}",
    "move {way} {number}",
    "call room {number}",
    "call the {room}",
    "show me the weather for {when}",
    "wake me {when} at {hour}",
    "good morning",
    "{single}",
    "{single} {single}",
)
BLANKS: dict[str, Sequence[str]] = {
    "switch": ("on", "off"),
    "thing": ("light", "music", "radio", "heating"),
    "room": ("kitchen", "bedroom", "office", "garage", "house"),
    "shut": ("open", "close"),
    "hole": ("window", "door"),
    "way": ("up", "down", "left", "right"),
    "when": ("today", "tomorrow", *words(DAYS)),
    "hour": words(DIGITS)[5:],
    "single": ("yes", "no", "go", "stop", "help", "repeat", "erase", "enter", "start", "boy"),
}


def sentence(random: Random) -> tuple[str, ...]:
    """The words of one random sentence. A kind that is in KINDS twice is twice as likely.

    >>> " ".join(sentence(np.random.default_rng(3)))
    'open the window in the house'
    """
    return tuple(_one(random, KINDS)(random))


def spelled(random: Random) -> list[str]:
    """Three to seven letters."""
    return [_one(random, words(LETTERS)) for _ in range(random.integers(3, 8))]


def digits(random: Random) -> list[str]:
    """Three to eight digits one by one."""
    return [_one(random, _DIGITS) for _ in range(random.integers(3, 9))]


def code(random: Random) -> list[str]:
    """Letters and digits mixed, as on a number plate."""
    return ["code", *(_one(random, _one(random, (_DIGITS, words(LETTERS)))) for _ in range(random.integers(2, 6)))]


def amount(random: Random) -> list[str]:
    """A number of things, or one with a decimal point."""
    if random.random() < 0.2:
        return [*cardinal(int(random.integers(0, 100))), "point", _one(random, _DIGITS)]
    limit = _one(random, (100, 1000, 10000))
    return [
        *cardinal(int(random.integers(0, limit))),
        _one(random, ("dollars", "percent", "degrees", "minutes", "hours")),
    ]


def date(random: Random) -> list[str]:
    """A day of a month, with or without weekday and year, in either order."""
    month, day = _one(random, words(MONTHS)), ordinal(int(random.integers(1, 32)))
    said = [month, *day] if random.random() < 0.5 else ["the", *day, "of", month]
    weekday = [_one(random, words(DAYS))] if random.random() < 0.4 else []
    return [*weekday, *said, *(_year(random) if random.random() < 0.5 else [])]


def time(random: Random) -> list[str]:
    """A time of the day."""
    hour, minute = int(random.integers(1, 13)), int(random.integers(10, 60))
    return ["at", *cardinal(hour), *cardinal(minute), _one(random, ("a", "p")), "m"]


def command(random: Random) -> list[str]:
    """A short command to a machine: a template with its blanks filled in."""
    blanks = BLANKS | {"number": (" ".join(cardinal(int(random.integers(1, 100)))),)}
    filled = (
        _one(random, blanks[word[1:-1]]) if word.startswith("{") else word for word in _one(random, TEMPLATES).split()
    )
    return " ".join(filled).split()


KINDS: tuple[Callable[[Random], list[str]], ...] = (
    spelled, spelled, digits, digits, code, amount, amount, date, date, time, command, command, command,
)  # fmt: skip


def cardinal(number: int) -> list[str]:
    """A number below ten thousand in words.

    >>> " ".join(cardinal(4217)), " ".join(cardinal(60))
    ('four thousand two hundred and seventeen', 'sixty')
    """
    if number < 20:
        return [(*_DIGITS, *_TEENS)[number]]
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = number % size
            linked = ["and"] if 0 < rest < 100 else []
            return [*cardinal(number // size), name, *linked, *(cardinal(rest) if rest else [])]
    tens, unit = divmod(number, 10)
    return [_TENS[tens - 2], *([_DIGITS[unit]] if unit else [])]


def ordinal(day: int) -> list[str]:
    """A day of a month in words.

    >>> ordinal(3), ordinal(21)
    (['third'], ['twenty', 'first'])
    """
    if day <= 20:
        return [_ORDINALS[day - 1]]
    return [_ORDINALS[20]] if day == 30 else [_TENS[day // 10 - 2], _ORDINALS[day % 10 - 1]]


def _year(random: Random) -> list[str]:
    return [*cardinal(int(random.integers(18, 21))), *cardinal(int(random.integers(10, 100)))]


def _one(random: Random, choices: Sequence[T]) -> T:
    return choices[int(random.integers(len(choices)))]
