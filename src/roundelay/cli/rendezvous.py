"""`roundelay rendezvous`: where learners of several machines meet; it holds membership, budget and data cursor."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time

from roundelay.cli.arguments import add_security, place_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--port", type=int, default=29400, metavar="PORT", help="to listen on (default: 29400)")
    add_security(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes; started again, it is rebuilt from what the learners tell."""
    import logging

    from roundelay.cluster.environment import host_store
    from roundelay.cluster.rendezvous.messages import Message
    from roundelay.cluster.rendezvous.server import RendezvousServer, open_listener
    from roundelay.cluster.rendezvous.state import RendezvousState
    from roundelay.training.worker import LOOPBACK

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    place = place_of(args, (args.host or LOOPBACK, args.port))
    info: Message = {}
    store: object = None
    if place.collectives_allowed:
        store, info["store"] = host_store(place.host)
    listener = open_listener(place.host, args.port)
    server = RendezvousServer(listener, place.security, RendezvousState(time.monotonic, info=info))
    print("rendezvous: {}:{}".format(*server.address), flush=True)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: ended.set())
    ended.wait()
    server.close()
    del store
    return 0
