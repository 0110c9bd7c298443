"""Pairwise averaging of live weights, in difference form, piece by piece."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import repeat

import torch
from torch import Tensor

from roundelay.errors import RefusedError
from roundelay.weights import Flat, Replica, all_finite
from roundelay.weights.flat import NON_FINITE

# w: each end moves a third of the way. In lockstep every learner of a ring calls its successor while its predecessor calls it:
# then w = 1/2 gives x_i <- (x_{i-1} + x_{i+1}) / 2, which never converges on an even ring (eigenvalue -1), and w = 1/3 gives the
# papers' own matrix (1/3, 1/3, 1/3). A lone pair loses 4w(1-w) of its squared distance: 0.89 instead of 1.
WEIGHT = 1 / 3


class FairLock:
    """A lock that is handed to its waiters in the order in which they came.

    An exchange takes the lock once for every piece of the weights. With `threading.Lock` it could take the lock again
    and again while the training thread waits.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()  # guards the two below
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()  # blocks until `release` hands the lock over
        except BaseException:  # a signal handler has raised, KeyboardInterrupt for example: do not keep the lock
            with self._guard:
                still_waiting = turn in self._waiting
                if still_waiting:
                    self._waiting.remove(turn)
            if not still_waiting:
                self.release()
            raise

    def release(self) -> None:
        """Hand the lock to the first waiter. Any thread may call this, not only the one that holds the lock."""
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *raised: object) -> None:
        self.release()


class PairAverage:
    r"""The live weights x of one learner, and its part in averaging them with a peer.

    The caller i sends what its weights are, $s_i$. The answering learner j computes the correction $c = w (s_i - x_j)$ once,
    sets $x_j \leftarrow x_j + c$ and replies with c; the caller sets $x_i \leftarrow x_i - c$. Both apply the same rounded
    numbers, so the sum over learners is conserved, even if steps come between two pieces.

    Args:
        replica: the weights; on an accelerator exchanges wait for its copies, and tell it of corrections.
        flat: x, the mirror of the replica.
        wire: float32 weights travel as this shorter dtype; None: as they are.

    Attributes:
        lock: guards x; taken for each piece, so a step waits for one piece at most.
        wire_layout: of what travels.
    """

    def __init__(self, replica: Replica, flat: Flat, wire: torch.dtype | None = None) -> None:
        self._replica, self.flat, self.lock = replica, flat, FairLock()
        self._x = flat.pieces
        self.wire_layout = flat.layout.narrowed(wire) if wire else flat.layout
        self._narrows = self.wire_layout is not flat.layout
        self._wide = torch.empty(max(map(len, self._x), default=0) if self._narrows else 0)  # one piece in float32

    def pack(self, buffer: Tensor) -> Tensor:
        """Fill `buffer` with x as it travels, and return the part of it that was filled.

        x is read without the lock: $s_i$ need not be of one instant. Numbers too large for the wire dtype make all of x
        travel as it is, from then on.
        """
        self._replica.wait_until_readable()
        if self._narrows:
            packed = buffer[: self.wire_layout.nbytes]
            pieces = zip(self.wire_layout.pieces_of(packed), self._x, strict=True)
            if all_finite(s.copy_(x) for s, x in pieces):
                return packed
            self.stop_narrowing()
        for s, x in zip(self.flat.layout.pieces_of(buffer), self._x, strict=True):
            s.copy_(x)
        return buffer

    def stop_narrowing(self) -> None:
        """Send x as it is from now on: some number or difference does not fit into the wire dtype."""
        self._narrows = False

    def answer(self, peer: int, request: Tensor, reply: Tensor) -> None:
        """c = w (s - x);  x <- x + c;  the reply is c.

        Raises RefusedError, with x unchanged, if a number is not finite or the weights are of another model.
        """
        self._add(1.0, self._pieces_of(reply, peer), peer, self._pieces_of(request, peer))

    def take(self, peer: int, reply: Tensor) -> None:
        """x <- x - c, for the reply c of a peer. Raises RefusedError, with x unchanged, as `answer` does."""
        self._add(-1.0, self._pieces_of(reply, peer), peer)

    def undo(self, peer: int, reply: Tensor) -> None:
        """x <- x - c, for our own reply c that never reached the peer."""
        self._subtract(1.0, self._pieces_of(reply, peer))

    def norm2(self, peer: int, reply: Tensor) -> float:
        """|s - x|^2 = |c|^2 / w^2."""
        corrections = zip(self._pieces_of(reply, peer), self._x, strict=True)
        return sum(float(torch.linalg.vector_norm(c, dtype=x.dtype)) ** 2 for c, x in corrections) / WEIGHT**2

    def _pieces_of(self, storage: Tensor, peer: int) -> list[Tensor]:
        """The pieces of weights as a peer has sent them. Raises RefusedError if they are not of this model."""
        layout = self.wire_layout if storage.nbytes == self.wire_layout.nbytes else self.flat.layout
        if storage.nbytes != layout.nbytes:
            raise RefusedError(peer, "another model")
        return layout.pieces_of(storage)

    def _add(
        self, sign: float, corrections: list[Tensor], peer: int, sent: Iterable[Tensor | None] = repeat(None)
    ) -> None:
        """x <- x + sign c, where c = w (s - x) first if s was sent. If a number is not finite, take all pieces back."""
        for k, (s, c) in enumerate(zip(sent, corrections, strict=False)):
            with self._readable():
                x = self._x[k]
                if s is not None:
                    torch.sub(s, x, out=c).mul_(WEIGHT) if s.dtype == x.dtype else c.copy_(
                        self._widened(s).sub_(x).mul_(WEIGHT)
                    )
                wide = c if c.dtype == x.dtype else self._widened(c)
                if finite := all_finite([wide]):
                    x.add_(wide, alpha=sign)
                    self._replica.correct(k, c, sign)
            if not finite:
                self._subtract(sign, corrections[:k])
                raise RefusedError(peer, NON_FINITE)
        self._replica.wait_until_corrected()

    def _subtract(self, sign: float, corrections: list[Tensor]) -> None:
        """x <- x - sign c, for as many pieces as there are corrections."""
        for k, c in enumerate(corrections):
            with self._readable():
                self._x[k].add_(c, alpha=-sign)
                self._replica.correct(k, c, -sign)
        self._replica.wait_until_corrected()

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        """Hold the lock while x has the result of the last step. Never waits for a copy while it holds the lock."""
        while True:
            version = self._replica.wait_until_readable()
            self.lock.acquire()
            if self._replica.version is version:
                break
            self.lock.release()  # a step has come in between
        try:
            yield
        finally:
            self.lock.release()

    def _widened(self, piece: Tensor) -> Tensor:
        return self._wide[: piece.numel()].copy_(piece)
