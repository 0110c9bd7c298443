"""Groups that form through a store, in threads of this process."""

from __future__ import annotations

import datetime
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from roundelay.cluster.environment import host_store, joined_store
from roundelay.transport import collectives
from roundelay.transport.collectives import StoreCollectives, WorkFuture

NAMED = "127.0.0.2"  # not the address of the machine's name, which Gloo would use by default
MEMBERS = (1, 4, 7)


@pytest.fixture
def collectives_of():
    """Makes the collectives of one learner."""
    store, address = host_store(NAMED)
    made = []

    def make(rank, generation=0, hopeless=lambda members: False):
        made.append(StoreCollectives(lambda: joined_store(address), rank, generation, NAMED, hopeless))
        return made[-1]

    make.address = address
    yield make
    for each in made:
        each.close()
    del store


def together(work):
    with ThreadPoolExecutor(len(MEMBERS)) as pool:
        return list(pool.map(work, MEMBERS))


def test_learners_are_summed_and_broadcast_by_rank_not_by_position(collectives_of):
    def work(rank):
        collectives, values, weights = collectives_of(rank), torch.tensor([float(rank)]), torch.tensor([float(rank)])
        collectives.all_reduce(values, MEMBERS).result()
        collectives.broadcast(weights, 4, MEMBERS).result()
        return float(values), float(weights)

    assert together(work) == [(12.0, 4.0)] * 3


def test_the_groups_of_earlier_generations_are_released_with_their_threads(collectives_of):
    def work(rank):
        ours, threads_of_process = collectives_of(rank), []
        for generation in range(6):
            ours.use_generation(generation)
            ours.all_reduce(torch.zeros(1), MEMBERS).result()
            ours.all_reduce(torch.zeros(1), MEMBERS).result()  # all learners have released the group before
            threads_of_process.append(len(list(Path("/proc/self/task").iterdir())))
        return threads_of_process[-1] - threads_of_process[0], len(ours._groups)

    grown = together(work)
    assert max(threads for threads, _ in grown) <= 3 * len(MEMBERS)  # 5 generations of 3 learners would leave 45
    assert [groups for _, groups in grown] == [1] * 3


def test_a_group_that_a_lost_member_left_unformed_does_not_hold_up_the_next_one(collectives_of):
    """Learner 7 has come to the store, and is lost before it forms the group."""
    store = torch.distributed.PrefixStore(f"0/gloo/{MEMBERS}", joined_store(collectives_of.address))
    store.set(f"{MEMBERS}/7", b"here")
    begun = time.monotonic()

    def work(rank):
        ours = collectives_of(rank, hopeless=lambda members: time.monotonic() > begun + 1.0)
        if rank != 7:
            with pytest.raises(ConnectionError, match="lost while it was being formed"):
                ours.all_reduce(torch.zeros(1), MEMBERS)
        ours._hopeless = lambda members: False
        ours.use_generation(1)
        values = torch.tensor([float(rank)])
        ours.all_reduce(values, MEMBERS).result()
        return float(values)

    assert together(work) == [12.0] * 3
    assert time.monotonic() - begun < 30.0


def test_a_group_is_not_released_while_a_collective_runs_that_was_given_up(collectives_of):
    """Releasing it would wait for a frozen member, for ever."""
    go_on, first = threading.Event(), MEMBERS[0]

    def work(rank):
        ours = collectives_of(rank)
        ours.all_reduce(torch.zeros(1), MEMBERS).result()
        if rank != first:
            go_on.wait(60)
            ours.all_reduce(torch.zeros(1), MEMBERS).result()
            return None
        given_up = ours.all_reduce(torch.zeros(1), MEMBERS)
        given_up.set_exception(ConnectionError("no heartbeat"))
        del given_up  # no caller keeps this future
        releasing = threading.Thread(target=ours.use_generation, args=(1,), daemon=True)
        releasing.start()
        releasing.join(10)
        found = releasing.is_alive(), len(ours._groups)
        go_on.set()
        while ours._under_way():
            time.sleep(0.01)
        ours.use_generation(2)
        return *found, len(ours._groups)

    assert together(work)[0] == (False, 1, 0)


def test_a_group_whose_member_is_lost_before_it_forms_is_given_up(collectives_of):
    with pytest.raises(ConnectionError, match="lost while it was being formed"):
        collectives_of(1, hopeless=lambda members: True).all_reduce(torch.zeros(1), (1, 2))
    assert not [
        thread for thread in threading.enumerate() if thread.name == "roundelay-form-group"
    ]  # it would wait for ever


def test_a_store_that_is_gone_forms_no_group(collectives_of, monkeypatch):
    def gone(*arguments):
        raise RuntimeError("Connection was likely closed")

    ours = collectives_of(1)
    monkeypatch.setattr(collectives.dist, "PrefixStore", lambda prefix, store: SimpleNamespace(set=gone))
    with pytest.raises(ConnectionError, match=r"cannot be reached \(Connection was likely closed\)"):
        ours.all_reduce(torch.zeros(1), (1, 2))


class Work:
    """A collective that ends just when a wait for it times out."""

    def __init__(self, error=None):
        self.ended, self.error = False, error

    def is_completed(self):
        return self.ended

    def wait(self, timeout):
        if not self.ended:
            self.ended = True
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise self.error


def test_a_collective_that_ends_just_after_a_wait_has_timed_out_has_not_failed():
    future = WorkFuture(Work())
    future.result()
    assert future.exception() is None


def test_no_slow_member_is_taken_for_a_failure_however_the_waits_fall(collectives_of, monkeypatch):
    monkeypatch.setattr(collectives, "LOOK", datetime.timedelta(milliseconds=1))
    finished = []

    def work(rank):
        collectives, random = collectives_of(rank), Random(rank)
        for _ in range(400):
            time.sleep(random.uniform(0, 3e-3))
            collectives.all_reduce(torch.ones(1), MEMBERS).result()
        finished.append(rank)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in MEMBERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)  # if one has failed, the others wait for ever
    assert sorted(finished) == list(MEMBERS)


def test_a_collective_that_fails_raises_its_own_error(monkeypatch):
    monkeypatch.setattr(collectives, "LOST_AFTER_S", 0.01)  # no failure detector will say whose connection it was
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        WorkFuture(Work(RuntimeError("Connection closed by peer"))).result()


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux's /proc to see which sockets listen")
def test_nothing_listens_beyond_the_interface_that_was_named(collectives_of):
    before = listeners()
    made = together(lambda rank: (ours := collectives_of(rank)).all_reduce(torch.zeros(1), MEMBERS).result() or ours)
    assert len(made) == 3
    assert {address for _, address in listeners() - before} == {NAMED}


def listeners() -> set[tuple[str, str]]:
    """This process's listening sockets: (inode, address)."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                packed = bytes.fromhex(fields[1].split(":")[0])
                words = b"".join(packed[i : i + 4][::-1] for i in range(0, len(packed), 4))
                found.add((fields[9], socket.inet_ntop(family, words)))
    return found
