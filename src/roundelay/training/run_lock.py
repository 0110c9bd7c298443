"""A lock on the directory of a run, so that two commands do not train in one directory.

The lock is flock's, on an open file. The supervisor hands that file to its learners, so the lock lasts until all of them
have ended, also if the supervisor is killed. The kernel releases the lock when the last of these processes ends, so
nothing must be cleaned up. The file says which process took the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from roundelay.errors import ConfigError

log = logging.getLogger("roundelay")

LOCK = "lock"
_held: list[int] = []


def held() -> tuple[int, ...]:
    """The file descriptors of the locks of this process, to be kept open by the processes that it starts."""
    return tuple(_held)


@contextlib.contextmanager
def hold(folder: Path, *, shared: bool = False) -> Iterator[bool]:
    """In this block no other command may train in `folder`. Gives whether this is the first command there.

    Args:
        folder: of the run.
        shared: the run has learners on several machines, and their supervisors may use one directory.

    Raises ConfigError, which names the owner, if another command holds the lock.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        first = _take(descriptor, folder, shared=shared)
        _held.append(descriptor)
        try:
            yield first
        finally:
            _held.remove(descriptor)
    finally:
        os.close(descriptor)


def _take(descriptor: int, folder: Path, *, shared: bool) -> bool:
    """Take the lock; returns whether no other command has it."""
    try:
        first = _lock(descriptor, fcntl.LOCK_EX)
        if not (shared and _lock(descriptor, fcntl.LOCK_SH)) and not first:
            raise ConfigError(f"'{folder}' is in use by {_owner(descriptor)}")
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
            raise
        first = True
        log.warning("'%s' is on a file system without locks (%s): start no second run there", folder, error.strerror)
    if first:
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{platform.node()} {os.getpid()}\n".encode(), 0)
    return first


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _owner(descriptor: int) -> str:
    """A description of the process that took the lock, and what to do."""
    host, _, process = os.pread(descriptor, 300, 0).decode(errors="replace").strip().rpartition(" ")
    if host == platform.node() and process.isdigit() and not Path("/proc", process).exists():
        return f"learners of process {process}, which has ended; they save and end within seconds: try again"
    return f"process {process or '?'} on {host or 'another machine'}; stop it by Ctrl-C, or wait until it has ended"
