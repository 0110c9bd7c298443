"""The alpha-beta model, contention at ports, and faults: times that can be computed by hand."""

from __future__ import annotations

import pytest
import torch

from roundelay.clock import VirtualClock
from roundelay.errors import RoundelayError
from roundelay.simulation.network import Links, ModelledNetwork


def arrivals(links: Links, messages: list[tuple[int, int]], model_bytes: float = 100.0, size: int = 8) -> list[float]:
    clock, seen = VirtualClock(), {}
    network = ModelledNetwork(clock, size, links, model_bytes)
    for number, (sender, receiver) in enumerate(messages):
        network.deliver(sender, receiver, 1, lambda number=number: seen.setdefault(number, clock.now()))
    clock.run()
    return [seen[number] for number in range(len(messages))]


def test_a_message_takes_latency_and_its_bytes_over_the_bandwidth():
    assert arrivals(Links(latency_s=0.5, bandwidth_Bps=50.0), [(0, 1)]) == [2.5]


def test_messages_of_one_sender_queue():
    assert arrivals(Links(bandwidth_Bps=100.0), [(0, 1), (0, 2), (0, 3)]) == [1.0, 2.0, 3.0]


def test_messages_to_one_receiver_queue():
    assert arrivals(Links(bandwidth_Bps=100.0), [(1, 0), (2, 0), (3, 0)]) == [1.0, 2.0, 3.0]


def test_messages_in_opposite_directions_and_of_other_pairs_do_not_contend():
    assert arrivals(Links(bandwidth_Bps=100.0), [(0, 1), (1, 0), (2, 3)]) == [1.0, 1.0, 1.0]


def test_learners_of_a_node_share_its_port_and_have_fast_links_inside():
    links = Links(bandwidth_Bps=100.0, node_size=4, inside_bandwidth_Bps=1000.0, inside_latency_s=0.25)
    assert arrivals(links, [(0, 4), (1, 5), (0, 1)]) == pytest.approx([1.0, 2.0, 0.35])


def test_an_allreduce_is_a_ring_inside_nodes_and_one_between_them():
    links = Links(latency_s=0.01, bandwidth_Bps=10.0, node_size=2, inside_latency_s=0.001, inside_bandwidth_Bps=100.0)
    inside, between = 2 * (0.001 + 50 / 100), 2 * 3 * (0.01 + 25 / 10)
    assert links.allreduce_s(100.0, range(8)) == pytest.approx(inside + between)
    clock, ended = VirtualClock(), []
    network = ModelledNetwork(clock, 8, links, 100.0)
    values = [torch.full((1,), float(rank)) for rank in range(8)]
    for transport, value in zip(network.transports, values, strict=True):
        transport.all_reduce(value, tuple(range(8))).add_done_callback(lambda _: ended.append(clock.now()))
    clock.run()
    assert ended == pytest.approx([inside + between] * 8)
    assert [float(value) for value in values] == [28.0] * 8


def test_a_payload_counts_as_model_bytes_and_an_empty_message_as_nothing():
    clock = VirtualClock()
    network = ModelledNetwork(clock, 2, Links(bandwidth_Bps=1.0), model_bytes=7.0)
    network.deliver(0, 1, 4, lambda: None)
    network.deliver(0, 1, 0, lambda: None)
    clock.run()
    assert network.transports[0].traffic.bytes_sent == 7
    assert clock.now() == 7.0


def test_a_short_freeze_holds_messages_up():
    clock, seen = VirtualClock(), []
    network = ModelledNetwork(clock, 2, Links(latency_s=0.1))
    network.freeze(1, at=1.0, for_s=2.0)
    clock.call_later(1.5, lambda: network.deliver(0, 1, 8, lambda: seen.append(clock.now())))
    clock.run()
    assert seen == [pytest.approx(3.0)]


def test_a_long_freeze_loses_the_learner():
    clock, lost = VirtualClock(), []
    network = ModelledNetwork(clock, 3, Links())
    network.transports[0].on_lost(lambda peer, reason: lost.append((peer, reason, clock.now())))
    network.freeze(2, at=1.0, for_s=60.0)
    clock.run()
    assert lost == [(2, "no heartbeat for 5 s", 6.0)]


def test_nothing_passes_a_cut_link():
    clock, seen = VirtualClock(), []
    network = ModelledNetwork(clock, 3, Links(latency_s=0.1))
    network.cut(0, 1, at=1.0)
    for receiver in (1, 2):
        clock.call_later(1.5, lambda receiver=receiver: network.deliver(0, receiver, 8, lambda: seen.append(receiver)))
    clock.run()
    assert seen == [2]


def test_impossible_links_are_refused():
    with pytest.raises(RoundelayError, match="more than 0"):
        Links(bandwidth_Bps=0.0)
    with pytest.raises(RoundelayError, match="at least 0 s"):
        Links(latency_s=-1.0)
