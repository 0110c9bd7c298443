"""Where the CPU time of a step goes: milliseconds per step and learner, by kind of thread, and how long the GIL is held.

    python benchmarks/thread_times.py --seconds 4 --repetitions 3
    python benchmarks/thread_times.py --seconds 8 --py-spy      # needs py-spy, and the right to trace processes

Four learners with 20 ms of emulated compute a step, as in `roundelay bench throughput`; cases are interleaved, medians are shown.
CPU time is less sensitive than throughput to whatever else the machine is doing.

"bytes only" is what no exchange over sockets can be cheaper than: threads of the same priority send a model's bytes and get as
many back, and do nothing with them: no arithmetic, no checks, and no lock but that of the one buffer for requests.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict

BYTES_ONLY = "bytes only"
CASES = {
    "none": None,
    "adpsgd, shared memory": "shared-memory",
    "adpsgd, sockets": "sockets",
    "bytes only, sockets": BYTES_ONLY,
}
KINDS = {"MainThread": "training", "roundelay-call": "calling", "roundelay-lane": "serving"}  # by how the name begins
LEARNERS, WARM_UP_STEPS, SAMPLES_PER_S = 4, 10, 250


def cpu_by_kind() -> dict[str, float]:
    """CPU seconds so far of every kind of thread in this process."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for thread in threading.enumerate():
        kind = next((kind for name, kind in KINDS.items() if thread.name.startswith(name)), "other")
        seconds[kind] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
    seconds["all"] = time.process_time()
    return seconds


class BytesOnly:
    """Sends `nbytes` to the other learners in turn, one exchange at a time and `exchanges` a step, and gets as many back."""

    def __init__(self, nbytes: int, exchanges: float) -> None:
        import torch.distributed as dist

        self._exchanges = exchanges
        self._mine, self._theirs = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
        self._serving = threading.Lock()  # one at a time, as in a TcpTransport: so there is one buffer
        listener = socket.create_server(("127.0.0.1", 0), backlog=LEARNERS)
        ports: list[int] = [0] * LEARNERS
        dist.all_gather_object(ports, listener.getsockname()[1])
        rank, self._peers = dist.get_rank(), []
        for turn in range(1, LEARNERS):
            self._peers.append(socket.create_connection(("127.0.0.1", ports[(rank + turn) % LEARNERS])))
        accepted = [listener.accept()[0] for _ in self._peers]
        for connection in accepted:
            threading.Thread(target=self._serve, args=(connection,), name="roundelay-lane", daemon=True).start()
        self._wanted = threading.Semaphore(0)
        self._busy = False
        self.started = self.steps = 0
        threading.Thread(target=self._call, name="roundelay-call", daemon=True).start()

    def after_step(self) -> None:
        """Begin an exchange, unless one is under way or there were enough."""
        self.steps += 1
        if not self._busy and self.started < self._exchanges * self.steps:
            self._busy = True
            self.started += 1
            self._wanted.release()

    def _call(self) -> None:
        self._prepare(*self._peers)
        while True:
            self._wanted.acquire()
            peer = self._peers[self.started % len(self._peers)]
            peer.sendall(self._mine)
            self._receive(peer, self._mine)
            self._busy = False

    def _serve(self, connection: socket.socket) -> None:
        self._prepare(connection)
        while connection.recv(1, socket.MSG_PEEK):
            with self._serving:
                self._receive(connection, self._theirs)
                connection.sendall(self._theirs)

    @staticmethod
    def _prepare(*connections: socket.socket) -> None:
        from roundelay.transport import handshake
        from roundelay.transport.turns import give_way

        for connection in connections:
            handshake.tune(connection)
        give_way(patient=True)

    @staticmethod
    def _receive(connection: socket.socket, view: memoryview) -> None:
        while view and (count := connection.recv_into(view, len(view), socket.MSG_WAITALL)):
            view = view[count:]


