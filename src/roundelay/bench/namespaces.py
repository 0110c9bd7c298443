"""Machines on one kernel: network namespaces on a bridge, whose links `tc tbf` shapes. Needs root.

A process with network and process ids of its own shares neither addresses nor memory with the others: to Roundelay and to Gloo it
is another machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from roundelay.errors import RoundelayError

PREFIX = "rdly"
INTERFACE = "eth0"  # inside a namespace
NEEDED = ("ip", "tc", "unshare")
BURST_BYTES = 131072  # sent at full speed before the limit applies: two of the largest segments
QUEUE_MS = 50  # what a link buffers


@dataclass(frozen=True)
class Machine:
    """A namespace with its address."""

    name: str
    address: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs `arguments` on this machine."""
        return ["ip", "netns", "exec", self.name, "unshare", "--pid", "--fork", "--mount-proc", "--", *arguments]


def check_available() -> None:
    """Raise RoundelayError unless this process may make network namespaces."""
    missing = [tool for tool in NEEDED if shutil.which(tool) is None]
    if missing:
        raise RoundelayError(f"bench network needs {', '.join(missing)}; install iproute2 and util-linux")
    if os.geteuid() != 0:
        raise RoundelayError(
            "bench network makes network namespaces, so it needs root; run it with sudo or in a container"
        )


@contextmanager
def machines(count: int, *, subnet: str = "10.213.7") -> Iterator[list[Machine]]:
    """`count` machines that reach each other over a bridge. They are gone when the block ends.

    Raises RoundelayError if the kernel refuses.
    """
    check_available()
    bridge, made = f"{PREFIX}{os.getpid() % 100000}", []
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for number in range(count):
            machine = Machine(f"{bridge}n{number}", f"{subnet}.{number + 1}")
            made.append(machine)
            _add(machine, bridge, number)
        yield made
    finally:
        for machine in made:
            subprocess.run(["ip", "netns", "del", machine.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


def _add(machine: Machine, bridge: str, number: int) -> None:
    outside = _outside(machine)
    _run("ip", "netns", "add", machine.name)
    _run("ip", "link", "add", outside, "type", "veth", "peer", "name", INTERFACE, "netns", machine.name)
    _run("ip", "link", "set", outside, "master", bridge, "up")
    inside = ("ip", "-n", machine.name)
    _run(*inside, "addr", "add", f"{machine.address}/24", "dev", INTERFACE)
    _run(*inside, "link", "set", INTERFACE, "up")
    _run(*inside, "link", "set", "lo", "up")


def shape(machine: Machine, rate: str | None) -> None:
    """Limit both directions of a machine's link to a rate of `tc`, such as "200mbit"; None: no limit."""
    for where, device in ((["-n", machine.name], INTERFACE), ([], _outside(machine))):
        subprocess.run(["tc", *where, "qdisc", "del", "dev", device, "root"], check=False, capture_output=True)
        if rate is not None:
            limits = ["rate", rate, "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms"]
            _run("tc", *where, "qdisc", "add", "dev", device, "root", "tbf", *limits)


def _outside(machine: Machine) -> str:
    return machine.name.removeprefix(PREFIX) + "v"


def _run(*command: str) -> None:
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise RoundelayError(f"`{' '.join(command)}` failed: {ended.stderr.strip() or ended.returncode}")
