"""Forced alignment against exhaustive search; a start from transcripts against the truth that made the frames."""

import numpy as np
import pytest

pytest.importorskip("kaldi_decoder")

from tiny_speech import LEXICON, cheapest

from roundelay.errors import SpeechError
from roundelay.speech.align import (
    Spoken,
    aligned,
    aligned_alike,
    alignment_graphs,
    flat_start,
    forced_alignment,
    uniform_alignment,
)
from roundelay.speech.graph import alignment_graph
from roundelay.speech.hmm import Monophones, Occurrences, phone_segments, state_labels

TYING = Monophones(LEXICON.phones, states_per_phone=2)


@pytest.mark.parametrize("seed", range(4))
def test_the_alignment_is_the_cheapest_way_to_say_the_sentence(seed):
    rng = np.random.default_rng(seed)
    scores = 5 * rng.standard_normal((16, TYING.num_states))
    loops = rng.uniform(0.2, 0.8, TYING.num_states).astype(np.float32)
    words = ("TO", "A")
    found = forced_alignment(scores, alignment_graph(LEXICON, words, TYING), loops)
    nothing = {"acoustic": 1.0, "lm_scale": 1.0, "penalty": 0.0, "language_cost": lambda words: 0.0}
    assert found.cost == pytest.approx(cheapest(scores, TYING, loops, [words], **nothing)[0], abs=1e-3)
    assert found.words == words
    phones = [phone for phone in phone_segments(found.states_T, TYING).symbols if phone != "SIL"]
    assert phones in (["t", "u", "a"], ["t", "a", "a"])


def test_too_few_frames_and_unknown_words_are_reported_and_the_rest_is_aligned():
    texts = {"short": "TO TO", "strange": "TO FOUR", "fine": "A"}
    graphs, failed = alignment_graphs(texts, LEXICON, TYING)
    assert "FOUR" in failed["strange"]
    scores = {"short": np.zeros((4, TYING.num_states)), "fine": np.zeros((4, TYING.num_states))}
    found = aligned(scores, graphs, workers=1)
    assert list(found.labels) == ["fine"]
    assert "4 frames are too few" in found.failed["short"]


def test_uniform_shares_are_equal_and_begin_and_end_in_silence():
    labels = uniform_alignment(24, ["TO"], LEXICON, TYING)
    assert phone_segments(labels, TYING).symbols == ("SIL", "t", "u", "SIL")
    assert set(np.bincount(labels)) <= {0, 3, 6}
    with pytest.raises(SpeechError, match="7 frames are too few for the 8 states"):
        uniform_alignment(7, ["TO"], LEXICON, TYING)


def made_up(rng, words):
    """Frames and true labels of some words, with silences here and there and phones of many lengths."""
    phones = [0]
    for word in words:
        phones += [TYING.number(phone) for phone in LEXICON[word][0]] + [0] * int(rng.random() < 0.3)
    phones += [0] if phones[-1] else []
    durations = rng.integers(4, 15, len(phones))
    starts = np.cumsum(durations) - durations
    labels = state_labels(Occurrences(np.array(phones), starts.astype(np.int32), int(durations.sum())), TYING)
    means = np.random.default_rng(9).normal(scale=2.0, size=(TYING.num_states, 5))
    return (means[labels] + rng.standard_normal((len(labels), 5))).astype(np.float32), labels


def test_a_flat_start_finds_the_states_that_made_the_frames():
    rng = np.random.default_rng(2)
    texts = {f"u{i}": " ".join(rng.choice(["A", "ATE", "TWO"], 4)) for i in range(30)}
    made = {name: made_up(rng, text.split()) for name, text in texts.items()}
    texts["bad"] = "FOUR"
    start = flat_start({name: frames for name, (frames, _) in made.items()}, texts, LEXICON, TYING, workers=1)
    right = [np.mean(start.alignments.labels[name] == labels) for name, (_, labels) in made.items()]
    uniform = [np.mean(uniform_alignment(len(x), texts[n].split(), LEXICON, TYING) == y) for n, (x, y) in made.items()]
    assert np.mean(uniform) < 0.5
    assert np.mean(right) > 0.9
    assert list(start.alignments.failed) == ["bad"]


def test_further_utterances_are_aligned_by_the_states_of_known_ones():
    rng = np.random.default_rng(5)
    texts = {f"u{i}": " ".join(rng.choice(["A", "ATE", "TWO"], 4)) for i in range(30)}
    made = {name: made_up(rng, text.split()) for name, text in texts.items()}
    frames = {name: each for name, (each, _) in made.items()}
    known = {name: labels for name, (_, labels) in made.items() if name < "u2"}
    others = Spoken({name: text for name, text in texts.items() if name not in known} | {"bad": "FOUR"}, LEXICON)
    found = aligned_alike(frames, known, others, TYING, workers=1)
    assert set(found.labels) == set(texts) - set(known)
    assert np.mean([np.mean(labels == made[name][1]) for name, labels in found.labels.items()]) > 0.9
    assert list(found.failed) == ["bad"]


def test_each_iteration_of_viterbi_training_lowers_the_cost():
    rng = np.random.default_rng(3)
    texts = {f"u{i}": "TWO ATE A TWO" for i in range(20)}
    features = {name: made_up(rng, text.split())[0] for name, text in texts.items()}
    for costs in flat_start(features, texts, LEXICON, TYING, workers=1).costs:
        # Transition probabilities are smoothed a little, so a little is allowed.
        assert (np.diff(costs) <= 1e-3 * abs(costs[0])).all()
        assert costs[-1] <= costs[0]


def test_without_any_utterance_that_fits_the_reason_is_given():
    with pytest.raises(SpeechError, match="FOUR"):
        flat_start({"u": np.zeros((50, 2), dtype=np.float32)}, {"u": "FOUR"}, LEXICON, TYING)
