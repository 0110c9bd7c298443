"""Transducers as arrays."""

import pickle

import numpy as np
import pytest

pytest.importorskip("kaldifst")

from roundelay.speech.fst import arcs, from_kaldi, to_kaldi, vector


def test_arcs_survive_the_way_to_kaldifst_and_back():
    given = arcs([(2, 0, 1, 2, 0.5), (0, 1, 3, 0, 0.25), (0, 0, 0, 0, 1.5)], [np.inf, 0.125, np.inf], start=2)
    again = from_kaldi(to_kaldi(given))
    rows = [sorted(zip(a.source, a.target, a.ilabel, a.olabel, a.cost, strict=True)) for a in (given, again)]
    assert rows[0] == rows[1]
    assert again.start == 2
    assert again.final.tolist() == [np.inf, 0.125, np.inf]
    assert vector(given).num_states == 3


def test_a_transducer_without_arcs_is_one_too():
    again = from_kaldi(to_kaldi(arcs([], [0.5])))
    assert (len(again), again.final.tolist()) == (0, [0.5])


def test_arcs_pickle():
    given = arcs([(0, 1, 1, 2, 0.5)], [np.inf, 0])
    again = pickle.loads(pickle.dumps(given))
    assert again.cost.tolist() == given.cost.tolist()
    assert again.num_nodes == 2
