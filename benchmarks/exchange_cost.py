"""CPU time of one AD-PSGD exchange of 4 MB between two processes, both of them together: plain, with TLS, in shared memory.

python benchmarks/exchange_cost.py [--repetitions 7] [--exchanges 60]
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import socket
import statistics
import tempfile
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from roundelay.transport.base import Collectives
from roundelay.transport.security import Security
from roundelay.transport.tcp import TcpTransport
from roundelay.weights.replica import all_finite

WEIGHTS = 2**20
PIECE = 2**17  # as ADPSGD does it
WAYS = ("sockets", "TLS", "shared memory")


class NoCollectives(Collectives):
    """An exchange needs none."""

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        raise NotImplementedError

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Party:
    """One of the two learners."""

    def __init__(self, rank: int, listeners: list[socket.socket], way: str, folder: Path) -> None:
        torch.set_num_threads(1)
        security = Security(b"s" * 32)
        if way == "TLS":
            security = security.with_tls(folder)
        share = way == "shared memory"
        self.transport = TcpTransport(rank, 2, listeners[rank], security, NoCollectives(), share_memory=share)
        self.transport.connect({1 - rank: listeners[1 - rank].getsockname()[:2]})
        self._storage, self._reply = (self.transport.allocate(4 * WEIGHTS) for _ in range(2))
        self._live, self._difference = (each.view(torch.float32) for each in (self._storage, self._reply))
        self._live.normal_()

    def answer(self, peer: int, request: Tensor) -> None:
        request_weights = request.view(torch.float32)
        assert all_finite([request_weights])
        for difference, live in zip(request_weights.split(PIECE), self._live.split(PIECE), strict=True):
            difference.sub_(live)
            live.add_(difference, alpha=0.5)

    def exchange(self) -> None:
        self.transport.call(1, self._reply, source=self._storage).result()
        assert all_finite([self._difference])
        self._live.sub_(self._difference, alpha=0.5)


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def serve(listeners: list[socket.socket], way: str, folder: Path, line: Connection) -> None:
    party = Party(1, listeners, way, folder)
    party.transport.serve(party.answer)
    while line.recv():
        line.send(cpu_s())
    party.transport.close()


def measured(way: str, folder: Path, repetitions: int, exchanges: int) -> list[float]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("fork").Process(target=serve, args=(listeners, way, folder, theirs))
    other.start()
    party = Party(0, listeners, way, folder)

    def both_cpu_s() -> float:
        ours.send(True)
        return cpu_s() + float(ours.recv())

    for _ in range(exchanges // 4):
        party.exchange()
    spent = []
    for _ in range(repetitions):
        before = both_cpu_s()
        for _ in range(exchanges):
            party.exchange()
        spent.append((both_cpu_s() - before) / exchanges)
    ours.send(False)
    party.transport.close()
    other.join()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--exchanges", type=int, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Security(b"s" * 32).with_tls(Path(folder))
        for way in WAYS:
            spent = measured(way, Path(folder), args.repetitions, args.exchanges)
            print(f"{way:14} median {1e3 * statistics.median(spent):6.2f} ms, least {1e3 * min(spent):6.2f} ms")


if __name__ == "__main__":
    main()
