from __future__ import annotations

import threading
import time

import pytest
import torch

from roundelay.transport import bells
from roundelay.transport.bells import BELL_BYTES, Bell

pytestmark = pytest.mark.skipif(not bells.available(), reason="needs sem_clockwait")


@pytest.fixture
def bell():
    memory = torch.zeros(BELL_BYTES, dtype=torch.uint8)
    hung = Bell(memory.data_ptr())
    hung.hang()
    yield hung
    del memory


def test_rings_are_counted(bell):
    bell.ring()
    bell.ring()
    assert bell.wait(0.0)
    assert bell.wait(0.0)
    assert not bell.wait(0.0)


def test_a_ring_wakes_who_waits(bell):
    waiting, woken = threading.Event(), threading.Event()

    def wait():
        while not bell.wait(0.01):
            waiting.set()
        woken.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert waiting.wait(10.0)
    bell.ring()
    assert woken.wait(10.0)
    waiter.join()


def test_a_wait_that_nobody_ends_takes_as_long_as_it_was_told(bell):
    began = time.monotonic()
    assert not bell.wait(0.05)
    assert time.monotonic() - began >= 0.05


def test_two_at_one_place_are_one_bell(bell):
    twin = Bell(bell._semaphore.value)
    twin.ring()
    assert bell.wait(0.0)


def test_an_error_of_the_system_is_raised(bell, monkeypatch):
    class Broken:
        @staticmethod
        def sem_post(semaphore):
            return -1

    monkeypatch.setattr(bells, "_libc", Broken)
    with pytest.raises(OSError, match="a semaphore in shared memory does not work"):
        bell.ring()
