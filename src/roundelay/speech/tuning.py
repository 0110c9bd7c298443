"""The scales of a decoder with the fewest errors on a validation set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from numpy.typing import ArrayLike

from roundelay.speech.decode import Decoder, Hypothesis, Scales, decode_with_each
from roundelay.speech.score import score


@dataclass(frozen=True)
class Trial:
    """One setting of the scales, and its word error rate on the validation set."""

    scales: Scales
    wer: float


ACOUSTIC_SCALES = (0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8, 1.1)
INSERTION_PENALTIES = (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0)


def tuned(
    decoder: Decoder,
    batches: Iterable[Mapping[str, ArrayLike]],
    references: Mapping[str, str],
    workers: int | None = None,
) -> tuple[Decoder, list[Trial]]:
    """The decoder with the fewest word errors, and all trials. The acoustic scale is chosen first, then the insertion penalty.

    `batches` holds log likelihoods of a few utterances each, and is iterated twice. The scale of the language model stays,
    because only its ratio to the acoustic scale matters. Among settings with equally few errors the middle one is taken.
    """
    scales = [replace(decoder.scales, acoustic=acoustic) for acoustic in ACOUSTIC_SCALES]
    first = _trials(decoder, scales, batches, references, workers)
    scales = [replace(_best(first), insertion_penalty=penalty) for penalty in INSERTION_PENALTIES]
    second = _trials(decoder, scales, batches, references, workers)
    return replace(decoder, scales=_best(second)), first + second


def _trials(
    decoder: Decoder,
    settings: Sequence[Scales],
    batches: Iterable[Mapping[str, ArrayLike]],
    references: Mapping[str, str],
    workers: int | None,
) -> list[Trial]:
    decoders = [replace(decoder, scales=scales) for scales in settings]
    found: dict[str, list[Hypothesis]] = {}
    for batch in batches:
        found |= decode_with_each(decoders, batch, workers)
    wers = [
        score(references, {name: hypotheses[i].words for name, hypotheses in found.items()}).wer
        for i in range(len(settings))
    ]
    return [Trial(scales, wer) for scales, wer in zip(settings, wers, strict=True)]


def _best(trials: Sequence[Trial]) -> Scales:
    least = min(trial.wer for trial in trials)
    equals = [trial for trial in trials if trial.wer == least]
    return equals[len(equals) // 2].scales
