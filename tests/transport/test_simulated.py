import dataclasses
import gc
import weakref

import pytest
import torch
from exchanges import answering, calling

from roundelay.clock import VirtualClock
from roundelay.errors import DeadlockError, PeerLostError
from roundelay.transport import SimulatedNetwork
from roundelay.transport.base import LEFT, Swap
from roundelay.transport.heartbeats import LOST_AFTER_S

ALL = (0, 1, 2)


def make(size=3, **link):
    clock = VirtualClock()
    return clock, SimulatedNetwork(clock, size, **link)


def number(value):
    return torch.tensor([value], dtype=torch.uint8)


# Swaps ---------------------------------------------------------------------------------------------------------------


def test_a_swap_gives_each_side_the_others_weights():
    clock, network = make()
    incoming = [{peer: number(0) for peer in ALL if peer != rank} for rank in ALL]
    for rank, transport in enumerate(network.transports):
        transport.swap(Swap(0, number(10 + rank), incoming[rank]))
    clock.run()
    assert [{peer: int(value) for peer, value in got.items()} for got in incoming] == [
        {1: 11, 2: 12},
        {0: 10, 2: 12},
        {0: 10, 1: 11},
    ]


def test_a_peer_ahead_by_a_round_is_heard_in_the_right_order():
    clock, network = make(2)
    first, second = network.transports
    got = [{1: number(0)}, {1: number(0)}]
    for round in (0, 1):
        second.swap(Swap(round, number(100 + round), {0: number(0)}))
    clock.run()
    for round in (0, 1):
        future = first.swap(Swap(round, number(round), got[round]))
        assert future.done(), "what came early is taken from the shelf"
    assert [int(g[1]) for g in got] == [100, 101]
    assert not first._swaps, "a finished swap is forgotten"


def test_what_is_sent_is_the_value_at_the_time_of_the_swap():
    clock, network = make(2, latency_s=1.0)
    outgoing, got = number(7), {0: number(0)}
    network.transports[0].swap(Swap(0, outgoing, {1: number(0)}))
    network.transports[1].swap(Swap(0, number(8), got))
    outgoing.fill_(99)
    clock.run()
    assert int(got[0]) == 7


def test_a_swap_without_neighbours_is_done_at_once():
    _, network = make(1)
    assert network.transports[0].swap(Swap(0, number(1), {})).done()


def test_finished_learners_answer_with_their_final_weights():
    clock, network = make(2)
    fast, slow = network.transports
    ended = fast.finish(number(42), (0, 1))
    for round in range(3):
        got = {0: number(0)}
        future = slow.swap(Swap(round, number(round), got))
        clock.run()
        assert future.done()
        assert int(got[0]) == 42
        assert not ended.done()
    slow.finish(number(1), (0, 1))
    assert ended.done()


def test_pushes_that_came_before_finish_are_answered_at_finish():
    clock, network = make(2)
    got = {0: number(0)}
    future = network.transports[1].swap(Swap(5, number(1), got))
    clock.run()
    network.transports[0].finish(number(42), (0, 1))
    clock.run()
    assert future.done()
    assert int(got[0]) == 42


# Calls ---------------------------------------------------------------------------------------------------------------


def test_a_call_is_answered_in_place():
    clock, network = make(2, latency_s=0.25)
    network.transports[1].serve(answering(lambda peer, request, reply: reply.copy_(request + (10 + peer))))
    buffer = number(1)
    future = network.transports[0].call(1, calling(buffer))
    clock.run(until=0.4)
    assert not future.done()
    clock.run(until=0.5)
    assert future.done()
    assert int(buffer) == 11


def test_a_call_before_serve_waits_for_it():
    clock, network = make(2)
    buffer = number(1)
    future = network.transports[0].call(1, calling(buffer))
    clock.run()
    assert not future.done()
    network.transports[1].serve(answering(lambda peer, request, reply: reply.copy_(request + 1)))
    clock.run()
    assert future.done()
    assert int(buffer) == 2


def test_a_learner_that_serves_no_more_refuses_calls():
    clock, network = make(2)
    network.transports[1].serve(None)
    future = network.transports[0].call(1, calling(number(1)))
    clock.run()
    error = future.exception()
    assert isinstance(error, PeerLostError)
    assert error.peer == 1


def test_a_call_that_has_waited_is_refused_when_serving_ends():
    clock, network = make(2)
    future = network.transports[0].call(1, calling(number(1)))
    clock.run()
    network.transports[1].serve(None)
    clock.run()
    assert isinstance(future.exception(), PeerLostError)


def test_a_reply_under_way_arrives_although_its_sender_has_left():
    clock, network = make(2, latency_s=1.0)
    network.transports[1].serve(answering(lambda peer, request, reply: reply.copy_(request + 1)))
    buffer = number(1)
    future = network.transports[0].call(1, calling(buffer))
    clock.call_later(1.5, network.transports[1].close)
    clock.run()
    assert future.exception() is None
    assert int(buffer) == 2


