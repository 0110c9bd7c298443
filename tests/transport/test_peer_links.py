"""Which connections a learner opens to its peers for heartbeats. Connections and the detector are stand-ins."""

import pytest

from roundelay.errors import PeerLostError
from roundelay.transport import peer_links
from roundelay.transport.handshake import Hello, Purpose
from roundelay.transport.liveness import Liveness
from roundelay.transport.peer_links import PeerLinks

ADDRESSES = {peer: ("127.0.0.1", peer) for peer in (0, 1, 3)}


class Connections:
    def __init__(self, unreachable=()):
        self.unreachable, self.reopened = set(unreachable), []

    def set_addresses(self, addresses):
        self.addresses = addresses

    def open_heartbeat(self, peer, purpose=Purpose.HEARTBEAT):
        if peer in self.unreachable:
            raise ConnectionRefusedError("refused")
        return purpose, peer

    def reopen(self, peer):
        self.reopened.append(peer)


class Detector:
    def __init__(self, absent=None):
        self.added, self._absent = {}, absent

    def add(self, peer, connection):
        self.added[peer] = connection

    def wait_for(self, peers, timeout_s):
        self.waited_for = set(peers)
        return self._absent


class Socket:
    closed = False

    def close(self):
        self.closed = True


def links(unreachable=(), absent=None):
    connections, detector, liveness = Connections(unreachable), Detector(absent), Liveness()
    return PeerLinks(2, connections, liveness, detector), connections, detector, liveness


def test_of_two_that_begin_together_the_lower_rank_connects():
    own, connections, detector, _ = links()
    own.connect(ADDRESSES)
    assert connections.addresses == ADDRESSES
    assert detector.added == {3: (Purpose.HEARTBEAT, 3)}
    assert detector.waited_for == {0, 1}


def test_a_learner_that_does_not_answer_is_an_error_that_names_it():
    with pytest.raises(PeerLostError, match="lost learner 3: it does not answer"):
        links(unreachable=[3])[0].connect(ADDRESSES)


def test_a_learner_that_never_connects_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(peer_links, "ARRIVAL_S", 0.05)
    with pytest.raises(PeerLostError, match=r"lost learner 1: it has not connected within 0\.05 s"):
        links(absent=1)[0].connect(ADDRESSES)


def test_a_learner_that_joins_connects_to_all_and_goes_on_without_those_that_do_not_answer():
    own, _, detector, _ = links(unreachable=[1])
    lost = []
    own.join(ADDRESSES, lambda peer, reason: lost.append((peer, reason)))
    assert set(detector.added) == {0, 3}
    assert lost == [(1, "it does not answer (refused)")]


def test_a_peer_that_connects_again_takes_part_again():
    own, connections, detector, liveness = links()
    liveness.lose(1, "cut off")
    own.accepted("socket", Hello(1, Purpose.RECONNECT, 0, bytes(16)))
    assert liveness.lost == {}
    assert connections.reopened == [1]
    assert detector.added == {1: "socket"}


def test_a_peer_that_only_looks_whether_it_reaches_us_is_hung_up():
    own, _, detector, _ = links()
    connection = Socket()
    own.accepted(connection, Hello(1, Purpose.PROBE, 0, bytes(16)))
    assert connection.closed
    assert detector.added == {}
