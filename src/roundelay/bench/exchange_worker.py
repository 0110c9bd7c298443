"""One of the two processes of the exchange benchmark. Its argument is a `Plan` as JSON.

It prints the ports that it listens on, and reads the address and ports of the other process from stdin. The calling process
prints its measurements: a list of [exchange, floor] in seconds.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor, nn

from roundelay import threads
from roundelay.bench.exchange import WARM_UP, Plan
from roundelay.strategies.pair_average import PairAverage
from roundelay.threads import yield_to_computation
from roundelay.transport.base import Call, Collectives
from roundelay.transport.security import Security
from roundelay.transport.tcp import TcpTransport
from roundelay.weights import Replica

AGAIN, DONE = b"a", b"d"


class NoCollectives(Collectives):
    """Collectives that raise when they are called, because an exchange needs none."""

    def all_reduce(self, values: Tensor, members: tuple[int, ...]) -> Future[None]:
        raise AssertionError("the benchmark sums nothing")

    def broadcast(self, values: Tensor, source: int, members: tuple[int, ...]) -> Future[None]:
        raise AssertionError("the benchmark sends nothing to all")

    def close(self) -> None:
        """Nothing to release."""


def main() -> None:
    """Measure what the command line says."""
    plan = Plan(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    yield_to_computation()  # as the threads of exchanges do, so that the floor is measured with the same priority
    listeners = [socket.create_server((plan.address, 0)) for _ in range(2)]
    sys.stdout.write(json.dumps([plan.address, *(listener.getsockname()[1] for listener in listeners)]) + "\n")
    sys.stdout.flush()
    host, port, plain_port = json.loads(sys.stdin.readline())
    security = Security(bytes.fromhex(plan.secret))
    transport = TcpTransport(plan.rank, 2, listeners[0], security, NoCollectives(), share_memory=plan.shared)
    transport.connect({1 - plan.rank: (host, port)})
    plain = listeners[1].accept()[0] if plan.rank else socket.create_connection((host, plain_port))
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    floor = _memcpy(plan) if plan.shared else _both_ways(plan, plain)
    exchange = _exchange(plan, transport)
    if plan.rank == 0:
        pairs = [(_timed(exchange), _timed(floor, plain)) for _ in range(WARM_UP + plan.repetitions)]
        sys.stdout.write(json.dumps(pairs[WARM_UP:]) + "\n")
        sys.stdout.flush()
    else:
        while plain.recv(1):
            floor()
            plain.sendall(DONE)
    transport.close()


def _exchange(plan: Plan, transport: TcpTransport) -> Callable[[], object]:
    """One exchange, which rank 0 asks for; ready to answer when this returns."""
    replica = Replica(nn.ParameterList([nn.Parameter(torch.randn(plan.parameters))]))
    mirror = replica.mirror(transport.allocate)
    live, buffer = PairAverage(replica, mirror), transport.allocate(mirror.storage.nbytes)
    transport.serve(live.answer)
    call = Call(mirror.storage, buffer, live.call)
    return lambda: transport.call(1 - plan.rank, call).result()


def _both_ways(plan: Plan, plain: socket.socket) -> Callable[[], object]:
    """The same bytes each way by a plain socket, at the same time."""
    outgoing, incoming = (memoryview(bytearray(4 * plan.parameters)) for _ in range(2))

    def floor() -> None:
        sender = threads.start("floor", lambda: plain.sendall(outgoing))
        view = incoming
        while view:
            view = view[plain.recv_into(view) :]
        sender.join()

    return floor


def _memcpy(plan: Plan) -> Callable[[], object]:
    """The same bytes each way in memory: each process copies one model, at the same time."""
    source, target = torch.ones(plan.parameters), torch.zeros(plan.parameters)
    return lambda: target.copy_(source)


def _timed(work: Callable[[], object], plain: socket.socket | None = None) -> float:
    """Seconds of `work`; with a socket, the other process does the same, and both must have ended."""
    begin = time.perf_counter()
    if plain:
        plain.sendall(AGAIN)
    work()
    if plain:
        assert plain.recv(1) == DONE
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
