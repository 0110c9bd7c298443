import signal
import threading
import time

import pytest
from loopback import PATIENCE_S

from roundelay.strategies.fair_lock import FairLock


def test_a_fair_lock_is_handed_over_in_the_order_in_which_threads_came():
    lock, order = FairLock(), []
    lock.acquire()

    def come(number):
        with lock:
            order.append(number)

    threads = []
    for number in range(5):
        threads.append(threading.Thread(target=come, args=(number,)))
        threads[-1].start()
        while len(lock._waiting) <= number:  # it has not come to wait yet
            time.sleep(0.001)
    lock.release()
    lock.acquire()  # behind all that wait
    order.append("came again")
    lock.release()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert order == [0, 1, 2, 3, 4, "came again"]
    assert not lock.locked()


def test_a_signal_that_interrupts_a_waiter_leaves_the_fair_lock_usable():
    """Ctrl-C while the training thread waits: its turn must not be handed over to it later."""
    lock, main = FairLock(), threading.get_ident()

    def interrupt(number, frame):
        raise KeyboardInterrupt

    def signal_the_waiter():
        while not lock._waiting:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGUSR1)

    lock.acquire()
    before = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=signal_the_waiter)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()
    finally:
        thread.join(PATIENCE_S)
        signal.signal(signal.SIGUSR1, before)
    lock.release()
    assert not lock.locked()
