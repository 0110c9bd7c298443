"""Forced alignment against exhaustive search."""

import numpy as np
import pytest

pytest.importorskip("kaldi_decoder")

from tiny_speech import LEXICON, cheapest

from roundelay.speech.align import Aligner, Transcripts, aligned
from roundelay.speech.graph import alignment_graph
from roundelay.speech.hmm import Monophones, phone_segments

TYING = Monophones(LEXICON.phones, states_per_phone=2)


@pytest.mark.parametrize("seed", range(4))
def test_the_alignment_is_the_cheapest_way_to_say_the_sentence(seed):
    rng = np.random.default_rng(seed)
    scores = 5 * rng.standard_normal((16, TYING.num_states))
    loops = rng.uniform(0.2, 0.8, TYING.num_states).astype(np.float32)
    words = ("TO", "A")
    found = Aligner(np.asarray, loops)(scores, alignment_graph(LEXICON, words, TYING))
    nothing = {"acoustic": 1.0, "lm_scale": 1.0, "penalty": 0.0, "language_cost": lambda words: 0.0}
    assert found.cost == pytest.approx(cheapest(scores, TYING, loops, [words], **nothing)[0], abs=1e-3)
    assert found.words == words
    phones = [phone for phone in phone_segments(found.states_T, TYING).symbols if phone != "SIL"]
    assert phones in (["t", "u", "a"], ["t", "a", "a"])


def test_too_few_frames_and_unknown_words_are_reported_and_the_rest_is_aligned():
    texts = {"short": "TO TO", "strange": "TO FOUR", "fine": "A"}
    scores = {name: np.zeros((4, TYING.num_states)) for name in texts}
    found = aligned(Aligner(np.asarray), scores, Transcripts(texts, LEXICON, TYING), workers=1)
    assert list(found.labels) == ["fine"]
    assert "FOUR" in found.failed["strange"]
    assert "4 frames are too few" in found.failed["short"]
