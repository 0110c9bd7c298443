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
    """The decoder with the fewest word errors (`_best`), and all trials. First the acoustic scale is chosen, then the penalty.

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
    """The setting with the fewest errors, counted together with those of its two neighbours, half as heavily each.

    A few hundred words cannot tell neighbours apart, and the least of many noisy figures is a lucky one.
    """
    wers = [trials[0].wer, *(trial.wer for trial in trials), trials[-1].wer]
    smooth = [wers[i - 1] + 2 * wers[i] + wers[i + 1] for i in range(1, len(wers) - 1)]
    equals = [i for i, each in enumerate(smooth) if each - min(smooth) < 1e-9]
    return trials[equals[len(equals) // 2]].scales
