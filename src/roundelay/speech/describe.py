"""A summary of a corpus: hours, words, speakers and phones of each split, and all problems."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from roundelay.errors import DataError
from roundelay.speech.audio import AudioError, audio_length_s, read_audio
from roundelay.speech.corpus import Corpus, Problems, Utterance
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.segments import FRAME_SHIFT_S

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SplitSummary:
    """Figures of the usable utterances of one split, and the number of unusable ones.

    `aligned` counts utterances with phone times or state numbers.
    """

    utterances: int
    unusable: int
    hours: float
    speakers: int
    words: int
    aligned: int


@dataclass(frozen=True)
class Summary:
    """Figures of a corpus.

    Attributes:
        vocabulary: number of different words.
        phones: phones of the alignments and of the lexicon.
        unknown_words: words that cannot be recognised, and how often they occur: the lexicon lacks them or, without a lexicon,
            the training split does. Empty without both.
        rates_Hz: sample rates, and how many utterances have each.
        problems: number of problems of each kind.
        cases: one line for each problem.
    """

    name: str
    description: str
    splits: dict[str, SplitSummary]
    vocabulary: int
    phones: tuple[str, ...]
    unknown_words: dict[str, int]
    rates_Hz: dict[int, int]
    problems: dict[str, int] = field(default_factory=dict)
    cases: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Checked:
    """What checking the audio of one utterance found."""

    duration_s: float = 0.0  # 0: the audio cannot be used
    rate_Hz: int = 0
    problems: tuple[tuple[str, str], ...] = ()


def summary(corpus: Corpus, *, quick: bool = False, progress: Progress | None = None) -> Summary:
    """Figures of a corpus. All audio is read and checked; with `quick`, only the headers of its files.

    `progress(done, total)` is called after each utterance.
    """
    checked = _all_checked(corpus, quick=quick, progress=progress)
    problems = Problems(corpus.problems.cases)
    for one in checked:
        problems.cases.extend(one.problems)
    lexicon = Lexicon.read(corpus.lexicon) if corpus.lexicon else None
    unknown = _unknown_words(corpus, lexicon)
    phones = set(corpus.phone_set)
    if lexicon:
        for phone in sorted(phones.difference(lexicon.phones)):
            problems.add("phone outside the lexicon", phone)
        phones.update(lexicon.phones)
    return Summary(
        corpus.name,
        corpus.description,
        {name: _split(corpus, name, checked) for name in corpus.splits},
        len({word for utterance in corpus.utterances for word in utterance.text.split()}),
        tuple(sorted(phones)),
        dict(unknown.most_common()),
        dict(sorted(Counter(one.rate_Hz for one in checked if one.rate_Hz).items())),
        problems.counts(),
        tuple(f"{kind}: {line}" for kind, line in problems.cases),
    )


def _unknown_words(corpus: Corpus, lexicon: Lexicon | None) -> Counter[str]:
    trained = {word for utterance in corpus.utterances if utterance.split == "train" for word in utterance.text.split()}
    known = lexicon or trained
    said = (word for utterance in corpus.utterances for word in utterance.text.split())
    return Counter(word for word in said if known and word not in known)


def _split(corpus: Corpus, name: str, checked: Sequence[_Checked]) -> SplitSummary:
    listed = [(utt, one) for utt, one in zip(corpus.utterances, checked, strict=True) if utt.split == name]
    inside = [(utt, one) for utt, one in listed if one.duration_s > 0]
    return SplitSummary(
        utterances=len(inside),
        unusable=len(listed) - len(inside),
        hours=sum(one.duration_s for _, one in inside) / 3600,
        speakers=len({utterance.speaker for utterance, _ in inside}),
        words=sum(len(utterance.text.split()) for utterance, _ in inside),
        aligned=sum(utterance.phones is not None or utterance.id in (corpus.pdfs or ()) for utterance, _ in inside),
    )


def _all_checked(corpus: Corpus, *, quick: bool, progress: Progress | None) -> list[_Checked]:
    """Check utterances in threads: libsndfile reads without Python's global lock."""
    checked: list[_Checked] = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for one in pool.map(lambda utterance: _checked(corpus, utterance, quick=quick), corpus.utterances):
            checked.append(one)
            if progress:
                progress(len(checked), len(corpus))
    return checked


def _checked(corpus: Corpus, utterance: Utterance, *, quick: bool) -> _Checked:
    try:
        if utterance.audio is None:
            frames = corpus.frames(utterance) if corpus.frames else ()
            return _Checked(len(frames) * FRAME_SHIFT_S)
        if quick:
            whole_s, rate_Hz = audio_length_s(utterance.audio)
            return _Checked(utterance.duration_s or whole_s - utterance.start_s, rate_Hz)
        audio = read_audio(utterance.audio, utterance.channel, utterance.start_s, utterance.duration_s)
    except AudioError as error:
        return _Checked(problems=((error.kind, f"{utterance.id}: {error.detail}"),))
    except DataError as error:
        return _Checked(problems=(("no features", f"{utterance.id}: {error}"),))
    return _Checked(audio.duration_s, audio.rate_Hz, tuple((flaw, utterance.id) for flaw in audio.flaws))
