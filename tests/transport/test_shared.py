import os

import pytest
import torch

from roundelay.transport import shared
from roundelay.transport.shared import SharedMemory

pytestmark = pytest.mark.skipif(not shared.available(), reason="needs memfd_create")


@pytest.fixture
def memories():
    ours, theirs = SharedMemory(), SharedMemory()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_both_sides_see_the_same_bytes(memories):
    ours, theirs = memories
    buffer = ours.allocate(1000)
    mapped = theirs.map(os.getpid(), ours.locate(buffer), 1000)
    buffer.fill_(7)
    assert (mapped == 7).all()
    mapped.fill_(9)
    assert (buffer == 9).all()


def test_a_buffer_is_mapped_once(memories):
    ours, theirs = memories
    fd = ours.locate(ours.allocate(64))
    assert theirs.map(os.getpid(), fd, 64).data_ptr() == theirs.map(os.getpid(), fd, 32).data_ptr()


def test_only_own_buffers_are_located(memories):
    ours, theirs = memories
    assert ours.locate(torch.zeros(8, dtype=torch.uint8)) == -1
    assert ours.locate(theirs.allocate(8)) == -1


def test_an_empty_buffer_is_a_buffer(memories):
    ours, _ = memories
    assert ours.allocate(0).nbytes == 0


def test_memory_outlives_the_descriptor(memories):
    ours, _ = memories
    buffer = ours.allocate(8)
    fd = ours.locate(buffer)
    ours.close()
    buffer.fill_(3)
    assert int(buffer.sum()) == 24
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_what_cannot_be_opened_is_an_os_error(memories):
    with pytest.raises(OSError, match="No such file"):
        memories[0].map(os.getpid(), 987654, 8)


def test_a_number_that_stands_for_another_file_now_is_mapped_anew(memories):
    ours, theirs = memories
    buffer = ours.allocate(64)
    number = ours.locate(buffer)
    theirs.map(os.getpid(), number, 64)
    ours.withdraw(buffer)
    ours.withdraw(buffer)
    assert ours.locate(buffer) == number, "the system hands out the lowest number that is free"
    theirs.map(os.getpid(), number, 64).fill_(5)
    assert (buffer == 5).all()


def test_memory_of_a_peer_that_is_gone_is_given_back(memories):
    ours, theirs = memories
    for _ in range(3):
        theirs.map(os.getpid(), ours.locate(ours.allocate(64)), 64)
    theirs.forget(os.getpid() + 1)
    assert len(theirs._theirs) == 3
    theirs.forget(os.getpid())
    assert not theirs._theirs
