from concurrent.futures import Future

import pytest

from roundelay.clock import VirtualClock, done, then
from roundelay.errors import DeadlockError


def test_events_of_one_time_run_in_the_order_in_which_they_were_scheduled():
    clock, log = VirtualClock(), []
    for name in "abc":
        clock.call_later(1.0, lambda name=name: log.append(name))
    clock.call_later(0.5, lambda: log.append("early"))
    clock.run()
    assert log == ["early", "a", "b", "c"]


def test_time_passes_only_with_events():
    clock, seen = VirtualClock(), []
    clock.call_later(2.5, lambda: seen.append(clock.now()))
    clock.run(until=2.0)
    assert seen == []
    assert clock.now() == 2.0
    clock.run(until=3.0)
    assert seen == [2.5]
    assert clock.now() == 3.0


def test_a_negative_delay_means_now_because_time_never_runs_backwards():
    clock, seen = VirtualClock(), []
    clock.run(until=5.0)
    clock.call_later(-3.0, lambda: seen.append(clock.now()))
    clock.run()
    assert seen == [5.0]


def test_a_process_gets_the_result_of_the_future_it_waits_for():
    clock, received = VirtualClock(), []
    mailbox: Future[str] = Future()

    def listener():
        received.append((yield mailbox))
        received.append((yield done("at once")))

    clock.spawn(listener())
    clock.call_later(1.0, lambda: mailbox.set_result("late"))
    clock.run()
    assert received == ["late", "at once"]


def test_a_process_can_catch_the_failure_of_the_future_it_waits_for():
    clock, caught = VirtualClock(), []
    broken: Future[None] = Future()
    broken.set_exception(ConnectionError("gone"))

    def careful():
        try:
            yield broken
        except ConnectionError as error:
            caught.append(str(error))

    clock.spawn(careful())
    clock.run()
    assert caught == ["gone"]


def test_run_raises_the_error_of_a_process():
    clock = VirtualClock()

    def broken():
        yield 1.0
        raise ZeroDivisionError("at one second")

    clock.spawn(broken())
    with pytest.raises(ZeroDivisionError, match="at one second"):
        clock.run()
    assert clock.now() == 1.0


def test_other_processes_can_go_on_after_one_has_raised():
    clock, log = VirtualClock(), []

    def broken():
        yield 1.0
        raise ZeroDivisionError

    def sound():
        yield 2.0
        log.append(clock.now())

    clock.spawn(broken())
    clock.spawn(sound())
    with pytest.raises(ZeroDivisionError):
        clock.run()
    clock.run()
    assert log == [2.0]


def test_a_deadlock_names_the_waiting_processes():
    clock = VirtualClock()

    def waits_forever():
        yield Future()

    def ends():
        yield 1.0

    clock.spawn(waits_forever(), "learner 3")
    clock.spawn(ends(), "learner 4")
    with pytest.raises(DeadlockError, match="learner 3") as caught:
        clock.run()
    assert "learner 4" not in str(caught.value)


def test_a_killed_process_does_nothing_more_and_its_future_is_done():
    clock, log = VirtualClock(), []

    def walker():
        while True:
            yield 1.0
            log.append(clock.now())

    process = walker()
    ended = clock.spawn(process)
    clock.call_later(2.5, lambda: clock.kill(ended, process))
    clock.run()
    assert log == [1.0, 2.0]
    assert ended.done()


def test_one_process_can_wait_for_the_end_of_another():
    clock, log = VirtualClock(), []

    def worker():
        yield 3.0

    def waiter(ended):
        yield ended
        log.append(clock.now())

    clock.spawn(waiter(clock.spawn(worker())))
    clock.run()
    assert log == [3.0]


def test_equal_inputs_give_equal_runs():
    def history():
        clock, log = VirtualClock(), []

        def walker(name, pace_s):
            for _ in range(20):
                yield pace_s
                log.append((clock.now(), name))

        for name in range(5):
            clock.spawn(walker(name, 0.1 * (1 + name % 2)))
        clock.run()
        return log

    assert history() == history()


def test_a_converted_future_has_the_converted_result_or_the_error():
    number: Future[int] = Future()
    doubled, inverse = then(number, lambda x: 2 * x), then(number, lambda x: 1 / x)
    number.set_result(0)
    assert doubled.result() == 0
    assert isinstance(inverse.exception(), ZeroDivisionError)
    failed: Future[int] = Future()
    failed.set_exception(KeyError("lost"))
    assert isinstance(then(failed, str).exception(), KeyError)
