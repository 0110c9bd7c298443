"""Decoding graphs against exhaustive search, and against kaldilm."""

import itertools

import numpy as np
import pytest

pytest.importorskip("kaldifst")
import kaldifst
from tiny_speech import LEXICON, LM, lm_cost

from roundelay.errors import SpeechError
from roundelay.speech.fst import arcs, from_kaldi, vector
from roundelay.speech.graph import alignment_graph, decoding_graph, grammar, with_self_loops
from roundelay.speech.hmm import Monophones
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.lm_estimation import ngram

TYING = Monophones(LEXICON.phones, states_per_phone=2)


def shortest(fst):
    best = kaldifst.shortest_path(fst)
    ok, _, words, weight = kaldifst.get_linear_symbol_sequence(best)
    return ok, words, weight.value


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("smoothing", ["witten-bell", "kneser-ney"])
def test_the_grammar_gives_sentences_their_cost(order, smoothing):
    lm = ngram(["TWO ATE", "A TO A", "ATE TO TWO ATE"], order, LEXICON.words, smoothing)
    G = backoff_to_epsilon(vector(grammar(lm, LEXICON)))
    for words in itertools.product(LEXICON.words, repeat=3):
        sentence = kaldifst.make_linear_acceptor([LEXICON.words.index(word) + 1 for word in words])
        found, _, cost = shortest(kaldifst.compose(sentence, G))
        assert found
        # Tropical: the best of all ways to back off, of which the model's own is one.
        assert cost <= lm_cost(words, lm) + 1e-4


def backoff_to_epsilon(G):
    table = from_kaldi(G)
    mark = len(LEXICON) + 1
    ilabel = np.where(table.ilabel == mark, 0, table.ilabel)
    rows = zip(table.source, table.target, ilabel, table.olabel, table.cost, strict=True)
    silent = vector(arcs(rows, table.final, table.start))
    kaldifst.arcsort(silent, "ilabel")
    return silent


@pytest.mark.parametrize("smoothing", ["witten-bell", "kneser-ney"])
def test_the_grammar_is_the_one_that_kaldilm_makes_of_the_arpa_file(tmp_path, smoothing):
    kaldilm = pytest.importorskip("kaldilm")
    lm = ngram(["TWO ATE", "A TO A", "ATE TO TWO ATE"], 3, LEXICON.words, smoothing)
    lm.write(tmp_path / "lm.arpa")
    symbols = ["<eps>", *LEXICON.words, "#0", "<s>", "</s>"]
    (tmp_path / "words.txt").write_text("".join(f"{word} {i}\n" for i, word in enumerate(symbols)))
    text = kaldilm.arpa2fst(
        str(tmp_path / "lm.arpa"), disambig_symbol="#0", read_symbol_table=str(tmp_path / "words.txt")
    )
    theirs = backoff_to_epsilon(kaldifst.StdVectorFst(kaldifst.compile(text)))
    ours = backoff_to_epsilon(vector(grammar(lm, LEXICON)))
    for words in itertools.chain.from_iterable(itertools.product(range(1, 5), repeat=n) for n in range(4)):
        sentence = kaldifst.make_linear_acceptor(list(words))
        costs = [shortest(kaldifst.compose(sentence, G))[2] for G in (ours, theirs)]
        assert costs[0] == pytest.approx(costs[1], abs=1e-4)


def test_words_that_only_one_side_knows_are_left_out_and_nothing_in_common_is_refused():
    lm = ngram(["A B"], 2, ["A", "B"])
    graph = decoding_graph(LEXICON, lm, TYING)
    assert {LEXICON.words[i - 1] for i in set(graph.arcs.olabel) - {0}} == {"A"}
    with pytest.raises(SpeechError, match="no word in common"):
        decoding_graph(LEXICON, ngram(["a"], 1, ["a"]), TYING)


def test_self_loops_follow_every_arc_that_consumes_a_frame():
    plain = arcs([(0, 1, 1, 0, 0.0), (0, 1, 2, 7, 0.5), (1, 2, 3, 0, 0.0), (1, 0, 0, 0, 0.0)], [np.inf, np.inf, 0])
    looped, is_loop = with_self_loops(plain)
    loops = list(zip(looped.source[is_loop], looped.target[is_loop], looped.ilabel[is_loop], strict=True))
    assert all(source == target for source, target, _ in loops)
    assert sorted(label for *_, label in loops) == [1, 2, 3]
    for source, target, label in zip(looped.source, looped.target, looped.ilabel, strict=True):
        if label and source != target:
            assert (target, target, label) in loops
    assert not looped.olabel[is_loop].any()


def test_graph_labels_are_states_and_words():
    graph = decoding_graph(LEXICON, LM, TYING)
    assert set(graph.arcs.ilabel) == set(range(TYING.num_states + 1))
    assert set(graph.arcs.olabel) == set(range(len(LEXICON) + 1))
    assert len(graph.arcs) == len(graph.loop)


def test_determinisation_leaves_one_way_per_state_out_of_every_node():
    graph = decoding_graph(LEXICON, LM, TYING)
    emits = graph.arcs.ilabel > 0
    ways = np.stack([graph.arcs.source[emits], graph.arcs.ilabel[emits], graph.loop[emits]])
    assert np.unique(ways, axis=1).shape == ways.shape


def test_unknown_words_cannot_be_aligned():
    with pytest.raises(SpeechError, match="not in the lexicon: FOUR"):
        alignment_graph(LEXICON, ["TWO", "FOUR"], TYING)


def test_self_loops_must_fit_the_states():
    with pytest.raises(SpeechError, match="each of 8 states"):
        decoding_graph(LEXICON, LM, TYING).fst(np.full(3, 0.5))


def test_a_lexicon_of_one_homophone_pair_still_determinises():
    lexicon = Lexicon({"READ": ["rEd"], "RED": ["rEd"]})
    graph = decoding_graph(lexicon, ngram(["READ RED"], 2, lexicon.words), Monophones(lexicon.phones))
    assert set(graph.arcs.olabel) == {0, 1, 2}
