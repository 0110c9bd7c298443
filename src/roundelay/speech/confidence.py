"""The confidence of each recognised word. Words with a low confidence are shown as unknown.

The confidence of a word is the geometric mean, over its frames, of the network's probability of the phone that the path has
there: Σ p(s|x) over the states s of that phone. With fMLLR, p(s|x)
also includes the adapted Gaussians (`Recogniser.log_likelihoods`). No lattice is needed.
A filler, which takes the best phone in every frame, has
a mean near 1 in clear speech. So a word far below that does not fit its sound: another word was said, or nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from roundelay.speech.decode import Hypothesis
from roundelay.speech.hmm import Floats, Tying
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.segments import FRAME_SHIFT_S
from roundelay.speech.word_times import word_times

UNKNOWN = "<unk>"
UNKNOWN_BELOW = 0.1  # confidence of a word that is shown as UNKNOWN


def with_confidences(hypothesis: Hypothesis, log_posteriors_TS: Floats, lexicon: Lexicon, tying: Tying) -> Hypothesis:
    """The hypothesis with the confidence of each of its words."""
    phone_T = tying.phone_of_state[hypothesis.states_T]
    of_phone_SP = np.zeros((tying.num_states, len(tying.phones)), np.float32)
    of_phone_SP[np.arange(tying.num_states), tying.phone_of_state] = 1
    posterior_TP = np.exp(log_posteriors_TS) @ of_phone_SP
    log_phone_T = np.log(np.maximum(posterior_TP[np.arange(len(phone_T)), phone_T], np.finfo(np.float32).tiny))
    confidences = []
    for _, start_s, duration_s in word_times(hypothesis, lexicon, tying):
        first, frames = round(start_s / FRAME_SHIFT_S), round(duration_s / FRAME_SHIFT_S)
        inside = log_phone_T[first : first + frames]
        confidences.append(float(np.exp(inside.mean())) if len(inside) else 0.0)
    return replace(hypothesis, confidences=tuple(confidences))


def shown_words(hypothesis: Hypothesis) -> list[str]:
    """The words as users see them: UNKNOWN in the place of words that do not fit their sound."""
    return [
        word if confidence >= UNKNOWN_BELOW else UNKNOWN
        for word, confidence in zip(hypothesis.words, hypothesis.confidences, strict=True)
    ]
