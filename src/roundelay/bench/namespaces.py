"""Machines on one kernel: network namespaces on a bridge, whose links `tc tbf` shapes. Needs root.

A process with network and process ids of its own shares neither addresses nor memory with the others: to Roundelay and to Gloo it
is another machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from roundelay.errors import RoundelayError

PREFIX = "rdly"
INTERFACE = "eth0"  # inside a namespace
NEEDED = ("ip", "tc", "unshare", "setpriv")
BURST_BYTES = 131072  # sent at full speed before the limit applies: two of the largest segments
QUEUE_MS = 50  # what a link buffers
SUBNET = "10.213.7"  # inside of namespaces only, so that several processes may use it at once


@dataclass(frozen=True)
class Machine:
    """A namespace with its address."""

    name: str
    address: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs `arguments` on this machine. What it starts is killed when this process ends."""
        with_parent = ["setpriv", "--pdeathsig", "KILL"]
        own_processes = ["unshare", "--pid", "--kill-child", "--mount-proc", "--"]
        return [*with_parent, "ip", "netns", "exec", self.name, *own_processes, *arguments]


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
def machines(count: int) -> Iterator[list[Machine]]:
    """`count` machines that reach each other over a bridge. They are gone when the block ends.

    Machines that a killed process has left behind are removed first.

    Raises RoundelayError if the kernel refuses.
    """
    check_available()
    _remove_leftovers()
    bridge, made = f"{PREFIX}{os.getpid()}", []
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for number in range(count):
            machine = Machine(f"{bridge}n{number}", f"{SUBNET}.{number + 1}")
            made.append(machine)
            _add(machine, bridge, number)
        yield made
    finally:
        _remove(bridge, made)


def _remove(bridge: str, made: Sequence[Machine]) -> None:
    # Links first: a namespace keeps its end until its last process has ended, and the name would still be taken.
    links = [["ip", "link", "del", name] for name in (*map(_outside, made), bridge)]
    for command in (*links, *(["ip", "netns", "del", machine.name] for machine in made)):
        subprocess.run(command, check=False, capture_output=True)


def _remove_leftovers() -> None:
    """Remove the machines of processes that no longer exist. Their names have the number of their process."""
    listed = subprocess.run(["ip", "netns", "list"], check=False, capture_output=True, text=True).stdout
    for name, bridge, process in re.findall(rf"^(({PREFIX}(\d+))n\d+)\b", listed, re.MULTILINE):
        if not Path("/proc", process).exists():
            _remove(bridge, [Machine(name, "")])


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
