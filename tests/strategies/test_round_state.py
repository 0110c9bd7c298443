"""What a learner says in a round, by what its peers have said before."""

import pytest
import torch

from roundelay.strategies.round_messages import Kind
from roundelay.strategies.round_state import RoundState


def message(length=3):
    return torch.arange(length, dtype=torch.uint8)


@pytest.mark.parametrize(("rank", "calls"), [(0, True), (2, False)])
def test_of_two_that_have_begun_the_lower_rank_calls(rank, calls):
    state = RoundState(rank)
    ended, told, called = state.begin(0, [1], message())
    assert (told, called) == ([(1, Kind.BEGUN, 0)], [])
    assert state.peer_begun(1, 0) is calls
    assert not state.peer_begun(1, 0), "it is called once"
    assert not ended.done()
    state.receive(1, 0, message())
    state.end_if_complete()
    assert ended.done()


def test_a_peer_that_has_begun_first_is_called_and_not_told():
    state = RoundState(0)
    assert not state.peer_begun(1, 0)
    assert state.wanted
    _, told, called = state.begin(0, [1, 2], message())
    assert (told, called) == ([(2, Kind.BEGUN, 0)], [1])
    assert not state.wanted


def test_a_learner_that_passes_a_round_tells_the_peers_that_wait_in_it():
    state = RoundState(0)
    state.peer_begun(1, 3)
    state.peer_begun(2, 5)
    _, told, _ = state.begin(4, [], message())
    assert told == [(1, Kind.ABSENT, 3)]


def test_a_learner_follows_peers_that_have_passed_its_round():
    state = RoundState(0)
    state.begin(0, [1], message())
    state.peer_absent(1, 0, theirs=7)
    assert state.next_round == 7


@pytest.mark.parametrize(
    ("round", "peer", "expected"), [(1, 1, Kind.NOT_YET), (0, 1, Kind.BEGUN), (0, 2, Kind.ABSENT), (-1, 1, Kind.ABSENT)]
)
def test_a_peer_hears_whether_this_learner_takes_part_in_a_round(round, peer, expected):
    state = RoundState(0)
    state.begin(0, [1], message())
    assert state.answer(peer, round) == (expected, round, 0)


def test_only_messages_of_equal_length_of_expected_peers_are_exchanged():
    state = RoundState(0)
    own = message(3)
    state.begin(0, [1], own)
    assert state.begin_answer(1, 0, 4) is None
    assert state.begin_answer(1, 1, 3) is None
    assert state.begin_answer(2, 0, 3) is None
    assert state.begin_answer(1, 0, 3) is own


def test_the_last_message_of_a_peer_that_has_left_in_order_counts():
    state = RoundState(0)
    ended, _, _ = state.begin(0, [1, 2], message())
    state.begin_call(1)
    for peer in (1, 2):
        state.peer_lost(peer)
    assert not ended.done()
    state.receive(1, 0, message())
    assert ended.done()
    assert list(state.received) == [1]


def test_a_silent_peer_is_left_out_until_it_is_heard_again():
    state = RoundState(0)
    ended, _, _ = state.begin(0, [1], message())
    assert state.peer_silent(1, silent=True) == [(1, Kind.ABSENT, 0)]
    assert ended.done()
    ended, told, _ = state.begin(1, [1], message())
    assert told == []
    assert state.peer_silent(1, silent=False) == []
    assert state.begin(2, [1], message())[1] == [(1, Kind.BEGUN, 2)]


def test_what_comes_too_late_changes_nothing():
    state = RoundState(0)
    state.begin(0, [1], message())
    ended, _, _ = state.begin(1, [1], message())
    state.receive(1, 0, message())
    state.leave_out(1, 0)
    assert not ended.done()
    assert state.received == {}


def test_a_learner_that_leaves_waits_only_for_messages_on_their_way():
    state = RoundState(1)
    state.peer_begun(2, 4)
    ended, _, _ = state.begin(0, [0, 3], message())
    state.begin_call(3)
    assert state.leave() == [(2, Kind.ABSENT, 4)]
    assert state.leave_out_unheard() == [(0, Kind.ABSENT, 0)]
    assert not ended.done()
    state.receive(3, 0, message())
    assert ended.done()
