"""Peers behind a cut are tried again, without threads: the test looks."""

from __future__ import annotations

import pytest

from roundelay.transport.base import LEFT
from roundelay.transport.healing import LATER, Healing


class Links:
    """What one learner has lost, and which peers would answer."""

    def __init__(self, rank, wanted=(0, 1, 2, 3)):
        self.lost, self.answering, self.tried, self.reports = {}, set(), [], []
        self.healing = Healing(rank, lambda: dict(self.lost), lambda: wanted, self.reach, self.report)

    def reach(self, peer):
        self.tried.append(peer)
        if peer in self.answering:
            del self.lost[peer]
        return peer in self.answering

    def report(self, peer, reached):
        self.reports.append((peer, reached))


def test_a_cut_is_reported_once_and_so_is_its_end():
    links = Links(rank=0)
    links.lost = {2: "no heartbeat"}
    links.healing.look()
    links.healing.look()
    assert links.reports == [(2, False)]
    links.answering = {2}
    links.healing.look()
    links.healing.look()
    assert links.reports == [(2, False), (2, True)]
    assert links.tried == [2, 2, 2]


def test_the_learner_with_the_larger_id_connects_too_if_the_other_one_does_not_know_of_the_cut():
    links = Links(rank=3)
    links.lost, links.answering = {1: "it does not answer"}, {1}
    for _ in range(LATER):
        assert links.tried == []
        links.healing.look()
    assert links.tried == [1]
    assert links.reports == [(1, False), (1, True)]


def test_the_learner_with_the_larger_id_waits_to_be_connected_to():
    links = Links(rank=3)
    links.lost = {1: "no heartbeat"}
    links.healing.look()
    assert links.tried == []
    links.lost = {}  # learner 1 has connected
    links.healing.look()
    assert links.reports == [(1, False), (1, True)]


@pytest.mark.parametrize("lost", [{7: "its process ended"}, {2: LEFT}])
def test_a_peer_that_has_left_or_is_no_member_any_more_is_not_tried(lost):
    links = Links(rank=0)
    links.lost = lost
    links.healing.look()
    assert links.tried == []
    assert links.reports == []
