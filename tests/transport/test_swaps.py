import threading
from concurrent.futures import Future

import pytest
import torch
from loopback import PATIENCE_S, together

from roundelay.errors import StrategyError
from roundelay.transport.swaps import Swaps


def board():
    finals = []
    return Swaps(lambda peer, round, final: finals.append((peer, round))), finals


def buffers(*peers):
    return {peer: torch.zeros(1, dtype=torch.uint8) for peer in peers}


def test_a_swap_is_done_when_all_is_received_and_sent():
    swaps, _ = board()
    future, incoming = Future(), buffers(1, 2)
    swaps.post(0, incoming, future)
    for peer in (1, 2):
        assert swaps.target(0, peer) is incoming[peer]
        swaps.received(0, peer)
        assert not future.done()
    swaps.sent(0, 1, None)
    assert not future.done()
    swaps.sent(0, 2, None)
    assert future.result(0) is None


def test_a_push_that_could_not_be_sent_fails_the_swap():
    swaps, _ = board()
    future = Future()
    swaps.post(0, buffers(1), future)
    swaps.sent(0, 1, ConnectionError("broken"))
    assert isinstance(future.exception(0), ConnectionError)


def test_an_early_push_waits_for_its_round():
    swaps, _ = board()
    arrived = threading.Event()
    found = []

    def early():
        arrived.set()
        found.append(swaps.target(3, 1))

    thread = threading.Thread(target=early)
    thread.start()
    assert arrived.wait(PATIENCE_S)
    incoming = buffers(1)
    swaps.post(3, incoming, Future())
    thread.join(PATIENCE_S)
    assert found[0] is incoming[1]


def test_after_finish_pushes_are_answered_with_the_final_weights():
    swaps, finals = board()
    swaps.finish(torch.zeros(1), {1, 2})
    assert swaps.target(9, 2) is None
    assert finals == [(2, 9)]


def test_finish_is_done_when_all_learners_have_finished_in_any_order():
    swaps, _ = board()
    swaps.peer_finished(2)
    ended = swaps.finish(torch.zeros(1), {1, 2})
    assert not ended.done()
    swaps.peer_finished(1)
    swaps.peer_finished(1)
    assert ended.done()


def test_close_wakes_waiting_threads():
    swaps, _ = board()
    outcome = []

    def waits():
        try:
            swaps.target(0, 1)
        except ConnectionAbortedError as error:
            outcome.append(error)

    thread = threading.Thread(target=waits)
    thread.start()
    swaps.close()
    thread.join(PATIENCE_S)
    assert len(outcome) == 1


def test_learners_with_different_mixings_are_told():
    swaps, _ = board()
    swaps.post(4, buffers(1), Future())
    with pytest.raises(StrategyError, match=r"learner 2 swaps with us in round 4, .* same mixing with the same seed"):
        swaps.target(4, 2)


def test_many_threads_complete_every_swap_exactly_once():
    swaps, _ = board()
    peers, rounds = range(4), range(300)
    futures = [Future() for _ in rounds]
    for round in rounds:
        swaps.post(round, buffers(*peers), futures[round])

    def work(rank):
        for round in rounds:
            swaps.received(round, rank) if rank < 4 else swaps.sent(round, rank - 4, None)

    together(8, work)
    assert all(future.done() for future in futures)
    assert not swaps._posted
