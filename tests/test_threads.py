"""Threads of the library: named, daemons, and polite if they communicate."""

import os
import re
import sys
import threading
from pathlib import Path

import pytest

from roundelay import threads


def test_a_thread_is_a_daemon_with_a_name_of_ours():
    go_on = threading.Event()
    thread = threads.start("test", go_on.wait)
    assert thread.name == "roundelay-test"
    assert thread.daemon
    go_on.set()
    thread.join(10)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority per thread")
def test_a_thread_that_yields_to_computation_leaves_the_priority_of_others_alone():
    niceness = []

    def work():
        threads.yield_to_computation()
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    threads.start("test", work).join(10)
    assert niceness == [threads.NICENESS]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_only_this_module_and_pools_start_threads():
    source = Path(threads.__file__).parent
    starters = [path.name for path in source.rglob("*.py") if "threading.Thread(" in path.read_text()]
    assert starters == ["threads.py"]


def test_architecture_lists_every_thread_with_its_owner():
    source = Path(threads.__file__).parent
    starts = re.compile(r'threads\.start\(f?"([\w-]+?)-?["{]|ThreadPoolExecutor\([^"]*"roundelay-([\w-]+)"')
    started = {
        f"roundelay-{thread or pool}": path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        for thread, pool in starts.findall(path.read_text())
    }
    page = (source.parents[1] / "ARCHITECTURE.md").read_text()
    listed = dict(re.findall(r"^\| `(roundelay-[\w-]+?)(?:[_-]N)?` \| `([\w/.]+)`", page, re.MULTILINE))
    assert listed == started