def test_buffers_of_calls_that_have_ended_are_freed():
    clock, network = make(2)
    network.transports[1].serve(answering(lambda peer, request, reply: reply.copy_(request)))
    buffers = []
    for _ in range(3):
        buffer = number(1)
        buffers.append(weakref.ref(buffer))
        network.transports[0].call(1, calling(buffer))
        del buffer
        clock.run()
    network.transports[0].pending((1,))  # forgets the futures that are done
    network.transports[1].pending((0,))
    gc.collect()
    assert [buffer() for buffer in buffers] == [None, None, None]


def test_a_learner_that_has_left_in_order_cannot_die():
    clock, network = make(2, latency_s=1.0)
    network.transports[1].serve(answering(lambda peer, request, reply: reply.copy_(request + 1)))
    future = network.transports[0].call(1, calling(number(1)))
    clock.call_later(1.5, network.transports[1].close)
    network.kill(1, at=1.7)  # its reply is still on its way
    clock.run()
    assert future.exception() is None


def test_a_call_that_was_not_served_fails_when_the_peer_leaves():
    clock, network = make(2, latency_s=1.0)
    network.transports[1].serve(answering(lambda peer, request, reply: reply.copy_(request + 1)))
    future = network.transports[0].call(1, calling(number(1)))
    clock.call_later(0.5, network.transports[1].close)
    clock.run()
    error = future.exception()
    assert isinstance(error, PeerLostError)
    assert error.reason == LEFT


def test_messages_take_latency_plus_size_over_bandwidth():
    clock, network = make(2, latency_s=0.5, bandwidth_Bps=100.0)
    network.transports[1].serve(answering(lambda peer, request, reply: None))
    network.transports[0].call(1, calling(torch.zeros(50, dtype=torch.uint8)))
    clock.run()
    assert clock.now() == 2 * (0.5 + 50 / 100)


def test_traffic_is_counted_at_both_ends():
    clock, network = make(2)
    network.transports[1].serve(answering(lambda peer, request, reply: None))
    network.transports[0].call(1, calling(torch.zeros(50, dtype=torch.uint8)))
    clock.run()
    for transport, peer in zip(network.transports, (1, 0), strict=True):
        assert (transport.traffic.bytes_sent, transport.traffic.bytes_received) == (50, 50)
        assert transport.traffic.messages == {peer: 1}


# Faults --------------------------------------------------------------------------------------------------------------


def test_a_killed_learner_fails_what_depends_on_it_and_nothing_else():
    clock, network = make()
    lost = []
    network.transports[0].on_lost(lambda peer, reason: lost.append((clock.now(), peer)))
    network.transports[1].serve(answering(lambda peer, request, reply: reply.copy_(request + 1)))
    doomed = network.transports[0].call(2, calling(number(1)))
    network.kill(2, at=3.0)
    clock.run()
    assert isinstance(doomed.exception(), PeerLostError)
    assert lost == [(3.0, 2)]
    sound = network.transports[0].call(1, calling(number(1)))
    clock.run()
    assert sound.exception() is None


def test_a_request_to_a_dead_learner_fails_at_once():
    clock, network = make()
    network.kill(2, at=0.0)
    clock.run()
    transport = network.transports[0]
    futures = [
        transport.call(2, calling(number(1))),
        transport.swap(Swap(0, number(1), {2: number(0)})),
        transport.all_reduce(number(1), ALL),
    ]
    assert [future.exception().peer for future in futures] == [2, 2, 2]


def test_both_ends_of_a_cut_link_notice_after_the_silence_and_others_do_not():
    clock, network = make()
    lost = []
    for transport in network.transports:
        transport.on_lost(lambda peer, _, rank=transport.rank: lost.append((clock.now(), rank, peer)))
        transport.serve(answering(lambda peer, request, reply: None))
    network.cut(0, 1, at=2.0)
    clock.run(until=2.5)
    futures = [network.transports[0].call(peer, calling(number(1))) for peer in (1, 2)]
    clock.run()
    assert [type(future.exception()) for future in futures] == [PeerLostError, type(None)]
    assert lost == [(2.0 + LOST_AFTER_S, 0, 1), (2.0 + LOST_AFTER_S, 1, 0)]


def test_a_learner_that_gives_up_says_why():
    clock, network = make(2)
    reasons = []
    network.transports[0].on_lost(lambda peer, reason: reasons.append(reason))
    network.transports[1].close("ValueError: no")
    network.transports[1].close()
    clock.run()
    assert reasons == ["it gave up (ValueError: no)"]


def test_a_dead_member_does_not_keep_the_others_from_finishing():
    clock, network = make()
    futures = [network.transports[rank].finish(number(1), ALL) for rank in (0, 1)]
    network.kill(2, at=1.0)
    clock.run()
    assert all(future.done() for future in futures)


# Collectives ---------------------------------------------------------------------------------------------------------


def test_sums_are_in_order_of_rank_not_of_arrival():
    values = [0.1, 1e17, -1e17]  # floating-point addition is not associative: the order shows
    results = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        clock, network = make()
        tensors = [torch.tensor([value], dtype=torch.float64) for value in values]
        for rank in order:
            network.transports[rank].all_reduce(tensors[rank], ALL)
        clock.run()
        results.append([float(tensor) for tensor in tensors])
    assert results == [[(0.1 + 1e17) - 1e17] * 3] * 3


