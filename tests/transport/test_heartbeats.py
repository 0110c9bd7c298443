import pytest

from roundelay.transport.heartbeats import BEAT_S, LOST_AFTER_S, Heartbeats


class Watchman:
    """A pulse on a clock that a test moves; it looks once a beat, as the watch does."""

    def __init__(self):
        self.now = 100.0
        self.pulse = Heartbeats(lambda: self.now)

    def pass_time(self, seconds, *, hearing=()):
        """Let time pass, looking every beat; who was found silent on the way."""
        silent = set()
        for _ in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            for peer in hearing:
                self.pulse.heard(peer)
            silent.update(self.pulse.lost())
        return silent


@pytest.fixture
def watchman():
    return Watchman()


def test_who_is_silent_for_long_is_lost_and_nobody_else(watchman):
    watchman.pulse.heard(1)
    watchman.pulse.heard(2)
    assert watchman.pass_time(LOST_AFTER_S, hearing=[2]) == set()
    assert watchman.pass_time(2 * BEAT_S, hearing=[2]) == {1}


def test_a_peer_that_beats_is_never_lost_however_long_its_step_takes(watchman):
    watchman.pulse.heard(1)
    assert watchman.pass_time(100 * LOST_AFTER_S, hearing=[1]) == set()


def test_a_single_beat_gives_a_peer_its_full_time_again(watchman):
    watchman.pulse.heard(1)
    watchman.pass_time(LOST_AFTER_S - BEAT_S)
    watchman.pulse.heard(1)
    assert watchman.pass_time(LOST_AFTER_S - BEAT_S) == set()


def test_a_forgotten_peer_may_be_silent(watchman):
    watchman.pulse.heard(1)
    watchman.pulse.forget(1)
    watchman.pulse.forget(7)  # never heard of: nothing to forget
    assert watchman.pass_time(10 * LOST_AFTER_S) == set()


@pytest.mark.parametrize("slept_s", [LOST_AFTER_S / 2 + 1, 2 * LOST_AFTER_S, 3600.0])
def test_our_own_suspension_counts_against_nobody(watchman, slept_s):
    watchman.pulse.heard(1)
    watchman.now += slept_s
    assert watchman.pulse.lost() == []
    assert watchman.pass_time(LOST_AFTER_S - 2 * BEAT_S) == set()


def test_a_peer_that_stays_silent_after_our_suspension_is_lost_in_the_usual_time(watchman):
    watchman.pulse.heard(1)
    watchman.now += 3600.0
    assert watchman.pass_time(LOST_AFTER_S + 3 * BEAT_S) == {1}
