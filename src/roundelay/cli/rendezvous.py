"""`roundelay rendezvous`: the server at which learners of several machines find each other."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time

from roundelay.cli.arguments import add_security, connection_settings, port


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--port", type=port, default=29400, metavar="PORT", help="the port to listen on (default: 29400)"
    )
    add_security(parser, default_host="the loopback")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. A server that is started again rebuilds its state from the learners."""
    import logging

    from roundelay.cluster.environment import LOOPBACK, host_store
    from roundelay.cluster.rendezvous.messages import Message
    from roundelay.cluster.rendezvous.server import RendezvousServer, open_listener
    from roundelay.cluster.rendezvous.state import RendezvousState

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    settings = connection_settings(args, (args.host or LOOPBACK, args.port))
    info: Message = {}
    store: object = None
    listener = open_listener(settings.server_host, args.port)
    if settings.collectives_allowed:
        store, info["store"] = host_store(settings.server_host)
    server = RendezvousServer(listener, settings.security, RendezvousState(time.monotonic, info=info))
    print("rendezvous: {}:{}".format(*server.address), flush=True)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: ended.set())
    ended.wait()
    server.close()
    del store
    return 0