def test_broadcasts_and_subsets():
    clock, network = make()
    tensors = [number(rank) for rank in ALL]
    for rank in (1, 2):
        network.transports[rank].broadcast(tensors[rank], 2, (1, 2))
    clock.run()
    assert [int(tensor) for tensor in tensors] == [0, 2, 2]


def test_collectives_of_one_learner_that_others_never_join_are_a_deadlock():
    clock, network = make()

    def lonely():
        yield network.transports[0].all_reduce(number(1), ALL)

    clock.spawn(lonely(), "learner 0")
    with pytest.raises(DeadlockError, match="learner 0"):
        clock.run()


def test_an_offered_state_is_fetched_at_the_speed_of_the_link_also_by_a_learner_that_asked_before():
    clock = VirtualClock()
    network = SimulatedNetwork(clock, 2, latency_s=1.0, bandwidth_Bps=10.0)
    early = network.transports[1].fetch(0)
    clock.run(until=5.0)
    assert not early.done()
    network.transports[0].offer(lambda: torch.arange(20, dtype=torch.uint8))
    later, ends = network.transports[1].fetch(0), []
    for future in (early, later):
        future.add_done_callback(lambda _: ends.append(clock.now()))
    clock.run()
    assert ends == [5.0 + 3.0, 5.0 + 1.0 + 3.0]
    assert later.result().tolist() == list(range(20))


def test_a_fetch_from_a_learner_that_dies_names_it():
    clock = VirtualClock()
    network = SimulatedNetwork(clock, 2, latency_s=1.0)
    network.kill(0, at=0.5)
    fetched = network.transports[1].fetch(0)
    clock.run()
    with pytest.raises(PeerLostError, match="lost learner 0: its process ended"):
        fetched.result(timeout=0)


def test_a_failure_is_raised_by_what_is_pending_and_by_the_next_check():
    transport = SimulatedNetwork(VirtualClock(), 2).transports[0]
    pending = transport.call(1, calling(torch.zeros(4, dtype=torch.uint8)))
    transport.fail(ZeroDivisionError("in a listener"))
    with pytest.raises(ZeroDivisionError):
        pending.result(timeout=0)
    with pytest.raises(ZeroDivisionError):
        transport.check()


def test_a_mended_link_does_not_bring_a_learner_back_that_has_left():
    clock = VirtualClock()
    network = SimulatedNetwork(clock, 2)
    network.cut(0, 1, at=1.0)
    clock.call_later(2.0, network.transports[1].close)
    network.mend(0, 1, at=20.0)
    clock.run()
    assert 1 in network.transports[0].lost


def test_a_message_that_meets_a_cut_arrives_when_the_link_is_mended_in_time_and_no_peer_is_lost():
    clock, network = make(2, latency_s=0.25)
    network.transports[1].serve(answering(lambda peer, request, reply: reply.copy_(request + 10)))
    network.cut(0, 1, at=0.1)
    network.mend(0, 1, at=0.1 + LOST_AFTER_S - 1.0)
    buffer = number(1)
    future = network.transports[0].call(1, calling(buffer))
    clock.run(until=4.0)
    assert not future.done()
    clock.run()
    assert future.exception() is None
    assert int(buffer) == 11
    assert not network.transports[0].lost
    assert not network.transports[1].lost


def test_a_failure_ends_the_wait_for_slower_learners():
    transport = SimulatedNetwork(VirtualClock(), 2).transports[0]
    finished = transport.finish(number(1), (0, 1))
    transport.fail(ZeroDivisionError("in a listener"))
    with pytest.raises(ZeroDivisionError):
        finished.result(timeout=0)


def test_an_exchange_takes_the_time_of_one_model_and_a_whole_message_that_of_two():
    for streams, seconds in ((True, 2 * 0.5 + 10.0), (False, 2 * 0.5 + 20.0)):
        clock, network = make(2, latency_s=0.5, bandwidth_Bps=10.0)
        network.transports[1].serve(answering(lambda peer, request, reply: None))
        call, ended = calling(torch.zeros(100, dtype=torch.uint8)), []
        future = network.transports[0].call(1, dataclasses.replace(call, streams=streams))
        future.add_done_callback(lambda _, clock=clock, ended=ended: ended.append(clock.now()))
        clock.run()
        assert ended == [pytest.approx(seconds)]


@pytest.mark.parametrize("cut_at", [0.2, 0.6])
def test_an_exchange_that_a_cut_breaks_off_is_taken_back_by_the_answering_end(cut_at):
    clock, network = make(2, latency_s=0.5)
    applied, undone = [], []
    begin = answering(lambda peer, *_: applied.append(peer), lambda peer, *_: undone.append(peer))
    network.transports[1].serve(begin)
    network.cut(0, 1, at=cut_at)
    future = network.transports[0].call(1, calling(number(1)))
    clock.run()
    assert isinstance(future.exception(timeout=0), PeerLostError)
    assert undone == applied == ([] if cut_at < 0.5 else [0])
