"""Headers and messages of rounds, on the virtual clock."""

import contextlib

import pytest
import torch

from roundelay.clock import VirtualClock
from roundelay.errors import PeerLostError
from roundelay.strategies import round_messages
from roundelay.strategies.round_messages import HEADER_BYTES, AnsweringEnd, Header, Kind, RoundMessages
from roundelay.transport import SimulatedNetwork

OURS, THEIRS = torch.arange(5, dtype=torch.uint8), torch.arange(10, 15, dtype=torch.uint8)


@pytest.fixture
def network():
    return SimulatedNetwork(VirtualClock(), 2)


def serve_messages(transport, own, taken=lambda message: None):
    def begin(peer, request, reply):
        def offered():
            Header(Kind.ABSENT if own is None else Kind.MESSAGE, 7, 8).write(reply)
            return own

        return AnsweringEnd(request, reply, offered, taken)

    transport.serve(begin)


def test_a_peer_answers_a_header_with_a_header(network):
    caller, target = network.transports
    said = []

    def begin(peer, request, reply):
        def offered():
            said.append(Header.read(request))
            Header(Kind.NOT_YET, 3, 2).write(reply)

        return AnsweringEnd(request, reply, offered, lambda message: None)

    target.serve(begin)
    reply = RoundMessages(caller).tell(1, Header(Kind.BEGUN, 3, 3))
    network.clock.run()
    assert said == [(Kind.BEGUN, 3, 3)]
    assert reply.result().header == (Kind.NOT_YET, 3, 2)
    assert not len(reply.result().message)


@pytest.mark.parametrize("length", [1, 7, 8, 30])
@pytest.mark.parametrize("willing", [True, False])
def test_messages_of_many_pieces_reach_both_ends(network, monkeypatch, length, willing):
    monkeypatch.setattr(round_messages, "PIECE_BYTES", 7)
    caller, target = network.transports
    ours = torch.arange(length, dtype=torch.uint8)
    taken = []
    serve_messages(target, ours + 100 if willing else None, taken.append)
    reply = RoundMessages(caller).exchange(1, 7, ours)
    network.clock.run()
    assert reply.result().header.kind == (Kind.MESSAGE if willing else Kind.ABSENT)
    if willing:
        assert torch.equal(reply.result().message, ours + 100)
    assert [each.tolist() for each in taken] == ([ours.tolist()] if willing else [])


def test_a_failed_exchange_gives_no_message(monkeypatch):
    monkeypatch.setattr(round_messages, "PIECE_BYTES", 7)
    taken, buffer = [], torch.zeros(HEADER_BYTES + 9, dtype=torch.uint8)
    end = AnsweringEnd(buffer, buffer, lambda: torch.zeros(9, dtype=torch.uint8), taken.append)
    with contextlib.suppress(ConnectionError), end:
        end.apply(0)
        end.apply(1)
        raise ConnectionError
    assert taken == [None]


def test_two_messages_are_exchanged_and_the_buffer_is_used_again(network, monkeypatch):
    caller, target = network.transports
    allocated = []
    monkeypatch.setattr(caller, "allocate", lambda nbytes: allocated.append(nbytes) or torch.empty(nbytes).byte())
    serve_messages(target, THEIRS)
    messages = RoundMessages(caller)
    replies = []
    for _ in range(3):
        replies.append(messages.exchange(1, 7, OURS))
        network.clock.run()
    assert all(torch.equal(reply.result().message, THEIRS) for reply in replies)
    assert allocated == [HEADER_BYTES + 5]


def test_a_peer_may_have_no_message(network):
    caller, target = network.transports
    serve_messages(target, None)
    reply = RoundMessages(caller).exchange(1, 7, OURS)
    network.clock.run()
    assert reply.result().header == (Kind.ABSENT, 7, 8)


def test_the_buffer_of_a_failed_exchange_is_given_up(network, monkeypatch):
    """The peer may only be frozen, and write to it later."""
    caller, _ = network.transports
    freed = []
    monkeypatch.setattr(caller, "free", freed.append)
    messages = RoundMessages(caller)
    reply = messages.exchange(1, 7, OURS)
    caller.lose(1, "its process ended")
    network.clock.run()
    assert isinstance(reply.exception(), PeerLostError)
    assert [len(buffer) for buffer in freed] == [HEADER_BYTES + 5]
