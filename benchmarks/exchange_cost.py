"""CPU time of one exchange of 1 M weights between two processes, summed over both, by the way the weights travel.

python benchmarks/exchange_cost.py --repetitions 7 --exchanges 60
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import socket
import statistics
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import torch

from roundelay.strategies.pair_average import PairAverage
from roundelay.transport.base import Collectives, Request
from roundelay.transport.security import Security
from roundelay.transport.tcp import TcpTransport
from roundelay.weights import Flat

WEIGHTS = 2**20
WAYS = ("shared memory", "sockets", "sockets, bfloat16", "sockets, TLS")


class End:
    """One of the two processes of an exchange."""

    def __init__(self, rank: int, listeners: list[socket.socket], way: str, folder: Path) -> None:
        torch.set_num_threads(1)
        security = Security(b"s" * 32)
        self.transport = TcpTransport(
            rank,
            2,
            listeners[rank],
            security.with_tls(folder) if way.endswith("TLS") else security,
            mock.Mock(spec=Collectives),
            share_memory=way == "shared memory",
        )
        self.transport.connect({1 - rank: listeners[1 - rank].getsockname()[:2]})
        live = Flat([torch.randn(WEIGHTS)], self.transport.allocate)
        self.weights = PairAverage(live, torch.bfloat16 if way.endswith("bfloat16") else None)
        self.transport.layout = self.weights.wire_layout.code
        self._request = Request(live.storage, self.weights.pack)
        self._difference = Flat([torch.zeros(WEIGHTS)], self.transport.allocate)

    def exchange(self) -> None:
        reply = self.transport.call(1, self._difference.storage, self._request).result()
        self.weights.take(1, reply)


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def serve(listeners: list[socket.socket], way: str, folder: Path, pipe: Connection) -> None:
    """Answer exchanges; for each True on the pipe send the CPU time so far, end at False."""
    end = End(1, listeners, way, folder)
    end.transport.serve(end.weights.answer, end.weights.undo)
    while pipe.recv():
        pipe.send(cpu_s())
    end.transport.close()


def measured(way: str, folder: Path, repetitions: int, exchanges: int) -> list[float]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("fork").Process(target=serve, args=(listeners, way, folder, theirs))
    server.start()
    caller = End(0, listeners, way, folder)

    def both_cpu_s() -> float:
        ours.send(True)
        return cpu_s() + float(ours.recv())

    for _ in range(exchanges // 4):
        caller.exchange()
    spent = []
    for _ in range(repetitions):
        before = both_cpu_s()
        for _ in range(exchanges):
            caller.exchange()
        spent.append((both_cpu_s() - before) / exchanges)
    ours.send(False)
    caller.transport.close()
    server.join()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--exchanges", type=int, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Security(b"s" * 32).with_tls(Path(folder))
        for way in WAYS:
            spent = measured(way, Path(folder), args.repetitions, args.exchanges)
            print(f"{way:18} median {1e3 * statistics.median(spent):6.2f} ms, least {1e3 * min(spent):6.2f} ms")


if __name__ == "__main__":
    main()
