"""How AD-PSGD's weights travel over sockets: as they are, or in a shorter dtype, rounded once for both ends."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from loopback import PATIENCE_S, loopback, together
from torch import nn

from roundelay.cluster.membership import Membership
from roundelay.errors import RefusedError, StrategyError
from roundelay.learner import Learner
from roundelay.strategies import ADPSGD
from roundelay.topology import ring
from roundelay.transport.solo import SoloTransport
from roundelay.weights import flat
from roundelay.weights.replica import Replica

COUNT = 1000
EPSILON = 2.0**-11  # what rounding to float16 may change, of a number
SMALLEST = 2.0**-24  # float16


def attached(values, wire="float16"):
    """A strategy with these float32 weights, and no peer."""
    module = nn.ParameterList([nn.Parameter(torch.tensor(values, dtype=torch.float32))])
    strategy = ADPSGD(ring(1), wire=wire)
    strategy.attach(Replica(module), SoloTransport(), Membership.of(1))
    return strategy


def packed(strategy):
    """What the strategy sends."""
    buffer = torch.zeros_like(strategy.weights().storage)
    with strategy._live.call(1, buffer, buffer) as end:
        for k in range(len(end.pieces)):
            end.prepare(k)
    return buffer[: end.nbytes]


def answered(strategy, request):
    """Have the strategy answer a request, in place."""
    with strategy._answer(1, request, request) as end:
        for k in range(len(end.pieces)):
            end.apply(k)


def live(strategy):
    return strategy.weights().views[0].numpy().copy()


def meet(first, second, exchanges, **options):
    """Two learners over real sockets that begin with these weights and only exchange; their weights, metrics and bytes sent."""
    both_ready = threading.Barrier(2)
    with loopback(2, share_memory=False) as transports:

        def work(rank):
            module = nn.ParameterList([nn.Parameter(torch.zeros(COUNT))])
            optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
            strategy = ADPSGD(ring(2), max_lead=1, **options)
            with Learner(module, optimizer, strategy, transports[rank]) as learner:
                with strategy.at_rest() as weights:
                    weights.views[0].copy_(torch.as_tensor((first, second)[rank]))
                both_ready.wait(PATIENCE_S)
                for _ in range(exchanges):
                    module[0].grad = torch.zeros(COUNT)
                    optimizer.step()
                learner.finish()
                return module[0].detach().numpy().copy(), learner.metrics()

        ends = together(2, work)
    return [weights for weights, _ in ends], [metrics for _, metrics in ends]


@pytest.mark.parametrize("piece", [2**18, 300])
def test_an_exchange_is_what_numpy_does_with_float16(piece, monkeypatch):
    monkeypatch.setattr(flat, "PIECE", piece)
    rng = np.random.default_rng(0)
    s, x = (rng.standard_normal(COUNT).astype(np.float32) for _ in range(2))
    caller, answering = attached(s), attached(x)
    message = packed(caller)
    answered(answering, message)
    with caller._own._begin(1, message, message) as end:
        for k in range(len(end.pieces)):
            end.apply(k)
    d = (s.astype(np.float16).astype(np.float32) - x).astype(np.float16)
    c = d * np.float64(np.float32(1 / 3))
    # Whether torch rounds once or twice depends on the processor.
    ulp = np.spacing(np.maximum(np.abs(s), np.abs(x)))
    assert (np.abs(live(answering) - (x + c)) <= ulp).all()
    assert (np.abs(live(caller) - (s - c)) <= ulp).all()


@given(st.lists(st.floats(-65504, 65504, width=32), min_size=40, max_size=80))
def test_what_is_sent_differs_by_half_a_unit_of_float16_at_most(values):
    strategy = attached(values)
    message = packed(strategy)
    (sent,) = strategy.weights().layout.narrowed(torch.float16).parts_of(message)
    assert message.nbytes < strategy.weights().storage.nbytes
    error = np.abs(sent.float().numpy() - live(strategy))
    assert (error <= np.maximum(EPSILON * np.abs(live(strategy)), SMALLEST / 2)).all()


@pytest.mark.parametrize("large", [1e6, -7e4, float("inf")])
def test_what_does_not_fit_is_refused_and_then_goes_in_full(large):
    strategy, answering = attached([large] + [1.0] * COUNT), attached([0.0] * (COUNT + 1))
    with pytest.raises(RefusedError, match="non-finite weights"):
        answered(answering, packed(strategy))
    strategy._live.stop_narrowing()
    assert torch.equal(packed(strategy), strategy.weights().storage)


def test_by_default_every_bit_is_sent():
    strategy = attached(np.linspace(0, 1, COUNT), wire=None)
    assert torch.equal(packed(strategy), strategy.weights().storage)


def test_bfloat16_carries_what_is_too_large_for_float16():
    strategy = attached([1e30] * COUNT, wire="bfloat16")
    assert packed(strategy).nbytes < strategy.weights().storage.nbytes


def test_another_wire_dtype_is_refused_with_those_that_are_allowed():
    with pytest.raises(StrategyError, match="wire must be None, 'float16' or 'bfloat16', got 'int8'"):
        ADPSGD(wire="int8")


def test_a_model_that_would_not_be_shorter_is_sent_as_it_is():
    strategy = attached([1.0, 2.0, 3.0])
    assert torch.equal(packed(strategy), strategy.weights().storage)


@pytest.mark.parametrize("wire", [None, "float16", "bfloat16"])
def test_over_sockets_the_sum_is_conserved_and_the_spread_falls_to_what_rounding_leaves(wire):
    rng = np.random.default_rng(2)
    first, second = (rng.standard_normal(COUNT).astype(np.float32) for _ in range(2))
    ends, metrics = meet(first, second, 40, wire=wire)
    np.testing.assert_allclose(ends[0] + ends[1], first + second, rtol=0, atol=2e-6)
    rounding = {None: 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[wire]
    floor = 2 * rounding * np.abs(ends[0] + ends[1]) / 2 + 1e-6
    assert (np.abs(ends[0] - ends[1]) <= floor).all()
    exchanges = sum(each["exchanges_finished"] for each in metrics)
    per_exchange = sum(each["bytes_sent"] for each in metrics) / exchanges
    assert per_exchange == pytest.approx(2 * COUNT * (2 if wire else 4), rel=0.1)


@pytest.mark.parametrize("first", [3e5, 6e4])
def test_learners_whose_numbers_or_differences_do_not_fit_meet_all_the_same(first):
    ends, _ = meet(np.full(COUNT, first, np.float32), np.full(COUNT, -6e4, np.float32), 20, wire="float16")
    np.testing.assert_allclose(ends, np.full((2, COUNT), (first - 6e4) / 2), rtol=1e-3, atol=1.0)
