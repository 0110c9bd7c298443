"""Messages of many pieces, over the virtual clock and over sockets."""

import contextlib

import pytest
import torch

from roundelay.clock import VirtualClock
from roundelay.strategies import message_exchange
from roundelay.strategies.message_exchange import AnsweringEnd, exchange_messages
from roundelay.transport import SimulatedNetwork

HEADER = 8


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(message_exchange, "PIECE_BYTES", 7)


def numbers(length, first):
    return torch.arange(first, first + length, dtype=torch.int64).to(torch.uint8)


@pytest.mark.parametrize("length", [1, 7, 8, 30])
@pytest.mark.parametrize("willing", [True, False])
def test_both_ends_have_the_message_of_the_other(length, willing):
    clock = VirtualClock()
    caller, target = SimulatedNetwork(clock, 2, latency_s=0.1).transports
    theirs, taken = numbers(length, 100), []

    def begin(peer, request, reply):
        def offered():
            assert request[:HEADER].tolist() == [1] * HEADER
            reply[:HEADER] = 2
            return theirs if willing else None

        return AnsweringEnd(request, reply, HEADER, offered, taken.append)

    target.serve(begin)
    buffer = torch.cat([torch.ones(HEADER, dtype=torch.uint8), numbers(length, 0)])
    result = exchange_messages(caller, 1, buffer, HEADER)
    clock.run()
    assert result.result()[:HEADER].tolist() == [2] * HEADER
    if willing:
        assert torch.equal(result.result()[HEADER:], theirs)
        assert [each.tolist() for each in taken] == [numbers(length, 0).tolist()]
    else:
        assert taken == []


def test_a_failed_exchange_gives_no_message():
    taken, buffer = [], torch.zeros(HEADER + 9, dtype=torch.uint8)
    end = AnsweringEnd(buffer, buffer, HEADER, lambda: torch.zeros(9, dtype=torch.uint8), taken.append)
    with contextlib.suppress(ConnectionError), end:
        end.apply(0)
        end.apply(1)
        raise ConnectionError
    assert taken == [None]
