"""Machines in one for tests, which are skipped where there can be none, and links between machines that a test cuts."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

import pytest

from roundelay.bench import namespaces
from roundelay.bench.namespaces import INTERFACE, Machine
from roundelay.errors import RoundelayError

NOWHERE = "02:00:00:00:00:99"  # frames to this address reach no machine


@contextlib.contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """Machines on one network; see `namespaces.machines`."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(namespaces.machines(count))
        except RoundelayError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made


def inside(machine: Machine) -> tuple[str, ...]:
    """What to put before a command so that it runs on that machine, with the process ids of this one."""
    return "ip", "netns", "exec", machine.name


@contextlib.contextmanager
def cut(one: Machine, other: Machine) -> Iterator[None]:
    """In this block no packet passes between the two machines; both still reach all others."""
    pairs = [(one, other), (other, one)]
    for here, there in pairs:
        _neighbour("replace", here, there, "lladdr", NOWHERE, "nud", "permanent")
    yield
    for here, there in pairs:
        _neighbour("del", here, there)


def _neighbour(change: str, here: Machine, there: Machine, *words: str) -> None:
    command = ["ip", "-n", here.name, "neigh", change, there.address, *words, "dev", INTERFACE]
    subprocess.run(command, check=True, capture_output=True)
