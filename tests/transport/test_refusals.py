import logging

import pytest
import torch
from exchanges import answering, calling

from roundelay.clock import VirtualClock
from roundelay.errors import RefusedError
from roundelay.transport import SimulatedNetwork, refusals
from roundelay.transport.refusals import Refusals


def test_every_refusal_is_counted_by_reason():
    refused = Refusals("learner 3")
    for reason in ("checksum", "header", "checksum"):
        refused.count(reason, "a message")
    assert refused.counts == {"checksum": 2, "header": 1}


def test_a_flood_gives_few_lines_and_no_refusal_is_hidden(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(refusals.time, "monotonic", lambda: now[0])
    refused = Refusals("learner 3")
    with caplog.at_level(logging.WARNING, "roundelay"):
        for second in range(11):
            now[0] = 100.0 + second
            for _ in range(1000):
                refused.count("handshake", "a connection")
    assert refused.counts["handshake"] == 11_000
    assert [record.getMessage() for record in caplog.records] == [
        "learner 3 refused a connection: handshake",
        "learner 3 refused a connection: handshake (5000 times since the last such line)",
        "learner 3 refused a connection: handshake (5000 times since the last such line)",
    ]


def test_on_the_virtual_clock_a_handler_may_refuse_a_call_and_goes_on_serving():
    clock = VirtualClock()
    network = SimulatedNetwork(clock, 2, latency_s=1.0)
    caller, answerer = network.transports

    def handler(peer, request, reply):
        if request[0] == 7:
            raise RefusedError(peer, "sevens")
        reply.copy_(request + 1)

    answerer.serve(answering(handler))
    buffers = [torch.tensor([value], dtype=torch.uint8) for value in (7, 8)]
    futures = [caller.call(1, calling(buffer)) for buffer in buffers]
    clock.run()
    with pytest.raises(RefusedError, match="an exchange with learner 1 was refused: sevens"):
        futures[0].result()
    assert futures[0].exception().peer == 1
    futures[1].result()
    assert [int(buffer) for buffer in buffers] == [7, 9]
    assert answerer.refused.counts == {"sevens": 1}
    assert not caller.refused.counts
