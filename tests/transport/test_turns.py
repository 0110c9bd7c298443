import os
import sys
import threading

import pytest
from loopback import PATIENCE_S, loopback

from roundelay.transport import turns as turns_module
from roundelay.transport.turns import FIRST_HURRY, LONGEST_HURRY, NICENESS, PATIENCE_S as ENOUGH_S, Turns, give_way

linux = pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")


def hurried_calls(turns):
    """How many calls hurry until patience is tried again."""
    turns.waited(2 * ENOUGH_S)
    count = 0
    while not turns.patient:
        turns.waited(0.0)
        count += 1
    return count


def test_nobody_is_patient_before_the_first_call():
    turns = Turns()
    assert not turns.patient
    turns.waited(10.0)
    assert turns.patient


def test_a_call_that_gets_its_turn_soon_leaves_everybody_patient():
    turns = Turns()
    for _ in range(100):
        turns.waited(ENOUGH_S / 2)
    assert turns.patient


def test_after_a_call_that_had_to_wait_others_hurry_each_time_twice_as_long():
    turns = Turns()
    turns.waited(0.0)
    lengths = [hurried_calls(turns) for _ in range(10)]
    assert lengths[:3] == [FIRST_HURRY, 2 * FIRST_HURRY, 4 * FIRST_HURRY]
    assert lengths[-1] == LONGEST_HURRY


@linux
@pytest.mark.parametrize(("patient", "policy"), [(True, os.SCHED_IDLE), (False, os.SCHED_OTHER)])
def test_a_thread_gives_way_and_no_other_thread_does(patient, policy):
    found = []

    def work():
        give_way(patient=patient)
        thread = threading.get_native_id()
        found.append((os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)))

    mine = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE_S)
    assert found == [(policy, NICENESS)]
    assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) == mine


@linux
def test_who_serves_is_patient_too_until_calls_hurry_and_no_request_is_lost_when_that_changes():
    policies = []

    def handler(peer, request, reply):
        policies.append(os.sched_getscheduler(threading.get_native_id()))
        reply.copy_(request + 1)

    with loopback(2, share_memory=False) as (a, b):
        a.serve(handler)
        b.serve(lambda peer, request, reply: reply.copy_(request))
        for patient, policy in ((True, os.SCHED_IDLE), (False, os.SCHED_OTHER), (True, os.SCHED_IDLE)):
            a._turns.patient = patient
            a._turns._hurried = 10**9  # only this test decides
            buffer = b.allocate(64)
            for _ in range(3):  # the thread that waits for the first request is of the old kind still
                b.call(0, buffer.fill_(5)).result(PATIENCE_S)
                assert (buffer == 6).all()
            assert policies[-1] == policy


@linux
def test_swaps_are_patient_from_the_second_on_and_hurry_after_one_that_had_to_wait(monkeypatch):
    monkeypatch.setattr(turns_module, "PATIENCE_S", PATIENCE_S)  # however busy the machine is
    policies = []
    with loopback(2, share_memory=False) as (a, b):
        push = a._push
        monkeypatch.setattr(
            a, "_push", lambda *sent: policies.append(os.sched_getscheduler(threading.get_native_id())) or push(*sent)
        )
        for round in range(4):
            if round == 3:
                a._turns.waited(2 * PATIENCE_S)
            swaps = [t.swap(round, t.allocate(64).fill_(t.rank), {1 - t.rank: t.allocate(64)}) for t in (a, b)]
            assert [swap.result(PATIENCE_S) for swap in swaps] == [None, None]
    assert policies == [os.SCHED_OTHER, os.SCHED_IDLE, os.SCHED_IDLE, os.SCHED_OTHER]
