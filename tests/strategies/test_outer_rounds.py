"""Rounds between learners of which some are late, gone, silent, or of another opinion."""

import pytest
import torch

from roundelay.clock import VirtualClock
from roundelay.errors import RefusedError
from roundelay.strategies.outer_rounds import OuterRounds
from roundelay.transport import SimulatedNetwork

LATENCY = 0.01


class Rounds:
    """Three learners on the virtual clock. An `eager` one begins a round as soon as a peer asks for it.

    `unknown`: pairs of a learner and one of which it has not been told yet.
    """

    def __init__(self, eager=(), unknown=()):
        self.clock = VirtualClock()
        self.network = SimulatedNetwork(self.clock, 3, latency_s=LATENCY)
        self.learners, self.ended = [], {}
        for rank, transport in enumerate(self.network.transports):
            asked = (lambda rank=rank: self.begin(rank)) if rank in eager else (lambda: None)
            rounds = OuterRounds(transport, asked, lambda peer, rank=rank: (rank, peer) not in unknown)
            transport.on_lost(lambda peer, reason, rounds=rounds: rounds.lose(peer))
            transport.on_silent(rounds.set_silent)
            self.learners.append(rounds)

    def begin(self, rank, peers=None, length=5, round=None):
        rounds = self.learners[rank]
        number = rounds.state.next_round if round is None else round
        message = torch.full((length,), 10 * rank + number, dtype=torch.uint8)
        others = [peer for peer in range(3) if peer != rank] if peers is None else peers
        self.ended[rank] = rounds.begin(number, others, message)

    def run(self, seconds=1.0):
        self.clock.run(until=self.clock.now() + seconds)

    def received(self, rank):
        assert self.ended[rank].done()
        return {peer: message.tolist()[0] for peer, message in sorted(self.learners[rank].state.received.items())}


def test_all_learners_of_a_round_get_the_messages_of_the_others():
    rounds = Rounds()
    for number in range(3):
        for rank in (1, 0, 2):
            rounds.begin(rank)
        rounds.run()
        assert [rounds.received(rank) for rank in range(3)] == [
            {peer: 10 * peer + number for peer in range(3) if peer != rank} for rank in range(3)
        ]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_round_waits_for_a_learner_that_does_not_begin_when_asked(late):
    rounds = Rounds()
    for rank in {0, 1, 2} - {late}:
        rounds.begin(rank)
    rounds.run()
    assert not any(ended.done() for ended in rounds.ended.values())
    assert rounds.learners[late].state.wanted
    rounds.begin(late)
    rounds.run(5 * LATENCY)
    assert all(len(rounds.received(rank)) == 2 for rank in range(3))
    assert not rounds.learners[late].state.wanted


def test_a_learner_that_is_asked_may_begin_at_once():
    rounds = Rounds(eager={0, 2})
    rounds.begin(1)
    rounds.run(8 * LATENCY)
    assert all(len(rounds.received(rank)) == 2 for rank in range(3))


@pytest.mark.parametrize("gone", [0, 2])
def test_a_round_ends_without_a_learner_that_dies(gone):
    rounds = Rounds()
    for rank in {0, 1, 2} - {gone}:
        rounds.begin(rank)
    rounds.network.kill(gone, at=0.5)
    rounds.run()
    other = 2 - gone
    assert rounds.received(1) == {other: 10 * other}
    assert rounds.received(other) == {1: 10}


def test_a_round_ends_without_a_silent_learner_which_hears_of_it_later():
    rounds = Rounds()
    rounds.network.cut(0, 1, at=0.0)
    rounds.run(0.1)
    for rank in range(3):
        rounds.begin(rank)
    rounds.run(2.0)
    assert rounds.received(0) == {2: 20}
    assert rounds.received(1) == {2: 20}
    assert rounds.received(2) == {0: 0, 1: 10}


def test_a_learner_that_has_passed_the_round_is_left_out_and_the_other_catches_up():
    rounds = Rounds()
    for rank in (0, 1):
        rounds.begin(rank, peers=[1 - rank], round=7)
    rounds.run()
    rounds.begin(2)
    rounds.run()
    assert rounds.received(2) == {}
    assert rounds.learners[2].state.next_round == 7
    rounds.begin(2)
    rounds.run()
    assert rounds.received(2) == {}, "the others are through with round 7"
    for rank in range(3):
        rounds.begin(rank)
    rounds.run()
    assert all(len(rounds.received(rank)) == 2 for rank in range(3))


@pytest.mark.parametrize("first", [0, 1])
def test_learners_with_another_membership_do_not_wait_for_each_other(first):
    """One has learner 2 as its neighbour, the other one's neighbour is the first."""
    rounds = Rounds()
    rounds.begin(first, peers=[1 - first])
    rounds.run(0.5)
    rounds.begin(1 - first, peers=[2])
    rounds.begin(2, peers=[1 - first])
    rounds.run()
    assert rounds.received(first) == {}
    assert 2 in rounds.received(1 - first)


def test_messages_of_another_length_leave_both_ends_out():
    rounds = Rounds()
    for rank in range(3):
        rounds.begin(rank, length=9 if rank == 1 else 5)
    rounds.run()
    assert [rounds.received(rank) for rank in range(3)] == [{2: 20}, {}, {0: 0}]


@pytest.mark.parametrize("leaving", [0, 1, 2])
@pytest.mark.parametrize("when", ["before", "while", "after"])
def test_a_learner_that_leaves_holds_up_no_other(leaving, when):
    """Before a round, with a round of its own under way, or when all others have begun."""
    rounds = Rounds(eager={leaving} if when == "while" else set())
    others = {0, 1, 2} - {leaving}
    if when == "before":
        rounds.learners[leaving].leave()
    rounds.begin(min(others))
    rounds.run(3 * LATENCY)
    if when == "while":
        assert not rounds.ended[leaving].done()
    if when != "before":
        rounds.learners[leaving].leave()
    rounds.begin(max(others))
    rounds.run()
    assert all(ended.done() for ended in rounds.ended.values())
    assert max(others) in rounds.received(min(others))
    assert min(others) in rounds.received(max(others))


def test_a_refused_message_leaves_both_ends_out():
    rounds = Rounds()
    transport = rounds.network.transports[0]
    call = transport.call

    def refused(peer, asked):
        if len(asked.buffer) > 24 and peer == 1:
            future = transport.pending((peer,))
            future.set_exception(RefusedError(peer, "checksum"))
            return future
        return call(peer, asked)

    transport.call = refused
    for rank in range(3):
        rounds.begin(rank)
    rounds.run()
    assert [rounds.received(rank) for rank in range(3)] == [{2: 20}, {2: 20}, {0: 0, 1: 10}]


def test_a_learner_that_has_joined_does_not_wait_for_one_that_was_not_told_yet():
    rounds = Rounds(eager=[0, 1], unknown=[(0, 2)])
    rounds.begin(2)
    rounds.begin(0, peers=[1])
    rounds.begin(1)
    rounds.run()
    assert rounds.received(2) == {1: 10}
    assert rounds.received(0) == {1: 10}
    assert rounds.received(1) == {0: 0, 2: 20}