def learner(transport: str | None, arguments: argparse.Namespace) -> dict[str, float]:
    """Train for some seconds as one of the learners; milliseconds per step by kind of thread, and what else was counted."""
    import torch
    import torch.distributed as dist

    from roundelay import ADPSGD, Learner, init, random_ring
    from roundelay.bench.models import build

    torch.set_num_threads(1)
    world = init()
    module, batch = build("emulated", arguments.parameters, arguments.step_s, 1.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    mine = bytes_only = None
    if transport == BYTES_ONLY:
        bytes_only = BytesOnly(4 * arguments.parameters, arguments.exchanges)
    elif transport:
        strategy = ADPSGD(random_ring(world.size))
        mine = Learner(module, optimizer, strategy, world.transport(share_memory=transport == "shared-memory"))

    def step() -> None:
        module(batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if bytes_only:
            bytes_only.after_step()

    for _ in range(WARM_UP_STEPS):
        step()
    dist.barrier()
    sampler = _sampler(arguments) if arguments.py_spy and world.rank == 0 else None
    before, began, steps = cpu_by_kind(), time.perf_counter(), 0
    begun = bytes_only.started if bytes_only else 0
    while time.perf_counter() - began < arguments.seconds:
        step()
        steps += 1
    elapsed, after = time.perf_counter() - began, cpu_by_kind()
    dist.barrier()
    figures = {kind: 1e3 * (after[kind] - before.get(kind, 0.0)) / steps for kind in after}
    figures["wall"] = 1e3 * elapsed / steps
    if mine:
        figures["exchanges"] = mine.metrics()["exchanges_per_step"]
        mine.close()
    if bytes_only:
        figures["exchanges"] = (bytes_only.started - begun) / steps
    if sampler:
        figures["GIL %"] = _share(sampler)
    dist.destroy_process_group()
    return figures


def _sampler(arguments: argparse.Namespace) -> subprocess.Popen[str]:
    """py-spy on this process, counting the moments in which some thread holds the GIL."""
    seconds = max(1, int(arguments.seconds) - 1)
    command = ["py-spy", "record", "--gil", "--nonblocking", "--format", "raw", "--output", "/dev/stdout"]
    command += ["--rate", str(SAMPLES_PER_S), "--duration", str(seconds), "--pid", str(os.getpid())]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _share(sampler: subprocess.Popen[str]) -> float:
    held = sum(int(line.rsplit(" ", 1)[1]) for line in sampler.communicate()[0].splitlines() if ";" in line)
    duration = int(sampler.args[sampler.args.index("--duration") + 1])  # type: ignore[union-attr,index,arg-type]
    return 100 * held / (SAMPLES_PER_S * duration)


def measure(case: str) -> dict[str, float]:
    """Run the learners of one case; the mean of each figure over those that have it."""
    from roundelay.bench.local import local_learners

    with local_learners(LEARNERS, [__file__, *sys.argv[1:], "--case", case]) as processes:
        lines = [process.stdout.readline() for process in processes if process.stdout]
    rows: list[dict[str, float]] = [json.loads(line) for line in lines]
    return {name: statistics.mean(row[name] for row in rows if name in row) for row in rows for name in row}


def main() -> None:
    """Without --case start the learners of every case in turn; with it, be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=lambda text: int(float(text)), default=1_000_000)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--exchanges", type=float, default=1.0, help="a step, where only bytes are sent")
    parser.add_argument("--py-spy", action="store_true", help="also how long the GIL is held in learner 0")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(learner(CASES[arguments.case], arguments)), flush=True)
        return
    measured: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in range(arguments.repetitions):
        for case, rows in measured.items():
            rows.append(measure(case))
    for case, rows in measured.items():
        names = list(dict.fromkeys(name for row in rows for name in row))
        medians = {name: statistics.median(row[name] for row in rows if name in row) for name in names}
        print(f"{case:24}", *(f"{name} {value:.2f}" for name, value in sorted(medians.items())), sep="  ")


if __name__ == "__main__":
    main()
