import pytest

from roundelay.transport.heartbeats import BEAT_S, LOST_AFTER_S, Heartbeats


class Peers:
    """Heartbeats on a clock that a test moves."""

    def __init__(self):
        self.now = 100.0
        self.heartbeats = Heartbeats(lambda: self.now)

    def pass_time(self, seconds, *, hearing=()):
        """Let time pass, and look once per beat as the failure detector does; returns the peers that were lost."""
        lost = set()
        for _ in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            for peer in hearing:
                self.heartbeats.heard(peer)
            lost.update(self.heartbeats.lost())
        return lost


@pytest.fixture
def peers():
    return Peers()


def test_a_peer_that_is_silent_for_long_is_lost_and_no_other(peers):
    peers.heartbeats.heard(1)
    peers.heartbeats.heard(2)
    assert peers.pass_time(LOST_AFTER_S, hearing=[2]) == set()
    assert peers.pass_time(2 * BEAT_S, hearing=[2]) == {1}


def test_a_peer_that_beats_is_never_lost_however_long_its_step_takes(peers):
    peers.heartbeats.heard(1)
    assert peers.pass_time(100 * LOST_AFTER_S, hearing=[1]) == set()


def test_a_single_beat_gives_a_peer_its_full_time_again(peers):
    peers.heartbeats.heard(1)
    peers.pass_time(LOST_AFTER_S - BEAT_S)
    peers.heartbeats.heard(1)
    assert peers.pass_time(LOST_AFTER_S - BEAT_S) == set()


def test_a_forgotten_peer_may_be_silent(peers):
    peers.heartbeats.heard(1)
    peers.heartbeats.forget(1)
    peers.heartbeats.forget(7)  # it was never heard: nothing to forget
    assert peers.pass_time(10 * LOST_AFTER_S) == set()


@pytest.mark.parametrize("slept_s", [3 * BEAT_S, LOST_AFTER_S / 2 + 1, 2 * LOST_AFTER_S, 3600.0])
def test_our_own_suspension_counts_against_no_peer(peers, slept_s):
    peers.heartbeats.heard(1)
    peers.now += slept_s
    assert peers.heartbeats.lost() == []
    assert peers.pass_time(LOST_AFTER_S - 2 * BEAT_S) == set()


def test_a_machine_with_too_much_to_do_counts_two_beats_at_most_between_two_looks(peers):
    peers.heartbeats.heard(1)
    looks = 0
    while not peers.heartbeats.lost():
        peers.now += 4.0
        looks += 1
    assert looks == LOST_AFTER_S / BEAT_S + 1


def test_a_peer_that_was_heard_during_our_suspension_has_no_more_than_its_full_time(peers):
    peers.now += 3600.0
    peers.heartbeats.heard(1)
    assert peers.heartbeats.lost() == []
    assert peers.pass_time(LOST_AFTER_S + 2 * BEAT_S) == {1}


def test_a_peer_that_stays_silent_after_our_suspension_is_lost_in_the_usual_time(peers):
    peers.heartbeats.heard(1)
    peers.now += 3600.0
    assert peers.pass_time(LOST_AFTER_S + 3 * BEAT_S) == {1}
