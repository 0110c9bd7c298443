"""Pairwise averaging of live weights, in difference form, piece by piece."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from roundelay.errors import RefusedError
from roundelay.strategies.fair_lock import FairLock
from roundelay.strategies.pair_exchange import AnsweringEnd, CallingEnd
from roundelay.weights import Flat, Replica


class PairAverage:
    r"""The live weights x of one learner, and its part in averaging them with peers.

    The caller i sends what its weights are, $s_i$. The answering learner j computes the difference $d = s_i - x_j$ once,
    sets $x_j \leftarrow x_j + w d$ and replies with d; the caller sets $x_i \leftarrow x_i - w d$. Both use the same rounded
    d, so the sum over learners is conserved, even if steps come between two pieces.

    Args:
        replica: the weights; on an accelerator exchanges wait for its copies, and tell it of corrections.
        flat: x, the mirror of the replica.
        wire: float32 weights travel as this shorter dtype; None: as they are.

    Attributes:
        lock: guards x; taken for each piece, so a step waits for one piece at most.
        wire_layout: of what travels.
    """

    def __init__(self, replica: Replica, flat: Flat, wire: torch.dtype | None = None) -> None:
        self.replica, self.flat, self.lock = replica, flat, FairLock()
        self.wire_layout = flat.layout.narrowed(wire) if wire else flat.layout
        self._narrows = self.wire_layout is not flat.layout
        self._wide = torch.empty(max(map(len, flat.pieces), default=0) if self._narrows else 0)  # one piece in float32

    def stop_narrowing(self) -> None:
        """Send x as it is from now on: some number or difference does not fit into the wire dtype."""
        self._narrows = False

    def call(self, peer: int, request: Tensor, reply: Tensor) -> CallingEnd:
        """Our end of an exchange that we ask for. The peer reads x in place if `request` is x, else it is sent a copy."""
        packs = request is not self.flat.storage
        layout = self.wire_layout if packs and self._narrows else self.flat.layout
        return CallingEnd(self, peer, layout, reply[: layout.nbytes], packs=packs)

    def answer(self, peer: int, request: Tensor, reply: Tensor) -> AnsweringEnd:
        """Our end of an exchange that a peer asks for. Raises RefusedError if its weights are of another model."""
        layout = self.wire_layout if reply.nbytes == self.wire_layout.nbytes else self.flat.layout
        if reply.nbytes != layout.nbytes:
            raise RefusedError(peer, "another model")
        return AnsweringEnd(self, peer, layout, reply, request)

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Hold the lock while x has the result of the last step. Never waits for a copy while it holds the lock."""
        while True:
            version = self.replica.wait_until_readable()
            self.lock.acquire()
            if self.replica.version is version:
                break
            self.lock.release()  # a step has come in between
        try:
            yield
        finally:
            self.lock.release()

    def widened(self, piece: Tensor, x: Tensor) -> Tensor:
        """The piece in the dtype of x; only while the lock is held."""
        return piece if piece.dtype == x.dtype else self._wide[: piece.numel()].copy_(piece)
