"""A link of a given rate between two network namespaces of this machine. It takes root, and the programs ip and tc."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from roundelay.errors import UsageError

_BURST = "64kb"
_LATENCY = "50ms"  # how long the shaper may hold a packet before it drops one


@dataclass(frozen=True)
class Link:
    """Two ends of a link: their addresses, and the words before a command that runs at that end."""

    addresses: tuple[str, str]
    prefixes: tuple[tuple[str, ...], tuple[str, ...]]


@contextmanager
def shaped_link(rate: str) -> Iterator[Link]:
    """Two namespaces with a link between them that carries `rate` each way, such as "200mbit"; removed at the end.

    Raises UsageError if this process may not make one, or if tc does not know the rate.
    """
    if reason := unavailable():
        raise UsageError(f"a link of a given rate cannot be made here: {reason}")
    names = tuple(f"roundelay-{os.getpid()}-{end}" for end in range(2))
    devices = tuple(f"rl{os.getpid() % 10**6}e{end}" for end in range(2))
    addresses = ("10.213.7.1", "10.213.7.2")
    with ExitStack() as stack:
        for name in names:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "delete", name)
        _run("ip", "link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for name, device, address in zip(names, devices, addresses, strict=True):
            _run("ip", "link", "set", device, "netns", name)
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", device)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", device, "up")
            shaper = ("root", "tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY)
            _run("tc", "-n", name, "qdisc", "add", "dev", device, *shaper)
        yield Link(addresses, (("ip", "netns", "exec", names[0]), ("ip", "netns", "exec", names[1])))


def unavailable() -> str | None:
    """Why no link can be made here; None if one can."""
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"install {' and '.join(missing)} (iproute2)"
    if os.geteuid() != 0:
        return "it takes root"
    probe = f"roundelay-{os.getpid()}-probe"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "the kernel or the container forbids network namespaces"
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    return None


def _run(*words: str) -> None:
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise UsageError(f"{' '.join(words)}: {ended.stderr.strip().splitlines()[-1] if ended.stderr else 'failed'}")
