"""Beam search against exhaustive search, and its results in time."""

import numpy as np
import pytest

pytest.importorskip("kaldi_decoder")

from tiny_speech import LEXICON, LM, cheapest, sentences

from roundelay.errors import SpeechError
from roundelay.speech.decode import Decoder, Hypothesis, Scales, decode_all, log_likelihoods
from roundelay.speech.graph import decoding_graph
from roundelay.speech.hmm import Monophones, frame_labels, log_priors, self_loops
from roundelay.speech.score import score
from roundelay.speech.segments import segments
from roundelay.speech.tree_growing import ContextStatistics, decision_tree
from roundelay.speech.tuning import Trial, _best, tuned
from roundelay.speech.word_times import pronunciation_counts, word_times

TYING = Monophones(LEXICON.phones, states_per_phone=2)
GRAPH = decoding_graph(LEXICON, LM, TYING)


@pytest.mark.parametrize("seed", range(5))
def test_the_best_path_is_the_best_of_all_sentences(seed):
    rng = np.random.default_rng(seed)
    scores = 5 * rng.standard_normal((9, TYING.num_states))
    loops = rng.uniform(0.2, 0.8, TYING.num_states)
    scales = Scales(acoustic=0.3, lm=1.7, insertion_penalty=rng.uniform(-1, 1))
    found = Decoder(GRAPH, loops, scales)(scores)
    cost, words = cheapest(
        scores,
        TYING,
        loops,
        sentences(4),
        acoustic=scales.acoustic,
        lm_scale=scales.lm,
        penalty=scales.insertion_penalty,
    )
    assert found.cost == pytest.approx(cost, abs=0.01)  # minimisation rounds costs to 1/1024
    assert found.words == words
    assert found.complete


def triphones(seed):
    """A tree grown from noise; its questions do not matter."""
    rng = np.random.default_rng(seed)
    labels = [frame_labels(segments(zip("atuaut" * 3, np.arange(18) * 0.04, [0.04] * 18, strict=True)), 80, TYING)] * 3
    frames = [rng.standard_normal((80, 2)) for _ in labels]
    return decision_tree(ContextStatistics.of(frames, labels, TYING), TYING.num_states + 7, min_count=2)


@pytest.mark.parametrize("seed", range(4))
def test_the_best_path_is_the_best_of_all_sentences_with_triphones_across_words(seed):
    tree, rng = triphones(seed), np.random.default_rng(seed)
    assert tree.num_states == TYING.num_states + 7
    scores = 5 * rng.standard_normal((9, tree.num_states))
    loops = rng.uniform(0.2, 0.8, tree.num_states)
    found = Decoder(decoding_graph(LEXICON, LM, tree), loops, Scales(acoustic=0.3))(scores)
    cost, words = cheapest(scores, tree, loops, sentences(4), acoustic=0.3, lm_scale=1.0, penalty=0.0)
    assert found.cost == pytest.approx(cost, abs=0.01)
    assert found.words == words
    assert word_times(found, LEXICON, tree).symbols == words


def noisy(rng, words, height=4.0):
    """An utterance whose likelihoods favour its true states by `height` standard deviations."""
    rows, now = [("SIL", 0.0, 0.05)], 0.05
    for word in words:
        for phone in LEXICON[word][0]:
            rows.append((phone, now, 0.06))
            now += 0.06
    labels = frame_labels(segments(rows), int(now * 100) + 5, TYING)
    scores = rng.standard_normal((len(labels), TYING.num_states))
    scores[np.arange(len(labels)), labels] += height
    return labels, scores


def test_likelihoods_from_true_alignments_with_noise_give_hardly_any_errors():
    rng = np.random.default_rng(0)
    said = {f"u{i}": rng.choice(["ATE", "TO"], size=5) for i in range(40)}
    made = {name: noisy(rng, words) for name, words in said.items()}
    labels = [label for label, _ in made.values()]
    loops = self_loops(labels, TYING.num_states)
    found = decode_all(
        Decoder(GRAPH, loops, Scales(acoustic=1.0)), {name: x for name, (_, x) in made.items()}, workers=1
    )
    heard = {name: " ".join(words).replace("TWO", "TO") for name, words in words_of(found).items()}  # homophones
    assert score({name: " ".join(words) for name, words in said.items()}, heard).wer < 0.02


def words_of(found):
    return {name: hypothesis.words for name, hypothesis in found.items()}


