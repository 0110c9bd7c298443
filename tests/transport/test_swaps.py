import threading
from concurrent.futures import Future

import pytest
import torch
from loopback import PATIENCE_S, together

from roundelay.errors import StrategyError
from roundelay.transport.base import Swap
from roundelay.transport.swaps import Swaps


class Pushes:
    """What swaps push: a future for each (round, peer)."""

    def __init__(self):
        self.futures, self.given_up = {}, []

    def __call__(self, peer, swap):
        return self.futures.setdefault((swap.round, peer), Future())

    def give_up(self, peer, reason):
        self.given_up.append((peer, reason))

    def sent(self, round, peer, error=None):
        self.futures[round, peer].set_exception(error) if error else self.futures[round, peer].set_result(None)


def board():
    pushes = Pushes()
    return Swaps(pushes, pushes.give_up), pushes


def swap(round, incoming):
    return Swap(round, torch.zeros(1, dtype=torch.uint8), incoming)


def buffers(*peers):
    return {peer: torch.zeros(1, dtype=torch.uint8) for peer in peers}


def test_a_swap_is_done_when_all_is_received_and_sent():
    swaps, pushes = board()
    future, incoming = Future(), buffers(1, 2)
    swaps.start(swap(0, incoming), future)
    for peer in (1, 2):
        assert swaps.target(0, peer) is incoming[peer]
        swaps.received(0, peer)
        assert not future.done()
    pushes.sent(0, 1)
    assert not future.done()
    pushes.sent(0, 2)
    assert future.result(0) is None


def test_a_push_that_could_not_be_sent_fails_the_swap():
    swaps, pushes = board()
    future = Future()
    swaps.start(swap(0, buffers(1)), future)
    pushes.sent(0, 1, ConnectionError("broken"))
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
    swaps.start(swap(3, incoming), Future())
    thread.join(PATIENCE_S)
    assert found[0] is incoming[1]


def test_after_finish_pushes_are_answered_with_the_final_weights():
    swaps, pushes = board()
    swaps.finish(torch.zeros(1), {1, 2})
    assert swaps.target(9, 2) is None
    assert list(pushes.futures) == [(9, 2)]
    pushes.sent(9, 2)
    assert pushes.given_up == []


def test_a_peer_that_cannot_be_given_the_final_weights_is_given_up():
    swaps, pushes = board()
    swaps.finish(torch.zeros(1), {1, 2})
    swaps.target(9, 2)
    pushes.sent(9, 2, ConnectionError("broken"))
    assert pushes.given_up == [(2, "its final weights could not be sent: broken")]


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
    swaps.start(swap(4, buffers(1)), Future())
    with pytest.raises(StrategyError, match=r"learner 2 swaps with us in round 4, .* same mixing with the same seed"):
        swaps.target(4, 2)


def test_many_threads_complete_every_swap_exactly_once():
    swaps, pushes = board()
    peers, rounds = range(4), range(300)
    futures = [Future() for _ in rounds]
    for round in rounds:
        swaps.start(swap(round, buffers(*peers)), futures[round])

    def work(rank):
        for round in rounds:
            swaps.received(round, rank) if rank < 4 else pushes.sent(round, rank - 4)

    together(8, work)
    assert all(future.done() for future in futures)
    assert not swaps._posted
