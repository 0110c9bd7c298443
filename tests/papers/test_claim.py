"""Verdicts come from data, and the experiments' own mathematics is right."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from roundelay.papers import CLAIMS, frames, large_batches
from roundelay.papers.asynchronous import first_below, pace
from roundelay.papers.claim import Finding, Interval, judged
from roundelay.papers.equal_bytes import OURS, RIVALS
from roundelay.papers.rate import _Quadratics, measured, predicted, transient
from roundelay.simulation.network import Links
from roundelay.simulation.problems import digits
from roundelay.strategies import Allreduce, DelayByOne
from roundelay.topology import complete, ring


def test_an_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = [
        interval.low <= 1.0 <= interval.high for interval in (Interval.of(rng.normal(1.0, 2.0, 5)) for _ in range(2000))
    ]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)  # 3 standard errors


def test_one_seed_says_nothing():
    assert Interval.of([3.0]) == Interval(3.0, -math.inf, math.inf)


def test_neither_holding_nor_failing_is_no_verdict():
    assert judged(holds=True, fails=False) == "reproduced"
    assert judged(holds=False, fails=True) == "not reproduced"
    assert judged(holds=False, fails=False) == "inconclusive"


def test_documents_are_json_without_infinities():
    finding = Finding("inconclusive", "", {"a": Interval.of([1.0]), "b": math.inf, "c": 2.0})
    document = CLAIMS["rate"].document(finding, range(1), 1.0)
    figures = json.loads(json.dumps(document, allow_nan=False))["figures"]
    assert figures == {"a": {"mean": 1.0, "low": None, "high": None}, "b": None, "c": 2.0}


def test_a_target_that_is_never_reached_is_reached_never():
    assert first_below([0, 1], [2.0, 1.5], 1.0) == math.inf


def test_prediction_and_recursion_agree_on_quadratics():
    # 128 coordinates of 512 steps with a memory of about 1 / alpha h = 28 steps: an error of about 2 % (1 s.d.).
    problem = _Quadratics.drawn(8, seed=1)
    for W in (ring(8).matrix(), complete(8).matrix()):
        assert measured(problem, W, 512, seed=0) == pytest.approx(predicted(problem, W, 512), rel=0.06)


def test_a_ring_of_learners_that_are_alike_has_no_transient():
    assert math.isnan(transient(_Quadratics.drawn(16, seed=0, unlike=0.1), ring(16)))
    assert transient(_Quadratics.drawn(16, seed=0, unlike=100.0), ring(16)) > 1e3


def test_rivals_send_one_model_a_step():
    for name, mixing_of in RIVALS.items():
        expected = {"full averaging, every 2nd step": 63 / 2}.get(
            name, 1.0
        )  # by swaps; a ring allreduce sends 2 (n-1)/n
        mixing = mixing_of(0)
        sent = np.mean([mixing.degrees(round).mean() for round in range(12)])
        assert sent == pytest.approx(expected, abs=0.05), name
    assert OURS in RIVALS


def test_pace_is_that_of_the_slowest_plus_what_cannot_hide():
    links = Links(bandwidth_Bps=1.0)
    assert pace(DelayByOne, links, 0.3, [1.0, 2.0, 1.0]) == pytest.approx(2.0)
    assert pace(Allreduce, links, 0.3, [1.0, 2.0, 1.0]) == pytest.approx(2.0 + 2 * 2 * 0.1)


def test_clipping_leaves_small_gradients_alone_and_shortens_large_ones():
    gradients = [torch.tensor([[3.0, 0.0], [0.1, 0.0]]), torch.tensor([[4.0], [0.0]])]
    large_batches._clip(gradients, 1.0)
    assert gradients[0].tolist() == [[pytest.approx(0.6), 0.0], [pytest.approx(0.1), 0.0]]
    assert gradients[1].tolist() == [[pytest.approx(0.8)], [0.0]]


def test_without_its_data_a_claim_is_inconclusive_and_says_what_it_needs(monkeypatch):
    monkeypatch.delenv("ROUNDELAY_DATA", raising=False)
    finding = large_batches.experiment(range(3), lambda part: None)
    assert finding.verdict == "inconclusive"
    assert "an4.tar.xz" in finding.sentence


def test_phones_are_read_from_the_alignment():
    spans = frames._phones("# utt chan start dur phone word\nu1 1 0.00 0.31 SIL -1\nu1 1 0.31 0.09 Y 0\n")
    assert spans == {"u1": [(0.0, 0.31, "SIL"), (0.31, pytest.approx(0.4), "Y")]}


def test_shards_do_not_overlap_and_batches_are_a_function_of_seed_and_step():
    shards = digits().shards(8, seed=1)
    assert len(set(shards.of.flatten().tolist())) == shards.of.numel()
    again = digits().shards(8, seed=1)
    assert torch.equal(shards.batch(5, 4)[0], again.batch(5, 4)[0])
    assert not torch.equal(shards.batch(5, 4)[0], shards.batch(6, 4)[0])
