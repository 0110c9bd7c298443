"""Sums through shared memory, against NumPy; learners are threads of one process here, and real ones in test_oracles.py."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from loopback import loopback, outcomes, together

from roundelay.errors import PeerLostError
from roundelay.transport import bells, shared_memory, shared_sums

pytestmark = pytest.mark.skipif(
    not (shared_memory.available() and bells.available()), reason="needs memfd and glibc 2.30"
)


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    """So that small numbers are summed as large ones are; and who waits looks round soon."""
    monkeypatch.setattr(shared_sums, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(shared_sums, "LOOK_S", 0.05)


def shared_buffer(transport, numbers):
    """A copy of the numbers where learners of this machine can read it."""
    buffer = transport.allocate(numbers.nbytes).view(numbers.dtype)
    return buffer.copy_(numbers)


def forbid_the_engine(transports):
    """From now on only shared memory may be used."""

    def refuse(*arguments):
        raise AssertionError("the engine was asked")

    for transport in transports:
        transport._collectives._engine.all_reduce = transport._collectives._engine.broadcast = refuse


def formed(size, transports, members=None):
    """Have a group form, then take the engine away."""
    members = members or tuple(range(size))
    together(size, lambda rank: summed(transports[rank], torch.zeros(8), members) if rank in members else None)
    forbid_the_engine(transports)
    return members


def summed(transport, numbers, members):
    buffer = shared_buffer(transport, numbers)
    transport.all_reduce(buffer, members).result(20)
    return buffer.clone()


@settings(max_examples=12, deadline=None)
@given(
    size=st.integers(2, 5),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]),
    seed=st.integers(0, 2**16),
)
def test_everybody_has_the_same_sum_bit_for_bit_and_it_is_numpys(size, lengths, dtype, seed):
    rng = np.random.default_rng(seed)
    values = [torch.tensor(rng.integers(-100, 100, (size, length))).to(dtype) for length in lengths]
    with loopback(size) as transports:
        members = formed(size, transports)
        sums = together(size, lambda rank: [summed(transports[rank], each[rank], members) for each in values])
    for number, each in enumerate(values):
        expected = each.double().numpy().sum(axis=0)
        assert all(torch.equal(mine[number], sums[0][number]) for mine in sums)
        assert np.allclose(sums[0][number].double().numpy(), expected, rtol=2**-7 if dtype == torch.bfloat16 else 0)


def test_many_pieces_are_summed_as_one(monkeypatch):
    monkeypatch.setattr(shared_sums, "PIECE", 7)
    with loopback(3) as transports:
        members = formed(3, transports)
        sums = together(3, lambda rank: summed(transports[rank], torch.arange(100.0) * (rank + 1), members))
    assert all(torch.equal(mine, torch.arange(100.0) * 6) for mine in sums)


def test_parts_of_a_buffer_are_summed_where_they_are():
    with loopback(2) as transports:
        members = formed(2, transports)

        def work(rank):
            buffer = transports[rank].allocate(1024).view(torch.float32).fill_(1.0 + rank)
            transports[rank].all_reduce(buffer[64:128], members).result(20)
            return buffer

        for rank, buffer in enumerate(together(2, work)):
            assert (buffer[64:128] == 3.0).all()
            assert (buffer[:64] == 1.0 + rank).all()
            assert (buffer[128:] == 1.0 + rank).all()


def test_a_thousand_sums_of_which_four_are_under_way_at_once_come_out_in_order():
    with loopback(3) as transports:
        members = formed(3, transports)

        def work(rank):
            buffers = [shared_buffer(transports[rank], torch.full((5,), float(rank))) for _ in range(4)]
            for round in range(250):
                futures = [transports[rank].all_reduce(buffer, members) for buffer in buffers]
                for future, buffer in zip(futures, buffers, strict=True):
                    future.result(20)
                    assert (buffer == 3.0 + 3 * round).all()
                    buffer.fill_(rank + 1.0 + round)  # at once: nobody may still be reading it
            return True

        assert together(3, work) == [True] * 3


def test_broadcasts_give_everyone_the_sources_values():
    with loopback(3) as transports:
        members = formed(3, transports)

        def work(rank):
            buffer = shared_buffer(transports[rank], torch.full((50,), float(rank)))
            for source in (2, 0, 1):
                transports[rank].broadcast(buffer, source, members).result(20)
                assert (buffer == source).all()
                buffer.fill_(float(rank))
            return True

        assert together(3, work) == [True] * 3


def test_groups_that_overlap_are_told_apart():
    pairs = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    with loopback(4) as transports:

        def work(rank):
            inside = summed(transports[rank], torch.tensor([float(rank)]), pairs[rank])
            everyone = summed(transports[rank], torch.tensor([float(rank)]), (0, 1, 2, 3))
            return float(inside), float(everyone)

        assert together(4, work) == [(1.0, 6.0), (1.0, 6.0), (5.0, 6.0), (5.0, 6.0)]
        assert all(None not in transport._collectives._groups.values() for transport in transports)


def test_a_member_that_shares_no_memory_has_all_summed_by_the_engine():
    with loopback(3, share_memory=[True, False, True]) as transports:
        sums = together(3, lambda rank: summed(transports[rank], torch.ones(9), (0, 1, 2)))
        assert all(torch.equal(mine, torch.full((9,), 3.0)) for mine in sums)
        assert transports[0]._collectives._groups == {(0, 1, 2): None}


def test_a_member_that_may_not_see_the_others_memory_has_all_summed_by_the_engine(monkeypatch):
    with loopback(2) as transports:
        blind = transports[1]._collectives
        monkeypatch.setattr(blind, "_seen", lambda members, table: None)
        sums = together(2, lambda rank: summed(transports[rank], torch.ones(9), (0, 1)))
        assert all(torch.equal(mine, torch.full((9,), 2.0)) for mine in sums)
        assert transports[0]._collectives._groups == {(0, 1): None}


def test_who_has_nothing_to_sum_has_no_thread():
    with loopback(2) as transports:
        together(2, lambda rank: transports[rank].all_reduce(torch.ones(9), (0, 1)).result(20))
        assert transports[0]._collectives._groups[0, 1]._thread is None


def test_a_board_that_cannot_be_mapped_is_not_seen():
    with loopback(2) as transports:
        collectives = transports[0]._collectives
        nowhere = torch.tensor([[*collectives._host, 2**22 + 1, 3]] * 2)  # no process has that number
        assert collectives._seen((0, 1), nowhere) is None


def test_private_memory_is_summed_by_the_engine():
    values = [torch.ones(9), torch.ones(9)]
    with loopback(2) as transports:
        together(2, lambda rank: transports[rank].all_reduce(values[rank], (0, 1)).result(20))
        assert torch.equal(values[0], torch.full((9,), 2.0))
        forbid_the_engine(transports)
        with pytest.raises(AssertionError, match="the engine was asked"):
            transports[0].all_reduce(values[0], (0, 1))


def test_numbers_that_do_not_lie_together_are_summed_by_the_engine():
    with loopback(2) as transports:
        formed(2, transports)
        scattered = shared_buffer(transports[0], torch.ones(8))[::2]
        with pytest.raises(AssertionError, match="the engine was asked"):
            transports[0].all_reduce(scattered, (0, 1))


def test_matrices_are_summed_as_well():
    with loopback(2) as transports:
        members = formed(2, transports)
        sums = together(2, lambda rank: summed_matrix(transports[rank], members))
        assert all(torch.equal(mine, torch.full((3, 5), 2.0)) for mine in sums)


def summed_matrix(transport, members):
    matrix = shared_buffer(transport, torch.ones(15)).view(3, 5)
    transport.all_reduce(matrix, members).result(20)
    return matrix.clone()


def test_few_numbers_are_summed_by_the_engine(monkeypatch):
    monkeypatch.setattr(shared_sums, "SMALLEST_BYTES", 1000)
    with loopback(2) as transports:
        sums = together(2, lambda rank: summed(transports[rank], torch.ones(9), (0, 1)))
        assert all(torch.equal(mine, torch.full((9,), 2.0)) for mine in sums)
        assert transports[0]._collectives._groups == {}


def test_a_learner_that_dies_ends_the_sums_of_the_others():
    with loopback(3) as transports:
        members = formed(3, transports)

        def work(rank):
            if rank == 2:
                transports[rank].close("it was killed")
                return None
            return summed(transports[rank], torch.ones(9), members)

        ended = outcomes(3, work)
        for error in ended[:2]:
            assert isinstance(error, PeerLostError)
            assert error.peer == 2


def test_a_learner_that_leaves_in_order_without_its_part_ends_the_sums_of_the_others():
    with loopback(2) as transports:
        members = formed(2, transports)
        waiting = transports[0].all_reduce(shared_buffer(transports[0], torch.ones(9)), members)
        transports[1].close()
        with pytest.raises(PeerLostError, match="learner 1"):
            waiting.result(20)


def test_a_slow_learner_is_not_a_dead_one(monkeypatch):
    looked, gate = [], threading.Event()
    with loopback(3) as transports:
        members = formed(3, transports)
        look_round = shared_sums._Group._look_round

        def look(group):
            looked.append(group)
            if len(looked) > 5:
                gate.set()
            look_round(group)

        monkeypatch.setattr(shared_sums._Group, "_look_round", look)

        def work(rank):
            if rank == 2:
                assert gate.wait(20)
            return summed(transports[rank], torch.ones(9), members)

        assert all(torch.equal(mine, torch.full((9,), 3.0)) for mine in together(3, work))


def test_a_group_that_will_never_form_is_given_up_and_the_lost_one_is_named():
    with loopback(3) as transports:

        def work(rank):
            if rank == 2:
                transports[rank].close("it raised")
                return None
            return summed(transports[rank], torch.ones(9), (0, 1, 2))

        for error in outcomes(3, work)[:2]:
            assert isinstance(error, PeerLostError)
            assert error.peer == 2
    assert not [thread for thread in threading.enumerate() if thread.name in ("roundelay-form", "roundelay-sum")]


def test_a_peer_whose_memory_has_gone_is_lost(monkeypatch):
    def gone(member, like):
        raise FileNotFoundError("no such process")

    with loopback(2) as transports:
        members = formed(2, transports)
        monkeypatch.setattr(shared_sums._Member, "numbers", gone)
        for error in outcomes(2, lambda rank: summed(transports[rank], torch.ones(9), members)):
            assert isinstance(error, PeerLostError)
            assert "its memory cannot be read" in str(error)


def test_after_a_failure_nothing_more_is_summed(monkeypatch):
    """Or others would meet this learner's next sum with their last one."""
    with loopback(2) as transports:
        members = formed(2, transports)
        group = transports[0]._collectives._groups[members]
        ready = group._ready

        def fail_once_ready(location):
            ready(location)
            monkeypatch.setattr(group, "_ready", ready)
            raise MemoryError("no room")

        monkeypatch.setattr(group, "_ready", fail_once_ready)
        buffers = {rank: [shared_buffer(transports[rank], torch.ones(9)) for _ in range(2)] for rank in range(2)}
        futures = {
            rank: [transports[rank].all_reduce(buffer, members) for buffer in buffers[rank]] for rank in range(2)
        }
        for future in futures[0]:
            with pytest.raises(MemoryError, match="no room"):
                future.result(20)
        transports[0].close("MemoryError: no room")
        for future in futures[1]:
            with pytest.raises(PeerLostError, match="no room"):
                future.result(20)


def test_closing_ends_the_thread_of_a_sum_that_will_never_be():
    with loopback(2) as transports:
        members = formed(2, transports)
        transports[0].all_reduce(shared_buffer(transports[0], torch.ones(9)), members)
        group = transports[0]._collectives._groups[members]
        transports[0].close()
        assert not group._thread.is_alive()
        assert not group._members  # nor is memory of others kept


def test_what_goes_wrong_in_the_thread_is_raised_where_the_result_is_awaited(monkeypatch):
    with loopback(2) as transports:
        members = formed(2, transports)
        group = transports[0]._collectives._groups[members]
        monkeypatch.setattr(group, "sum", lambda values, location: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            transports[0].all_reduce(shared_buffer(transports[0], torch.ones(9)), members).result(20)
