import os
import sys
import threading
import time

import pytest
from loopback import PATIENCE_S

from roundelay.transport.callers import LONGEST_DELAY_S, Alarm, Callers

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has timers that are files, and patient threads")


@pytest.fixture
def callers():
    callers = Callers(size=3)
    yield callers
    callers.shutdown()


@pytest.mark.parametrize("how", ["submit", "submit_later"])
def test_a_request_is_made_in_another_thread_and_its_result_or_error_is_told(callers, how):
    submit = getattr(callers, how)
    assert submit(threading.get_ident).result(PATIENCE_S) != threading.get_ident()
    assert submit(divmod, 7, 2).result(PATIENCE_S) == (3, 1)
    with pytest.raises(ZeroDivisionError, match="modulo by zero"):
        submit(divmod, 7, 0).result(PATIENCE_S)
    assert submit(divmod, 9, 2).result(PATIENCE_S) == (4, 1), "an error ends its request only"


@linux
@pytest.mark.parametrize(("patient", "policy"), [(True, os.SCHED_IDLE), (False, os.SCHED_OTHER)])
def test_a_request_is_made_by_a_thread_of_the_kind_that_was_asked_for(callers, patient, policy):
    thread = callers.submit(threading.get_native_id, patient=patient).result(PATIENCE_S)
    assert os.sched_getscheduler(thread) == policy


@linux
def test_patient_requests_are_made_by_one_thread_that_is_patient(callers):
    threads = {callers.submit_later(threading.get_native_id).result(PATIENCE_S) for _ in range(5)}
    assert [os.sched_getscheduler(thread) for thread in threads] == [os.SCHED_IDLE]


def test_a_patient_request_that_never_ends_holds_up_no_other(callers):
    ended = threading.Event()
    endless = callers.submit_later(ended.wait)
    others = [callers.submit_later(divmod, 7, 2) for _ in range(3)]
    assert [other.result(PATIENCE_S) for other in others] == 3 * [(3, 1)]
    assert not endless.done()
    ended.set()
    assert endless.result(PATIENCE_S) is True


@linux
def test_a_patient_request_begins_later_by_a_share_of_the_time_between_two():
    callers = Callers(size=2)
    delays = []
    for pause_s in (0.0, 0.0, 0.1, 0.1):
        time.sleep(pause_s)
        asked_s = time.monotonic()
        delays.append(callers.submit_later(time.monotonic).result(PATIENCE_S) - asked_s)
    callers.shutdown()
    assert min(delays[2:]) >= LONGEST_DELAY_S
    assert min(delays[:2]) < LONGEST_DELAY_S or max(delays) > 10 * LONGEST_DELAY_S, "unless the machine is busy"


@pytest.mark.parametrize("pause_s", [0.0, 0.0001, 0.005])
def test_what_was_submitted_before_the_end_is_made(pause_s):
    for _ in range(20):
        callers = Callers(size=2)
        first = callers.submit_later(divmod, 7, 2)
        time.sleep(pause_s)
        second = callers.submit_later(divmod, 9, 2)
        callers.shutdown()
        assert (first.result(0), second.result(0)) == ((3, 1), (4, 1))


def test_after_the_end_no_thread_is_left(callers):
    before = threading.active_count()
    others = Callers(size=2)
    others.submit(divmod, 7, 2)
    others.submit_later(divmod, 7, 2)
    others.shutdown()
    assert threading.active_count() == before


@linux
def test_an_alarm_goes_off_once_and_not_before_its_time():
    alarm = Alarm()
    began_s = time.monotonic()
    alarm.set(10.0)
    alarm.set(0.02)  # instead
    alarm.wait()
    assert 0.02 <= time.monotonic() - began_s < 10.0
    again = threading.Thread(target=alarm.wait)
    again.start()
    again.join(0.05)
    assert again.is_alive(), "it has gone off once"
    alarm.set(0.0)
    again.join(PATIENCE_S)
    assert not again.is_alive()
    alarm.close()
