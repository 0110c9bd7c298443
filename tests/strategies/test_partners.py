"""Which peer is called next."""

import logging

import pytest

from roundelay.cluster.membership import Membership
from roundelay.strategies.partners import Partners
from roundelay.topology import complete, random_matching, random_ring, ring
from roundelay.transport.base import LEFT, NO_CALLS


def partners_of(mixing, rank=0, members=None):
    partners = Partners(rank)
    partners.use(mixing, members or Membership.of(mixing.size))
    return partners


def test_partners_are_those_of_the_mixing_round_by_round():
    mixing = random_ring(8, seed=3)
    partners = partners_of(mixing, rank=5)
    assert [partners.next() for _ in range(20)] == [mixing.partner(5, round) for round in range(20)]


def test_positions_in_the_mixing_are_the_living_in_order():
    partners = partners_of(complete(3), rank=4, members=Membership((1, 4, 9), generation=2))
    assert {partners.next() for _ in range(4)} == {1, 9}


def test_a_lost_a_silent_and_a_busy_peer_are_left_out():
    partners = partners_of(complete(5))
    partners.lose(1, "its process ended")
    partners.set_silent(2, silent=True)
    assert {partners.next(busy=3) for _ in range(8)} == {4}
    partners.set_silent(2, silent=False)
    assert {partners.next() for _ in range(8)} == {2, 3, 4}


def test_members_of_a_new_membership_do_not_count_as_lost():
    partners = partners_of(ring(3))
    partners.lose(1, "its process ended")
    partners.use(ring(3), Membership.of(3))
    assert {partners.next() for _ in range(4)} == {1, 2}


def test_a_peer_that_falls_silent_after_it_was_lost_is_called_again_once_it_has_come_back():
    partners = partners_of(ring(3))
    partners.lose(1, "its process ended")
    partners.set_silent(1, silent=True)
    partners.use(ring(3), Membership.of(3))
    assert {partners.next() for _ in range(4)} == {1, 2}


@pytest.mark.parametrize("mixing", [random_ring(3), random_matching(3)], ids=repr)
def test_a_learner_whose_one_peer_of_two_is_lost_never_says_that_it_is_alone(mixing, caplog):
    partners = partners_of(mixing)
    partners.lose(1, "its process ended")
    with caplog.at_level(logging.WARNING, "roundelay"):
        assert {partners.next() for _ in range(400)} == {2}
    assert not caplog.records


def test_alone_is_said_once_and_rounds_are_not_searched(caplog):
    partners = partners_of(random_ring(3))
    partners.lose(1, "its process ended")
    partners.lose(2, "its process ended")
    with caplog.at_level(logging.WARNING, "roundelay"):
        assert [partners.next() for _ in range(3)] == [None] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "learner 0 has no neighbour left to exchange with and goes on alone"
    ]
    assert partners.round == 0


def test_a_neighbour_on_a_fixed_graph_is_not_replaced_by_a_learner_that_is_none():
    partners = partners_of(ring(6))
    partners.lose(1, "its process ended")
    partners.lose(5, "its process ended")
    assert partners.next() is None


def test_a_change_is_done_by_the_next_silence_and_not_before():
    partners = partners_of(ring(3))
    first = partners.change()
    assert not first.done()
    partners.set_silent(1, silent=True)
    assert first.done()
    second = partners.change()
    assert not second.done()
    partners.set_silent(1, silent=False)
    assert second.done()


@pytest.mark.parametrize(("reason", "said"), [("its process ended", True), (LEFT, False), (NO_CALLS, False)])
def test_a_learner_is_alone_if_its_peers_were_lost_not_if_one_has_finished(reason, said, caplog):
    partners = Partners(0)
    partners.use(ring(3), Membership.of(3))
    partners.lose(1, "its process ended")
    assert partners.next() == 2
    partners.lose(2, reason)
    assert partners.next() is None
    assert ("goes on alone" in caplog.text) is said
