"""A language of three words, and an exhaustive search for its best sentence: slow, obvious, independent of any transducer."""

import itertools
import math

import numpy as np

from roundelay.speech.lexicon import Lexicon
from roundelay.speech.lm import BEGIN, END
from roundelay.speech.lm_estimation import ngram

# TO and TWO are homophones, A begins ATE, and TO has a second pronunciation, which is rarer.
COUNTS = {("TO", ("t", "u")): 3, ("TO", ("t", "a")): 1}
PRONUNCIATION_COST = {"ta": math.log(3.5 / 1.5)}
LEXICON = Lexicon({"A": ["a"], "ATE": ["at"], "TO": ["tu", "ta"], "TWO": ["tu"]}, counts=COUNTS)
LM = ngram(["TWO ATE", "A TO A", "ATE TO"], 2, LEXICON.words)


def viterbi_cost(chain, costs_TS, loops):
    """The cheapest way through a chain of states, all of which must be visited in order."""
    T = len(costs_TS)
    best = np.full(len(chain), np.inf)
    for t in range(T):
        stay = best - np.log(loops[chain])
        enter = np.concatenate([[0.0 if t == 0 else np.inf], best[:-1]]) - np.log(1 - loops[chain])
        best = np.minimum(stay, enter) + costs_TS[t, chain]
    return best[-1]


def sentences(longest):
    for length in range(longest + 1):
        yield from itertools.product(LEXICON.words, repeat=length)


def phone_strings(words):
    """All ways to say some words, with the cost of pronunciations and silences (½ each) in L."""
    for prons in itertools.product(*(LEXICON[word] for word in words)):
        said = sum(PRONUNCIATION_COST.get("".join(pron), 0.0) for pron in prons)
        for silences in itertools.product([False, True], repeat=len(words) + 1):
            parts = [["SIL"] * silences[0]]
            for pron, silent in zip(prons, silences[1:], strict=True):
                parts += [list(pron), ["SIL"] * silent]
            yield list(itertools.chain(*parts)), said + math.log(2) * len(silences)


def lm_cost(words, lm=LM):
    total, history = 0.0, (BEGIN,)
    for word in (*words, END):
        total -= lm.log10_prob(word, history) * math.log(10)
        history = (*history, word)
    return total


def chain_of(phones, tying):
    numbers = [0, *map(tying.number, phones), 0]
    chains = [
        tying.chains(left, phone, right) for left, phone, right in zip(numbers, numbers[1:], numbers[2:], strict=False)
    ]
    return np.concatenate(chains).astype(int)


def cheapest(log_likelihoods_TS, tying, loops, candidates, *, acoustic, lm_scale, penalty, language_cost=lm_cost):
    """The best sentence among candidates and its cost, by trying everything."""
    costs = -acoustic * np.asarray(log_likelihoods_TS, dtype=np.float64)
    best = (math.inf, ())
    for words in candidates:
        fixed = lm_scale * language_cost(words) + penalty * len(words)
        for phones, silences in phone_strings(words):
            if phones and len(phones) * tying.states_per_phone <= len(costs):
                cost = fixed + lm_scale * silences + viterbi_cost(chain_of(phones, tying), costs, loops)
                best = min(best, (cost, words))
    return best
