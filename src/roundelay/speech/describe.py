"""A corpus in figures: how much of what, and what is wrong with it."""

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
    """One split in figures; `aligned` counts utterances with phone times or state numbers."""

    utterances: int
    hours: float
    speakers: int
    words: int
    aligned: int


@dataclass(frozen=True)
class Summary:
    """A corpus in figures.

    Attributes:
        vocabulary: different words.
        phones: of the alignments and the lexicon together.
        unknown_words: those that the lexicon lacks, and how often they are said; empty without a lexicon.
        rates_Hz: sample rates, and how many utterances have them.
        problems: how many of each kind.
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
class _Heard:
    duration_s: float = 0.0
    rate_Hz: int = 0
    problems: tuple[tuple[str, str], ...] = ()


def summary(corpus: Corpus, *, listen: bool = True, progress: Progress | None = None) -> Summary:
    """Figures of a corpus. With `listen` every file is read to its end; without, only headers are.

    `progress(done, of)` counts utterances.
    """
    heard = _heard(corpus, listen=listen, progress=progress)
    problems = Problems(corpus.problems.cases)
    for one in heard:
        problems.cases.extend(one.problems)
    lexicon = Lexicon.read(corpus.lexicon) if corpus.lexicon else None
    unknown = lexicon.unknown(utterance.text for utterance in corpus.utterances) if lexicon else Counter[str]()
    phones = set(corpus.phone_set)
    if lexicon:
        for phone in sorted(phones.difference(lexicon.phones)):
            problems.add("phone outside the lexicon", phone)
        phones.update(lexicon.phones)
    return Summary(
        corpus.name,
        corpus.description,
        {name: _split(corpus, name, heard) for name in corpus.splits},
        len({word for utterance in corpus.utterances for word in utterance.text.split()}),
        tuple(sorted(phones)),
        dict(unknown.most_common()),
        dict(sorted(Counter(one.rate_Hz for one in heard if one.rate_Hz).items())),
        problems.counts(),
        tuple(f"{kind}: {line}" for kind, line in problems.cases),
    )


def _split(corpus: Corpus, name: str, heard: Sequence[_Heard]) -> SplitSummary:
    inside = [(utt, one) for utt, one in zip(corpus.utterances, heard, strict=True) if utt.split == name]
    return SplitSummary(
        utterances=len(inside),
        hours=sum(one.duration_s for _, one in inside) / 3600,
        speakers=len({utterance.speaker for utterance, _ in inside}),
        words=sum(len(utterance.text.split()) for utterance, _ in inside),
        aligned=sum(utterance.phones is not None or utterance.id in (corpus.pdfs or ()) for utterance, _ in inside),
    )


def _heard(corpus: Corpus, *, listen: bool, progress: Progress | None) -> list[_Heard]:
    """What the audio of each utterance is like; threads suffice, for reading leaves Python's lock alone."""
    heard: list[_Heard] = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for one in pool.map(lambda utterance: _listen(corpus, utterance, listen=listen), corpus.utterances):
            heard.append(one)
            if progress:
                progress(len(heard), len(corpus))
    return heard


def _listen(corpus: Corpus, utterance: Utterance, *, listen: bool) -> _Heard:
    try:
        if utterance.audio is None:
            frames = corpus.frames(utterance) if corpus.frames else ()
            return _Heard(len(frames) * FRAME_SHIFT_S)
        if not listen:
            whole_s, rate_Hz = audio_length_s(utterance.audio)
            return _Heard(utterance.duration_s or whole_s - utterance.start_s, rate_Hz)
        audio = read_audio(utterance.audio, utterance.channel, utterance.start_s, utterance.duration_s)
    except AudioError as error:
        return _Heard(problems=((error.kind, f"{utterance.id}: {error.detail}"),))
    except DataError as error:
        return _Heard(problems=(("no features", f"{utterance.id}: {error}"),))
    return _Heard(audio.duration_s, audio.rate_Hz, tuple((flaw, utterance.id) for flaw in audio.flaws))
