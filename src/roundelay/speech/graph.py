"""The decoding graph H ∘ C ∘ L ∘ G: from acoustic states, frame by frame, to words.

    G   words and the costs of their sequences            an n-gram model, or one known sentence
    L   the phones of each word, optional silence         the lexicon
    C   the left and right neighbours of each phone       nothing for monophones
    H   the states of each phone in context               the tying

The four are composed, determinised and minimised; then each state gets its self-loop. Input labels are state + 1 (0 consumes no
frame). Output labels are the index of the word in the lexicon + 1.

Costs are kept apart: arcs carry the costs of L and G, and the costs of the HMM follow from the state of an arc. So the LM scale,
the insertion penalty and the transition probabilities can be changed on a finished graph. This is exact: along every path each
part has the same sum, wherever determinisation has moved it, and scaling does not change which of two paths with the same
states and words is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roundelay.errors import SpeechError
from roundelay.speech.fst import Arcs, Fst, arcs, from_kaldi, kaldifst_library, to_kaldi, vector
from roundelay.speech.hmm import Tying
from roundelay.speech.lexicon import Lexicon
from roundelay.speech.lm import BEGIN, END, Gram, NGram

SILENCE_PROB = 0.5  # probability of silence after a word, and at the beginning
_LN10 = math.log(10)


@dataclass(frozen=True, eq=False)
class Graph:
    """A finished graph as NumPy arrays. `fst` adds scales and transition probabilities."""

    arcs: Arcs  # with the costs of L and G only
    loop: NDArray[np.bool_]  # which arcs are self-loops
    words: tuple[str, ...]
    num_states: int

    def fst(self, self_loops: ArrayLike | None = None, *, lm_scale: float = 1.0, insertion_penalty: float = 0.0) -> Fst:
        """A StdConstFst with costs lm_scale·(L, G) + insertion_penalty per word − ln a_s or − ln(1 − a_s) per frame.

        Without `self_loops` a_s = ½, so that all transitions cost the same.
        """
        loops = np.full(self.num_states, 0.5) if self_loops is None else np.asarray(self_loops, dtype=np.float64)
        if loops.shape != (self.num_states,):
            raise SpeechError(f"self_loops must have one entry for each of {self.num_states} states, got {loops.shape}")
        hmm = np.zeros((2, self.num_states + 1))  # column 0: arcs that consume no frame
        hmm[:, 1:] = -np.log1p(-loops), -np.log(loops)
        cost = lm_scale * self.arcs.cost + hmm[self.loop.astype(np.intp), self.arcs.ilabel]
        cost += insertion_penalty * (self.arcs.olabel > 0)
        final = lm_scale * self.arcs.final
        return to_kaldi(replace(self.arcs, cost=cost.astype(np.float32), final=final.astype(np.float32)))


def decoding_graph(lexicon: Lexicon, lm: NGram, tying: Tying) -> Graph:
    """H ∘ C ∘ L ∘ G for recognition. Only words that are in the lexicon and in the language model can be recognised."""
    if not set(lm.vocabulary) & set(lexicon.words):
        raise SpeechError("the language model and the lexicon have no word in common; check upper and lower case")
    return _graph(lexicon, tying, grammar(lm, lexicon), determinise=True)


def alignment_graph(lexicon: Lexicon, words: Sequence[str], tying: Tying) -> Graph:
    """H ∘ C ∘ L ∘ G where G is one sentence: the search finds its pronunciations, silences and times."""
    unknown_words = lexicon.unknown([" ".join(words)])
    if unknown_words:
        raise SpeechError(
            f"words that are not in the lexicon: {', '.join(unknown_words)}; add them, or leave such utterances out"
        )
    number = _word_numbers(lexicon)
    sentence = [(i, i + 1, number[word], number[word], 0.0) for i, word in enumerate(words)]
    final = np.full(len(words) + 1, np.inf)
    final[-1] = 0
    return _graph(lexicon, tying, arcs(sentence, final), determinise=False)


def grammar(lm: NGram, lexicon: Lexicon) -> Arcs:
    """G: one node per history. The disambiguation symbol #0 leads to the next shorter history (backoff)."""
    number = _word_numbers(lexicon)
    backoff_symbol = len(number) + 1
    histories: dict[Gram, int] = {(): 0}
    for grams in lm.grams:
        for gram in grams:
            histories.setdefault(gram[:-1], len(histories))
    rows: list[tuple[int, int, int, int, float]] = []
    final = np.full(len(histories), np.inf)
    for grams in lm.grams:
        for gram, scored in grams.items():
            here, cost = histories[gram[:-1]], -scored.log10_prob * _LN10
            if gram[-1] == END:
                final[here] = cost
            elif gram[-1] in number:
                word = number[gram[-1]]
                rows.append((here, _longest(gram, histories, lm.order), word, word, cost))
            if gram in histories:
                cost = -scored.log10_backoff * _LN10
                rows.append((histories[gram], _longest(gram[1:], histories, lm.order), backoff_symbol, 0, cost))
    return arcs(rows, final, start=histories.get((BEGIN,), 0))


