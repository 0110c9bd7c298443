"""Seconds of one exchange between two processes, beside the time in which the same bytes can be moved at all."""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from roundelay.bench.namespaces import Machine, machines, shape
from roundelay.errors import RoundelayError

LOOPBACK = "127.0.0.1"
LEAVING_S = 20.0
WARM_UP = 2  # repetitions that are not counted
STARTING_S = 5.0  # two processes, their models and their connections
MEMORY_BPS = 1e9  # at which weights are exchanged on one machine, about


@dataclass(frozen=True)
class Plan:
    """What a worker process measures.

    Attributes:
        rank: 0 calls, 1 answers.
        address: where this process listens.
        secret: of the connections, in hexadecimal.
        parameters: float32 weights of the model.
        shared: exchange through shared memory, not over TCP.
        repetitions: how often to measure.
    """

    rank: int
    address: str
    secret: str
    parameters: int
    shared: bool
    repetitions: int


@dataclass(frozen=True)
class Row:
    """One way to exchange. `ratio` is the median of exchange over floor, measured one after the other."""

    medium: str
    parameters: int
    exchange_s: float
    floor_s: float
    ratio: float
    MBps_each_way: float


def measure(
    parameters: int, repetitions: int, rate: str | None = None, progress: Callable[[str], None] = lambda medium: None
) -> list[Row]:
    """Measure TCP and shared memory on this machine; or, with a rate such as "200mbit", TCP over a link of that rate.

    Raises RoundelayError if a worker fails.
    """
    rows = []
    for medium in ("tcp", "shared memory") if rate is None else (f"tcp, {rate}",):
        progress(medium)
        if rate is None:
            pairs = _run(parameters, repetitions, shared=medium == "shared memory")
        else:
            with machines(2) as ends:
                for machine in ends:
                    shape(machine, rate)
                pairs = _run(parameters, repetitions, shared=False, ends=ends)
        exchange_s, floor_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(exchange / floor for exchange, floor in pairs)
        rows.append(Row(medium, parameters, exchange_s, floor_s, ratio, 4e-6 * parameters / exchange_s))
    return rows


def expected_s(parameters: int, repetitions: int, rate: str | None) -> float:
    """About how long `measure` takes on an idle machine: an exchange, and its floor, move one model each way."""
    media, Bps = (2, MEMORY_BPS) if rate is None else (1, min(MEMORY_BPS, _bits_per_s(rate) / 8))
    return media * (STARTING_S + 2 * (WARM_UP + repetitions) * 4 * parameters / Bps)


def _bits_per_s(rate: str) -> float:
    """Of a rate of tc, such as "200mbit"."""
    number = rate.removesuffix("bit")
    unit = {"k": 1e3, "m": 1e6, "g": 1e9}.get(number[-1], 1.0)
    return float(number.rstrip("kmg")) * unit


def _run(parameters: int, repetitions: int, *, shared: bool, ends: Sequence[Machine] = ()) -> list[tuple[float, float]]:
    """Exchange and floor, in seconds, of each repetition; on this machine, or between two."""
    secret = secrets.token_hex(32)
    addresses = [machine.address for machine in ends] or [LOOPBACK, LOOPBACK]
    plans = [Plan(rank, addresses[rank], secret, parameters, shared, repetitions) for rank in range(2)]
    with _workers(ends, plans) as (caller, answerer):
        said = [_line(worker) for worker in (caller, answerer)]
        for worker, others in ((caller, said[1]), (answerer, said[0])):
            assert worker.stdin is not None
            worker.stdin.write(others)
            worker.stdin.flush()
        measured: list[tuple[float, float]] = [tuple(pair) for pair in json.loads(_line(caller))]
        return measured


def _line(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    if line := worker.stdout.readline():
        return line
    raise RoundelayError("a process of the benchmark ended early; its own message is above")


@contextmanager
def _workers(ends: Sequence[Machine], plans: Sequence[Plan]) -> Iterator[list[subprocess.Popen[str]]]:
    """One process for each plan. They end when their stdin is closed; those that do not are killed."""
    workers = []
    try:
        for plan in plans:
            command = [sys.executable, "-m", "roundelay.bench.exchange_worker", json.dumps(asdict(plan))]
            command = ends[plan.rank].command(command) if ends else command
            workers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        yield workers
    finally:
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in workers:
            with worker:  # closes its pipes, and waits
                try:
                    worker.wait(LEAVING_S)
                except subprocess.TimeoutExpired:
                    worker.kill()
