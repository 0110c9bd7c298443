"""Learner processes on this machine, started and ended together."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager


def local_environment(size: int) -> list[dict[str, str]]:
    """Environment of each of `size` learners on this machine, with the variables that torchrun sets; one thread each."""
    port = _free_port()
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        dict(os.environ)
        | {name: str(value) for name, value in shared.items()}
        | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        for rank in range(size)
    ]


def _free_port() -> int:
    """A port that stays free until the first learner listens there: the system gives connections no port below 32,768."""
    while True:
        port = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def local_learners(size: int, arguments: Sequence[str]) -> AbstractContextManager[list[subprocess.Popen[str]]]:
    """`size` Python processes on this machine, as `running` gives them."""
    command = [sys.executable, *arguments]
    return running((command, environment) for environment in local_environment(size))


@contextmanager
def running(commands: Iterable[tuple[list[str], dict[str, str]]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes with piped stdout, from commands and environments. Those that still run when the block ends are killed."""
    processes = []
    try:
        for command, environment in commands:
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
