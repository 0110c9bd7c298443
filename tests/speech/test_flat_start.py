"""A flat start against the states that generated the frames."""

import numpy as np
import pytest

pytest.importorskip("kaldi_decoder")

from tiny_speech import LEXICON

from roundelay.errors import SpeechError
from roundelay.speech.align import Transcripts
from roundelay.speech.flat_start import Span, flat_start, loud_part, uniform_alignment
from roundelay.speech.hmm import Monophones, Occurrences, phone_segments, state_labels

TYING = Monophones(LEXICON.phones, states_per_phone=2)


@pytest.mark.parametrize(
    ("loud", "frames"),
    [
        (Span(12, 24), (12, 6, 6, 16)),
        (Span(4, 24), (4, 10, 10, 16)),
        (Span(1, 24), (2, 11, 11, 16)),  # a frame for each state
        (Span(0, 24), (10, 7, 7, 16)),
        (Span(12, 40), (12, 9, 9, 10)),
        (Span(0, 40), (10, 10, 10, 10)),
        (Span(18, 21), (10, 10, 10, 10)),  # too short for two phones
    ],
)
def test_phones_share_the_loud_part_and_silence_has_the_rest_or_as_much_as_a_phone(loud, frames):
    found = phone_segments(uniform_alignment(40, loud, ["TO"], LEXICON, TYING), TYING)
    assert found.symbols == ("SIL", "t", "u", "SIL")
    assert found.durations_s == pytest.approx(np.array(frames) / 100)


def test_every_state_needs_a_frame():
    with pytest.raises(SpeechError, match="7 frames are too few for the 8 states"):
        uniform_alignment(7, Span(0, 7), ["TO"], LEXICON, TYING)
    assert (np.bincount(uniform_alignment(8, Span(0, 8), ["TO"], LEXICON, TYING))[[0, 1]] == 2).all()


def test_without_loud_and_quiet_all_of_it_may_be_speech():
    assert loud_part(np.ones(9)) == Span(0, 9)


def said(texts):
    return Transcripts(texts, LEXICON, TYING)


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
    start = flat_start({name: frames for name, (frames, _) in made.items()}, said(texts), workers=1)
    right = [np.mean(start.alignments.labels[name] == labels) for name, (_, labels) in made.items()]
    uniform = [
        np.mean(uniform_alignment(len(x), Span(0, len(x)), texts[name].split(), LEXICON, TYING) == labels)
        for name, (x, labels) in made.items()
    ]
    assert np.mean(uniform) < 0.5
    assert np.mean(right) > 0.9
    assert list(start.alignments.failed) == ["bad"]


def test_further_utterances_are_aligned_by_the_model_of_a_flat_start():
    rng = np.random.default_rng(5)
    texts = {f"u{i}": " ".join(rng.choice(["A", "ATE", "TWO"], 4)) for i in range(40)}
    made = {name: made_up(rng, text.split()) for name, text in texts.items()}
    frames = {name: each for name, (each, _) in made.items()} | {"bad": np.zeros((40, 5), np.float32)}
    start = flat_start(frames, said({name: texts[name] for name in texts if name < "u3"}), workers=1)
    others = [name for name in texts if name >= "u3"]
    found = start.model.aligned(frames, said(texts | {"bad": "FOUR"}), [*others, "bad"], workers=1)
    assert list(found.labels) == others
    assert np.mean([np.mean(labels == made[name][1]) for name, labels in found.labels.items()]) > 0.9
    assert list(found.failed) == ["bad"]


def test_each_iteration_of_viterbi_training_lowers_the_cost():
    rng = np.random.default_rng(3)
    texts = {f"u{i}": "TWO ATE A TWO" for i in range(20)}
    features = {name: made_up(rng, text.split())[0] for name, text in texts.items()}
    for costs in flat_start(features, said(texts), workers=1).costs:
        # Transition probabilities are smoothed a little, so a little is allowed.
        assert (np.diff(costs) <= 1e-3 * abs(costs[0])).all()
        assert costs[-1] <= costs[0]


def test_without_any_utterance_that_fits_the_reason_is_given():
    with pytest.raises(SpeechError, match="FOUR"):
        flat_start({"u": np.zeros((50, 2), dtype=np.float32)}, said({"u": "FOUR"}))


def test_long_silence_of_several_kinds_is_not_given_to_the_first_phone():
    """Utterances begin with about as much silence as they have speech; it is quiet in one half of them and noisy in the other."""
    rng = np.random.default_rng(7)
    texts: dict[str, str] = {}
    frames: dict[str, np.ndarray] = {}
    for i in range(40):
        words = rng.choice(["A", "ATE", "TWO"], 3)
        sounds, labels = made_up(rng, words)
        speech = sounds[TYING.phone_of_state[labels] > 0] + [5, 0, 0, 0, 0]
        room = 0.5 * rng.standard_normal((92, 5)) + [(-5.0, -2.0)[i % 2], 0, 0, 0, 0]
        texts[f"u{i}"] = " ".join(words)
        frames[f"u{i}"] = np.concatenate([room[:80], speech, room[80:]]).astype(np.float32)
    labels = flat_start(frames, said(texts), workers=1).alignments.labels
    begins = np.array([np.flatnonzero(TYING.phone_of_state[labels_T] > 0)[0] for labels_T in labels.values()])
    assert np.abs(begins - 80).max() <= 2
