import os

import pytest
import torch

from roundelay.errors import HandshakeError
from roundelay.transport import shared_memory
from roundelay.transport.shared_memory import PeerMemory, SharedMemory

pytestmark = pytest.mark.skipif(not shared_memory.available(), reason="needs memfd_create")


@pytest.fixture
def ours():
    memory = SharedMemory()
    yield memory
    memory.close()


@pytest.fixture
def theirs():
    """What a peer sees of our memory; it is in the same process here."""
    return PeerMemory(os.getpid())


def test_both_sides_see_the_same_bytes(ours, theirs):
    buffer = ours.allocate(1000)
    mapped = theirs.map(ours.locate(buffer), 1000)
    buffer.fill_(7)
    assert (mapped == 7).all()
    mapped.fill_(9)
    assert (buffer == 9).all()


def test_a_buffer_is_mapped_once(ours, theirs):
    fd = ours.locate(ours.allocate(64))
    assert theirs.map(fd, 64) is theirs.map(fd, 64)
    assert theirs.map(fd, 32).nbytes == 32


def test_a_buffer_that_is_shorter_than_announced_is_refused(ours, theirs):
    fd = ours.locate(ours.allocate(64))
    with pytest.raises(HandshakeError, match="announced 65 bytes in shared memory of 64"):
        theirs.map(fd, 65)


def test_only_own_buffers_are_located(ours):
    assert ours.locate(torch.zeros(8, dtype=torch.uint8)) == -1
    assert ours.locate(SharedMemory().allocate(8)) == -1


def test_an_empty_buffer_is_a_buffer(ours):
    assert ours.allocate(0).nbytes == 0


def test_memory_outlives_the_descriptor(ours):
    files = len(os.listdir("/proc/self/fd"))
    buffer = ours.allocate(8)
    assert len(os.listdir("/proc/self/fd")) == files + 1
    ours.close()
    assert len(os.listdir("/proc/self/fd")) == files
    buffer.fill_(3)
    assert int(buffer.sum()) == 24


def test_a_descriptor_that_does_not_exist_is_an_os_error(theirs):
    with pytest.raises(OSError, match="No such file"):
        theirs.map(987654, 8)


def test_a_freed_buffer_cannot_be_located_and_another_file_is_not_taken_for_it(ours, theirs):
    files = len(os.listdir("/proc/self/fd"))
    buffer = ours.allocate(64)
    place = ours.locate(buffer)
    mapped = theirs.map(place, 64)
    ours.free(buffer)
    assert len(os.listdir("/proc/self/fd")) == files
    assert ours.locate(buffer) == -1
    mapped.fill_(5)
    assert (buffer == 5).all(), "a peer that has mapped it can still write to it"
    after = ours.allocate(64)
    late = PeerMemory(os.getpid())
    with pytest.raises(HandshakeError, match="that it has freed"):  # the file descriptor has the same number again
        late.map(place, 64)
    late.map(ours.locate(after), 64).fill_(7)
    assert (after == 7).all()
    ours.free(torch.zeros(8, dtype=torch.uint8))  # not made by `allocate`: nothing to do
