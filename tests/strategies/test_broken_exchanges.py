"""Exchanges over real sockets whose connection is cut at every interesting byte: the sum over learners is conserved."""

import contextlib
import gc
import itertools
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from exchanges import calling
from loopback import PATIENCE_S, loopback
from relay import Cut, Flip, behind
from torch import nn

from roundelay.cluster.membership import Membership
from roundelay.errors import PeerLostError, RefusedError
from roundelay.strategies import ADPSGD
from roundelay.topology import ring
from roundelay.transport import connections
from roundelay.transport.framing import HEADER_BYTES
from roundelay.weights import flat
from roundelay.weights.replica import Replica

COUNT, PIECE = 1000, 256  # four pieces, the last one shorter
PIECES = [256, 256, 256, 232]
SAME = 3e-7  # what adding and subtracting a correction may leave, in float32
wires = pytest.mark.parametrize("wire", [None, "bfloat16"])


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(flat, "PIECE", PIECE)
    monkeypatch.setattr(connections, "BEAT_S", 0.01)  # the failure detector has nothing to say about a cut connection


def learners(transports, wire=None):
    """Two strategies with different weights, and their weights as arrays that follow them."""
    strategies = []
    for rank, transport in enumerate(transports):
        values = torch.randn(COUNT, generator=torch.Generator().manual_seed(rank))
        strategy = ADPSGD(ring(2), wire=wire)
        strategy.attach(Replica(nn.ParameterList([nn.Parameter(values)])), transport, Membership.of(2))
        strategies.append(strategy)
    return strategies, [strategy.weights().views[0].numpy() for strategy in strategies]


def exchange(strategy):
    """One exchange of that learner with the other one."""
    assert strategy._own._start()
    strategy._own._last.over.result(PATIENCE_S)
    strategy._own.raise_failure()


def ended(strategies):
    """Wait until no call is being served; the numbers of exchanges that the caller and the server have finished."""
    strategies[1].transport.serve(None)
    return strategies[0].metrics()["exchanges_finished"], strategies[1].metrics()["exchanges_served"]


def boundaries(itemsize, *, outward):
    """Ends of messages after the handshake, in bytes: the call and its pieces, or the replies."""
    ends = [0, HEADER_BYTES] if outward else [0]
    for count in PIECES:
        ends += [ends[-1] + HEADER_BYTES, ends[-1] + HEADER_BYTES + count * itemsize]
    return ends


