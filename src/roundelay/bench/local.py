"""Learner processes on this machine: started together, ended together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def free_port() -> int:
    """A port of the loopback that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def local_learners(size: int, arguments: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """`size` Python processes with torchrun's environment, one thread each; their stdout is piped. All end with the block."""
    port = free_port()
    processes = []
    try:
        for rank in range(size):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            processes.append(
                subprocess.Popen([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, text=True)
            )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
