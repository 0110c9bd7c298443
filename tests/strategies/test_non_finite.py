"""Non-finite weights are never accepted from a peer."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from worlds import train, weights, world

from roundelay.clock import VirtualClock
from roundelay.cluster.membership import Membership
from roundelay.errors import RefusedError
from roundelay.simulation import run
from roundelay.strategies import ADPSGD, DPSGD
from roundelay.topology import ring
from roundelay.transport import SimulatedNetwork
from roundelay.weights import Flat, Replica, all_finite


def poison(learner, value):
    with torch.no_grad():
        learner.module.tail[-1] = value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_adpsgd_goes_on_without_the_weights_of_a_learner_that_has_diverged(value):
    strategies = [ADPSGD(ring(4), max_lead=3) for _ in range(4)]
    clock, network, learners = world(strategies)
    poison(learners[2], value)
    train(clock, network, learners, [40] * 4)
    ends = weights(learners)
    assert np.isfinite(ends[[0, 1, 3]]).all()
    assert not np.isfinite(ends[2]).all()
    refused = [transport.refused.counts["non-finite weights"] for transport in network.transports]
    assert refused[1] > 5, "its calls, and its replies"
    assert refused[3] > 5
    assert refused[0] == 0, "not a neighbour of it"
    assert strategies[1].metrics()["exchanges_with_2"] > 5, "a refused exchange is no death"
    for rank in (0, 1, 3):
        assert strategies[rank].metrics()["exchanges_finished"] > 0


def test_a_learner_that_all_peers_refuse_still_takes_its_steps():
    strategies = [ADPSGD(ring(2), max_lead=1) for _ in range(2)]
    clock, network, learners = world(strategies, latency_s=0.0)
    poison(learners[0], math.nan)
    train(clock, network, learners, [10, 10])
    assert [strategy.metrics()["exchanges_finished"] for strategy in strategies] == [0, 0]


def test_adpsgd_refuses_before_it_changes_anything():
    transport = SimulatedNetwork(VirtualClock(), 2).transports[0]
    module = torch.nn.Linear(4, 4)
    strategy = ADPSGD(ring(2))
    strategy.attach(Replica(module), transport, Membership.of(2))
    before = strategy.weights().storage.clone()
    request = before.clone()
    request.view(torch.float32)[3] = math.nan
    with pytest.raises(RefusedError, match="non-finite weights"), strategy._answer(1, request, request) as exchange:
        exchange.apply(0)
    small = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(RefusedError, match="another model"), strategy._answer(1, small, small):
        pass
    assert torch.equal(strategy.weights().storage, before)
    assert strategy.metrics()["exchanges_served"] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_dpsgd_names_the_neighbour_whose_weights_are_not_finite_and_mixes_nothing(value):
    clock, network, learners = world([DPSGD(ring(3)) for _ in range(3)])
    poison(learners[1], value)
    with pytest.raises(RefusedError, match="learner 1 was refused: non-finite weights"):
        run(clock, learners, 3)
    assert np.isfinite(weights(learners)[[0, 2]]).all()
    assert network.transports[0].refused.counts["non-finite weights"] == 1


@given(
    st.lists(st.floats(width=32), max_size=30),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_all_finite_says_what_isfinite_says_of_each(values, dtype):
    parts = [torch.tensor(values[::2], dtype=dtype), torch.tensor(values[1::2], dtype=dtype)]
    assert all_finite(parts) == all(bool(torch.isfinite(part).all()) for part in parts)


def test_large_finite_weights_are_finite():
    assert all_finite([torch.full((1000,), 6e4, dtype=torch.float16), torch.full((1000,), 3e38)])


def test_layouts_differ_in_size_and_dtype_only():
    flats = [
        Flat([torch.zeros(3)]),
        Flat([torch.zeros(4)]),
        Flat([torch.zeros(3, dtype=torch.float16)]),
        Flat([torch.zeros(3), torch.zeros(3, dtype=torch.float16)]),
    ]
    assert len({flat.layout.code for flat in flats}) == 4
    assert Flat([torch.ones(3)]).layout.code == flats[0].layout.code
    assert 0 not in {flat.layout.code for flat in flats}