def _longest(gram: Gram, histories: dict[Gram, int], order: int) -> int:
    """The node of the longest suffix of an n-gram that is a history."""
    gram = gram[max(0, len(gram) - order + 1) :]
    while gram not in histories:
        gram = gram[1:]
    return histories[gram]


def _word_numbers(lexicon: Lexicon) -> dict[str, int]:
    return {word: i for i, word in enumerate(lexicon.words, start=1)}


def lexicon_arcs(lexicon: Lexicon, tying: Tying, *, marked: bool) -> Arcs:
    """L: a loop over all pronunciations, with optional silence before the first word and after each word.

    Input labels are the phone's number + 1. Higher labels are the disambiguation symbols (marks) #0, #1, …, if `marked`; #0
    passes the backoff of G.
    """
    number, mark_0 = _word_numbers(lexicon), len(tying.phones) + 1
    loop, silent, begin = 0, 1, 2
    with_silence, without = -math.log(SILENCE_PROB), -math.log(1 - SILENCE_PROB)
    rows = [(begin, loop, 0, 0, without), (begin, loop, 1, 0, with_silence), (silent, loop, 1, 0, 0.0)]
    if marked:
        rows.append((loop, loop, mark_0, len(number) + 1, 0.0))
    states = 3
    for entry in lexicon.entries():
        labels = [tying.number(phone) + 1 for phone in entry.phones]
        labels += [mark_0 + entry.mark] if marked and entry.mark else []
        path = [loop, *range(states, states + len(labels) - 1)]
        states += len(labels) - 1
        words = [number[entry.word]] + [0] * (len(labels) - 1)
        rows += [(path[i], path[i + 1], labels[i], words[i], 0.0) for i in range(len(labels) - 1)]
        rows.append((path[-1], loop, labels[-1], words[-1], entry.cost + without))
        rows.append((path[-1], silent, labels[-1], words[-1], entry.cost + with_silence))
    final = np.full(states, np.inf)
    final[loop] = 0
    return arcs(rows, final, start=begin)