def test_several_processes_give_the_same_results_in_the_same_order_as_one():
    rng = np.random.default_rng(1)
    utterances = {f"u{9 - i}": noisy(rng, ["TWO", "ATE"][: 1 + i % 2])[1] for i in range(7)}
    alone, together = (decode_all(Decoder(GRAPH), utterances, workers=n) for n in (1, 2))
    assert list(together) == list(utterances)
    for name in utterances:
        assert together[name].words == alone[name].words
        assert together[name].states_T.tolist() == alone[name].states_T.tolist()


def test_word_times_are_those_of_the_phones():
    rng = np.random.default_rng(2)
    _, scores = noisy(rng, ["ATE", "ATE", "TO"], height=50)
    found = Decoder(GRAPH)(scores)
    times = word_times(found, LEXICON, TYING)
    assert times.symbols == ("ATE", "ATE", "TO")
    assert times.starts_s == pytest.approx([0.05, 0.17, 0.29])
    assert times.durations_s == pytest.approx([0.12, 0.12, 0.12])


def test_pronunciations_are_counted_where_the_phones_of_the_labels_fit_the_text():
    def labels(phones):
        return TYING.chains(0, [TYING.number(phone) for phone in phones], 0).ravel()

    said = {"both": ("SIL", *"tu", "SIL", *"ta"), "other": (*"ta", *"at"), "unknown": tuple("tu"), "wrong": tuple("at")}
    texts = {"both": "TO TO", "other": "TO ATE", "unknown": "TWELVE", "wrong": "TO"}
    counts = pronunciation_counts({name: labels(each) for name, each in said.items()}, texts, LEXICON, TYING)
    assert counts == {("TO", ("t", "u")): 1, ("TO", ("t", "a")): 2, ("ATE", ("a", "t")): 1}


def test_a_word_that_was_cut_off_has_no_duration():
    cut = Hypothesis(("A", "TWO"), TYING.chains(0, [1, 2], 0).ravel(), 0.0, complete=False)
    times = word_times(cut, LEXICON, TYING)
    assert times.symbols == ("A", "TWO")
    assert times.durations_s == pytest.approx([0.02, 0.0])


def test_an_utterance_too_short_for_any_sentence_gives_no_words():
    found = Decoder(GRAPH)(np.zeros((1, TYING.num_states)))
    assert not found.complete
    assert Decoder(GRAPH)(np.zeros((0, TYING.num_states))).words == ()


def test_posteriors_are_divided_by_priors():
    labels = [[0, 0, 0, 1]]
    scaled = log_likelihoods(np.log([[0.5, 0.5]]), log_priors(labels, 2))
    assert scaled[0] == pytest.approx(np.log([0.5 / (4 / 6), 0.5 / (2 / 6)]))


def test_a_large_penalty_makes_fewer_words():
    rng = np.random.default_rng(3)
    scores = rng.standard_normal((60, TYING.num_states))
    lengths = [len(Decoder(GRAPH, scales=Scales(insertion_penalty=p))(scores).words) for p in (-5.0, 0.0, 30.0)]
    assert lengths[0] > lengths[1] > lengths[2]


def test_tuning_takes_the_scales_with_the_fewest_errors():
    rng = np.random.default_rng(4)
    utterances = {f"u{i}": noisy(rng, ["TWO", "ATE", "A"], height=2.5)[1] for i in range(6)}
    references = dict.fromkeys(utterances, "TWO ATE A")
    start = Decoder(GRAPH, scales=Scales(acoustic=0.01))
    decoder, trials = tuned(start, [utterances], references, workers=1)
    halves = [dict(list(utterances.items())[i::2]) for i in range(2)]
    assert tuned(start, halves, references, workers=1)[1] == trials
    chosen = [trial for trial in trials if trial.scales == decoder.scales]
    assert chosen[0].wer == min(trial.wer for trial in trials)
    assert decoder.scales.acoustic > 0.01


@pytest.mark.parametrize(
    ("wers", "chosen"),
    [
        ([9, 5, 9, 6, 6, 6, 9], 4),  # not the single good setting between two bad ones
        ([3, 4, 5], 0),
        ([5, 4, 3], 2),
        ([7, 7, 7], 1),
    ],
)
def test_a_setting_is_judged_together_with_its_neighbours(wers, chosen):
    trials = [Trial(Scales(acoustic=float(i)), wer / 100) for i, wer in enumerate(wers)]
    assert _best(trials).acoustic == chosen


@pytest.mark.parametrize(
    ("scores", "says"), [(np.zeros((5, 3)), "frames × 8 states"), (np.full((5, 8), np.nan), "NaN")]
)
def test_likelihoods_that_do_not_fit_are_refused(scores, says):
    with pytest.raises(SpeechError, match=says):
        Decoder(GRAPH)(scores)
