"""Two ends of a connection, in one process."""

import contextlib
import socket

PATIENCE_S = 5.0


@contextlib.contextmanager
def socket_pair():
    a, b = socket.socketpair()
    with a, b:
        a.settimeout(PATIENCE_S)
        b.settimeout(PATIENCE_S)
        yield a, b