def cuts(itemsize, *, outward):
    """At every boundary, and before and after it, and in the middle of everything; before the confirmation."""
    ends = boundaries(itemsize, outward=outward)
    middles = [(a + b) // 2 for a, b in itertools.pairwise(ends)]
    return sorted({*ends[:-1], *middles, *(end + 1 for end in ends[:-1]), *(end - 1 for end in ends[1:])})


@wires
@pytest.mark.parametrize("outward", [True, False], ids=["request", "reply"])
def test_wherever_the_connection_is_cut_neither_end_has_exchanged(outward, wire):
    for position in cuts(2 if wire else 4, outward=outward):
        with loopback(2, share_memory=False) as transports:
            strategies, weights = learners(transports, wire)
            before = np.stack(weights)
            behind(transports[0], 1, Cut(position, outward=outward))
            exchange(strategies[0])
            assert ended(strategies) == (0, 0), position
            np.testing.assert_allclose(weights, before, rtol=0, atol=SAME, err_msg=f"cut after {position} bytes")
            assert transports[0].lost.keys() == {1}


@wires
def test_a_cut_after_the_confirmation_changes_nothing_and_one_before_it_arrives_is_the_only_doubt(wire):
    """The window that is left: the caller has applied the exchange, and the answering end takes it back."""
    itemsize = 2 if wire else 4
    confirmation = boundaries(itemsize, outward=True)[-1]
    outcomes = {}
    for position in (confirmation, confirmation + HEADER_BYTES - 1, confirmation + HEADER_BYTES):
        with loopback(2, share_memory=False) as transports:
            strategies, weights = learners(transports, wire)
            before = np.stack(weights)
            behind(transports[0], 1, Cut(position, outward=True))
            exchange(strategies[0])
            outcomes[position] = ended(strategies)
            moved = [float(np.abs(now - then).max()) > SAME for now, then in zip(weights, before, strict=True)]
            assert moved == [finished > 0 for finished in outcomes[position]]
    assert list(outcomes.values()) == [(1, 0), (1, 0), (1, 1)]


@wires
@pytest.mark.parametrize("outward", [True, False], ids=["request", "reply"])
@pytest.mark.parametrize("piece", range(4))
def test_an_altered_piece_is_refused_taken_back_at_both_ends_and_the_next_exchange_works(piece, outward, wire):
    with loopback(2, share_memory=False) as transports:
        strategies, weights = learners(transports, wire)
        before = np.stack(weights)
        end = boundaries(2 if wire else 4, outward=outward)[2 * piece + (3 if outward else 2)]
        behind(transports[0], 1, Flip(end - 1, outward=outward))
        exchange(strategies[0])
        refused = transports[1 if outward else 0].refused.counts
        assert refused == {"checksum": 1}
        exchange(strategies[0])
        assert ended(strategies) == (1, 1)
        np.testing.assert_allclose(sum(weights), before.sum(0), rtol=0, atol=1e-6)
        assert not transports[0].lost


@pytest.mark.parametrize("share_memory", [True, False], ids=["shared", "sockets"])
@wires
def test_a_bad_number_in_the_last_piece_is_taken_back_at_both_ends(share_memory, wire):
    with loopback(2, share_memory=share_memory) as transports:
        strategies, weights = learners(transports, wire)
        weights[0][-1] = np.nan
        before = np.stack(weights)
        exchange(strategies[0])
        assert ended(strategies) == (0, 0)
        np.testing.assert_allclose(weights, before, rtol=0, atol=SAME)
        assert transports[1].refused.counts == {"non-finite weights": 1}


@pytest.mark.parametrize("share_memory", [True, False], ids=["shared", "sockets"])
def test_an_exchange_in_pieces_equals_an_exchange_in_one_piece(share_memory, monkeypatch):
    results = []
    for piece in (PIECE, 10 * COUNT):
        monkeypatch.setattr(flat, "PIECE", piece)
        with loopback(2, share_memory=share_memory) as transports:
            strategies, weights = learners(transports)
            for _ in range(3):
                exchange(strategies[0])
            assert ended(strategies) == (3, 3)
            results.append(np.stack(weights))
    np.testing.assert_array_equal(*results)


def test_a_server_that_dies_in_the_middle_leaves_the_caller_as_it_was(monkeypatch):
    with loopback(2, share_memory=False) as transports:
        strategies, weights = learners(transports)
        before = weights[0].copy()
        behind(transports[0], 1, Cut(boundaries(4, outward=False)[4], outward=False))
        exchange(strategies[0])
        np.testing.assert_allclose(weights[0], before, rtol=0, atol=SAME)
        assert strategies[0].metrics()["exchanges_failed"] == 1


def test_a_peer_of_another_model_is_refused_before_anything_changes():
    with loopback(2, share_memory=False) as transports:
        strategies, weights = learners(transports)
        before = np.stack(weights)
        transports[0].layout = 0  # not checked
        error = transports[0].call(1, calling(torch.zeros(3 * COUNT, dtype=torch.uint8))).exception(PATIENCE_S)
        assert isinstance(error, RefusedError)
        assert error.reason == "another model"
        assert ended(strategies) == (0, 0)
        np.testing.assert_array_equal(weights, before)


def test_a_caller_that_hears_that_its_peer_serves_no_more_calls_stops_sending():
    with loopback(2, share_memory=False) as transports:
        transports[1].serve(None)
        large = torch.zeros(64 * 2**20, dtype=torch.uint8)
        error = transports[0].call(1, calling(large)).exception(PATIENCE_S)
        assert isinstance(error, PeerLostError)
        assert error.reason == "it serves no more calls"
        assert not transports[0].lost


def resources():
    """Open files, and mappings of memory that learners share."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:roundelay")


def test_peers_that_are_lost_in_an_exchange_leave_no_file_and_no_memory_even_if_no_garbage_is_collected():
    with loopback(2) as transports:
        (caller, answerer), _ = learners(transports)

        @contextlib.contextmanager
        def breaking(*call):
            with answerer._answer(*call) as end:
                transports[1]._connections.shut_down(0)
                yield end

        exchange(caller)
        gc.collect()
        gc.disable()
        try:
            before = resources()
            for finished in range(1, 6):
                transports[1].serve(breaking)
                exchange(caller)
                assert transports[0].lost.keys() == {1}
                transports[1].serve(answerer._answer)
                while caller.metrics()["exchanges_finished"] == finished:  # the first may fail: 1 may lose 0 as well
                    assert transports[0]._links._reach(1)
                    caller.reform(Membership.of(2))
                    exchange(caller)
            ends = time.monotonic() + PATIENCE_S
            while resources() > before and time.monotonic() < ends:
                time.sleep(0.01)  # the threads of the old connections end
            assert resources() <= before
        finally:
            gc.enable()