def _graph(lexicon: Lexicon, tying: Tying, G: Arcs, *, determinise: bool) -> Graph:
    kaldifst = kaldifst_library()
    LG = kaldifst.compose(_lexicon_fst(lexicon, tying, determinise), to_kaldi(G))
    if determinise:
        _compact(LG)
    marks = range(len(tying.phones) + 1, len(tying.phones) + 2 + lexicon.num_marks)
    CLG, windows = kaldifst.compose_context(list(marks), tying.context_width, tying.context_width // 2, LG)
    H = vector(_states_of(windows, tying))
    kaldifst.arcsort(H, "olabel")
    HCLG = kaldifst.compose(H, CLG)
    if determinise:
        _compact(HCLG)
    unmarked = from_kaldi(HCLG)
    unmarked = replace(unmarked, ilabel=np.where(unmarked.ilabel > tying.num_states, 0, unmarked.ilabel))
    looped, loop = with_self_loops(unmarked)
    return Graph(looped, loop, lexicon.words, tying.num_states)


@lru_cache(maxsize=4)  # alignment uses the same one for every utterance
def _lexicon_fst(lexicon: Lexicon, tying: Tying, marked: bool) -> Fst:  # noqa: FBT001
    L = vector(lexicon_arcs(lexicon, tying, marked=marked))
    kaldifst_library().arcsort(L, "olabel")
    return L


def _compact(fst: Fst) -> None:
    kaldifst = kaldifst_library()
    kaldifst.determinize_star(fst)
    kaldifst.minimize_encoded(fst)


def _states_of(windows: Sequence[Sequence[int]], tying: Tying) -> Arcs:
    """H: the chain of states of each context window of phones. Marks pass through; their labels come after the states.

    `windows[i]` belongs to the label i of C, as in Kaldi: nothing for 0, one number ≤ 0 for a mark, otherwise labels of phones.
    """
    phones = np.array(
        [i for i, window in enumerate(windows) if window and window[tying.context_width // 2 % len(window)] > 0]
    )
    marks = [i for i, window in enumerate(windows) if len(window) == 1 and window[0] <= 0]
    n, loop = tying.states_per_phone, 0
    padded = np.array([windows[i] for i in phones], dtype=np.int32).reshape(len(phones), tying.context_width)
    # Labels of phones are number + 1. Label 0 means outside the utterance; silence, number 0, is assumed there.
    numbers = np.maximum(padded - 1, 0)
    chains = tying.chains(numbers[:, 0], numbers[:, tying.context_width // 2], numbers[:, -1]) + 1
    inner = 1 + np.arange(len(phones) * (n - 1), dtype=np.int32).reshape(len(phones), n - 1)
    ends = np.full((len(phones), 1), loop, dtype=np.int32)
    mark_labels = tying.num_states + 1 + np.arange(len(marks))
    at_loop = np.full(len(marks), loop)
    olabel = np.zeros((len(phones), n), dtype=np.int32)
    olabel[:, 0] = phones
    columns = [
        np.concatenate([np.concatenate([ends, inner], axis=1).ravel(), at_loop]),
        np.concatenate([np.concatenate([inner, ends], axis=1).ravel(), at_loop]),
        np.concatenate([chains.ravel(), mark_labels]),
        np.concatenate([olabel.ravel(), marks]),
    ]
    source, target, ilabel, out = (column.astype(np.int32) for column in columns)
    final = np.full(1 + inner.size, np.inf, dtype=np.float32)
    final[loop] = 0
    return Arcs(source, target, ilabel, out, np.zeros(len(source), dtype=np.float32), final)


def with_self_loops(graph: Arcs) -> tuple[Arcs, NDArray[np.bool_]]:
    """The graph with a self-loop after every arc that consumes a frame, and which arcs are such loops.

    The loop has the label of the arc. It is put on the target node if all arcs into that node have this label. Otherwise a new
    node with the loop is put before the target, one for each label.
    """
    emits = graph.ilabel > 0
    entered, which = np.unique(np.stack([graph.target[emits], graph.ilabel[emits]]), axis=1, return_inverse=True)
    node, label = entered
    ways_in = np.bincount(node, minlength=graph.num_nodes)
    ways_in += np.bincount(graph.target[~emits], minlength=graph.num_nodes)
    ways_in[graph.start] += 1
    shared = ways_in[node] > 1
    home = node.copy()
    home[shared] = graph.num_nodes + np.arange(shared.sum())
    target = graph.target.copy()
    target[emits] = home[which.ravel()]
    zeros = np.zeros(len(home) + int(shared.sum()), dtype=np.int32)
    looped = Arcs(
        np.concatenate([graph.source, home, home[shared]]),
        np.concatenate([target, home, node[shared]]),
        np.concatenate([graph.ilabel, label, zeros[: shared.sum()]]),
        np.concatenate([graph.olabel, zeros]),
        np.concatenate([graph.cost, zeros.astype(np.float32)]),
        np.concatenate([graph.final, np.full(int(shared.sum()), np.inf, dtype=np.float32)]),
        graph.start,
    )
    is_loop = np.zeros(len(looped), dtype=np.bool_)
    is_loop[len(graph) : len(graph) + len(home)] = True
    return looped, is_loop
