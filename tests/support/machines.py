"""Machines in one: network namespaces on a bridge, and links between them that a test cuts. Needs root and `ip`."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

NOWHERE = "02:00:00:00:00:99"  # frames to this address reach no machine


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Machines:
    """Machines 1 .. count with addresses on one network.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._tag = f"rl{os.getpid() % 100000}"
        self._network = f"10.{60 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        _ip("link", "add", self._tag, "type", "bridge")
        _ip("link", "set", self._tag, "up")
        self._count = count
        for machine in range(1, count + 1):
            space = self._space(machine)
            _ip("netns", "add", space)
            _ip("link", "add", f"{self._tag}v{machine}", "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", f"{self._tag}v{machine}", "master", self._tag, "up")
            _ip("-n", space, "addr", "add", f"{self.address(machine)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def _space(self, machine: int) -> str:
        return f"{self._tag}n{machine}"

    def address(self, machine: int) -> str:
        """The IP address of a machine."""
        return f"{self._network}.{machine}"

    def inside(self, machine: int) -> tuple[str, ...]:
        """What to put before a command so that it runs on that machine."""
        return "ip", "netns", "exec", self._space(machine)

    @contextlib.contextmanager
    def cut(self, one: int, other: int) -> Iterator[None]:
        """In this block no packet passes between the two machines; both still reach all others."""
        pairs = [(one, other), (other, one)]
        for here, there in pairs:
            entry = (self.address(there), "lladdr", NOWHERE, "nud", "permanent", "dev", "eth0")
            _ip("-n", self._space(here), "neigh", "replace", *entry)
        yield
        for here, there in pairs:
            _ip("-n", self._space(here), "neigh", "del", self.address(there), "dev", "eth0")

    def close(self) -> None:
        """Remove all of it."""
        for machine in range(1, self._count + 1):
            subprocess.run(["ip", "netns", "del", self._space(machine)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._tag], check=False, capture_output=True)


@contextlib.contextmanager
def machines(count: int) -> Iterator[Machines]:
    """Machines for a test, which is skipped if this process may not make network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the command ip")
    try:
        made = Machines(count)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr}")
    try:
        yield made
    finally:
        made.close()
