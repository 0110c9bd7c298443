"""Who has the cores during a step, and whom the training threads wait for: read off the kernel's trace of its scheduler.

    sudo python benchmarks/core_waits.py none "adpsgd random-ring shared-memory" "dpsgd random-ring sockets"

1 M parameters, 20 ms, four equally fast learners, as in `roundelay bench throughput`. Milliseconds per step and learner. Needs
Linux with tracefs, and the right to use it. Waits are times in which a training thread could run and did not; what it sleeps or
waits for locks and the interpreter is in none of the columns.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
from collections import Counter
from pathlib import Path

from few_cases import LEARNERS, case_of

from roundelay.bench.local import local_learners

TRACE = Path("/sys/kernel/tracing")
EVENTS = ("sched_switch", "sched_wakeup")
BUFFER_KB = 2**16
TRAINING, IDLE, ELSE = "training", "idle", "else"

_SWITCH = re.compile(
    r"\[(?P<cpu>\d+)\].* (?P<time>[\d.]+): sched_switch: "
    r".*prev_pid=(?P<old>\d+) .*prev_state=(?P<state>\S+) .*next_pid=(?P<new>\d+)"
)
_WAKEUP = re.compile(r" (?P<time>[\d.]+): sched_wakeup: .* pid=(?P<who>\d+) .*target_cpu=(?P<cpu>\d+)")


def learner(name: str, seconds: float) -> None:
    """Train as one of the learners; print its steps, seconds and kinds of threads. Learner 0 switches the trace on and off."""
    import torch
    import torch.distributed as dist

    from roundelay.bench import cases
    from roundelay.cluster import environment as launch

    torch.set_num_threads(1)
    world = launch.init()
    train, names = cases._run, {}

    def traced(*arguments: object) -> int:
        if world.rank == 0:
            _trace(on=True)
        steps = train(*arguments)  # type: ignore[arg-type]
        if world.rank == 0:
            _trace(on=False)
        names.update({thread.native_id: re.sub(r"[-_]?\d+$", "", thread.name) for thread in threading.enumerate()})
        names.update({int(thread): names.get(int(thread), "engine") for thread in os.listdir("/proc/self/task")})
        return steps

    cases._run = traced
    measured = cases.measure(case_of(name), world, seconds)
    print(json.dumps({"kinds": names | {os.getpid(): TRAINING}, **measured}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _trace(*, on: bool) -> None:
    for event in EVENTS:
        (TRACE / "events/sched" / event / "enable").write_text(str(int(on)))


class Scheduler:
    """Replays a trace: how long each kind of thread had a core, and whom training threads waited for."""

    def __init__(self, kinds: dict[int, str]) -> None:
        self._kinds = kinds | {0: IDLE}
        self._running: dict[int, int] = {}
        self._since: dict[int, float] = {}
        self._ready: dict[int, tuple[float, str]] = {}  # since when, and who had the core
        self.had_core_s: Counter[str] = Counter()
        self.waited_s: Counter[str] = Counter()

    def _kind(self, thread: int) -> str:
        return self._kinds.get(thread, ELSE)

    def woken(self, thread: int, cpu: int, time_s: float) -> None:
        """A thread can run from now on."""
        self._ready.setdefault(thread, (time_s, self._kind(self._running.get(cpu, 0))))

    def switched(self, cpu: int, time_s: float, old: int, new: int, *, preempted: bool) -> None:
        """A core has changed hands. Some switches from idleness are in no trace: then `old` had it since it was woken."""
        since_s = self._since.get(cpu, time_s)
        if self._running.get(cpu) != old:
            woken_s = max(since_s, self._ready.pop(old, (since_s, ""))[0])
            self.had_core_s[self._kind(self._running.get(cpu, 0))] += woken_s - since_s
            since_s = woken_s
        self.had_core_s[self._kind(old)] += time_s - since_s
        self._ready.pop(old, None)
        if preempted and old:
            self._ready[old] = time_s, self._kind(new)
        ready_s, whom = self._ready.pop(new, (time_s, ""))
        if self._kind(new) == TRAINING and whom:
            self.waited_s[whom] += time_s - ready_s
        self._running[cpu], self._since[cpu] = new, time_s


def measure(name: str, seconds: float) -> None:
    """Run the learners of one case and print what the trace says of them."""
    (TRACE / "buffer_size_kb").write_text(str(BUFFER_KB))
    (TRACE / "trace").write_text("")
    with local_learners(LEARNERS, [__file__, "--seconds", str(seconds), "--learner", name]) as processes:
        rows = [json.loads(process.stdout.readline()) for process in processes if process.stdout]
        for process in processes:
            process.wait()  # or Gloo would complain that its peers are gone
    scheduler = Scheduler({int(thread): kind for row in rows for thread, kind in row["kinds"].items()})
    for line in (TRACE / "trace").read_text().splitlines():
        if found := _SWITCH.search(line):
            cpu, old, new = int(found["cpu"]), int(found["old"]), int(found["new"])
            scheduler.switched(cpu, float(found["time"]), old, new, preempted=found["state"].startswith("R"))
        elif found := _WAKEUP.search(line):
            scheduler.woken(int(found["who"]), int(found["cpu"]), float(found["time"]))
    steps = sum(row["steps"] for row in rows)
    print(f"{name}: {1e3 * sum(row['seconds'] for row in rows) / steps:.2f} ms a step")
    for title, by_kind in (("had a core", scheduler.had_core_s), ("training waited for", scheduler.waited_s)):
        figures = [f"{kind} {1e3 * spent_s / steps:.2f}" for kind, spent_s in by_kind.most_common()]
        print(f"  {title:20}", "  ".join(figures))


def main() -> None:
    """Without --learner start the learners of every case in turn; with it, be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="strategy, topology and transport as in the table of the benchmark")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--learner", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.learner:
        learner(arguments.learner, arguments.seconds)
        return
    if not os.access(TRACE / "trace", os.W_OK):
        sys.exit(f"{TRACE} is not there or not for you to write to; run this as root, on Linux with tracefs mounted")
    for name in arguments.cases:
        measure(name, arguments.seconds)


if __name__ == "__main__":
    main()
