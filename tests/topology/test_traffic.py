"""Models sent per learner."""

from __future__ import annotations

import pytest

from roundelay.topology import (
    Mixing,
    base_graph,
    complete,
    odd_even_ring,
    random_matching,
    random_ring,
    ring,
    star,
)
from roundelay.topology.traffic import sends_in, sends_per_round


@pytest.mark.parametrize(
    ("mixing", "sends"),
    [
        (ring(8), 2),
        (random_ring(8), 2),
        (complete(8), 7),
        (star(8), 14 / 8),
        (odd_even_ring(8), 1),
        (odd_even_ring(9), 8 / 9),
        (random_matching(9), 8 / 9),
        (ring(1), 0),
    ],
    ids=repr,
)
def test_sends_per_round_is_the_mean_degree(mixing, sends):
    assert sends_per_round(mixing) == pytest.approx(sends)


@pytest.mark.parametrize("mixing", [base_graph(11), odd_even_ring(9), ring(5)], ids=repr)
@pytest.mark.parametrize("rounds", [0, 1, 7, 40])
def test_sends_in_some_rounds_add_up(mixing, rounds):
    assert sends_in(mixing, rounds) == pytest.approx(sum(mixing.degrees(round).mean() for round in range(rounds)))


def test_a_random_mixing_of_the_users_own_is_sampled_over_several_rounds():
    class EveryOtherRound(Mixing):
        def row(self, rank, round=0):
            return {0: 0.5, 1: 0.5} if round % 2 else {rank: 1.0}

    assert sends_per_round(EveryOtherRound("now-and-then", 2, None)) == 0.5
