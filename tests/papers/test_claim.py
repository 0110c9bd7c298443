"""Verdicts follow from data, and the mathematics of the experiments is right."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest
import torch

from roundelay.errors import MissingExtraError
from roundelay.papers import CLAIMS, large_batches
from roundelay.papers.claim import Finding, Interval, verdict_from
from roundelay.papers.equal_bytes import OURS, RIVALS
from roundelay.papers.rate import _Quadratics, measured, predicted, transient
from roundelay.papers.runs import first_below
from roundelay.topology import complete, ring


def test_an_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = [
        interval.low <= 1.0 <= interval.high for interval in (Interval.of(rng.normal(1.0, 2.0, 5)) for _ in range(2000))
    ]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)  # 3 standard errors


def test_the_interval_of_one_seed_is_unbounded():
    assert Interval.of([3.0]) == Interval(3.0, -math.inf, math.inf)


def test_without_scipy_an_interval_says_which_extra_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(MissingExtraError, match=r"roundelay\[analysis\]"):
        Interval.of([1.0, 2.0])


def test_data_that_neither_hold_nor_fail_are_inconclusive():
    assert verdict_from(holds=True, fails=False) == "reproduced"
    assert verdict_from(holds=False, fails=True) == "not reproduced"
    assert verdict_from(holds=False, fails=False) == "inconclusive"


def test_documents_are_json_without_infinities():
    finding = Finding("inconclusive", "", {"a": Interval.of([1.0]), "b": math.inf, "c": 2.0})
    document = CLAIMS["rate"].document(finding, range(1), 1.0)
    figures = json.loads(json.dumps(document, allow_nan=False))["figures"]
    assert figures == {"a": {"mean": 1.0, "low": None, "high": None}, "b": None, "c": 2.0}


def test_the_time_to_a_target_that_is_never_reached_is_infinite():
    assert first_below([0, 1], [2.0, 1.5], 1.0) == math.inf


def test_prediction_and_recursion_agree_on_quadratics():
    # 128 coordinates of 512 steps with a memory of about 1 / alpha h = 28 steps: an error of about 2 % (1 s.d.).
    problem = _Quadratics.drawn(8, seed=1)
    for W in (ring(8).matrix(), complete(8).matrix()):
        assert measured(problem, W, 512, seed=0) == pytest.approx(predicted(problem, W, 512), rel=0.06)


def test_a_ring_of_learners_that_are_alike_has_no_transient():
    assert math.isnan(transient(_Quadratics.drawn(16, seed=0, unlike=0.1), ring(16)))
    assert transient(_Quadratics.drawn(16, seed=0, unlike=100.0), ring(16)) > 1e3


def test_rivals_send_one_model_per_learner_and_step():
    for name, mixing_of in RIVALS.items():
        # Full averaging by swaps would send 63 models; it is counted as a ring allreduce, which sends 2 (n-1)/n.
        expected = 63 / 2 if name == "full averaging, every 2nd step" else 1.0
        mixing = mixing_of(0)
        sent = np.mean([mixing.degrees(round).mean() for round in range(12)])
        assert sent == pytest.approx(expected, abs=0.05), name
    assert OURS in RIVALS


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
