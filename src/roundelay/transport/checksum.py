"""A checksum that costs little beside the copying of what it is of."""

from __future__ import annotations

import hashlib
import threading

import numpy as np
from torch import Tensor

CHECKSUM_BYTES = 8
PIECE_BYTES = 2**20  # of a payload that is still in the cache when it is summed
_ROW_BYTES = 2**14


class Checksum:
    """Of flat uint8 tensors: a hash of the sums of their rows, of 2048 words of 64 bits each, modulo 2^64.

    It finds every error within one word, every block that is missing, repeated or in another's place, and of accidents that
    strike several words all but those whose differences cancel within a row. It is no proof against forgery: who can write to
    the connection can choose differences that cancel. That is what TLS is for.

    >>> import torch
    >>> checksum(torch.zeros(50_000, dtype=torch.uint8)) == checksum(torch.zeros(50_001, dtype=torch.uint8))
    False
    """

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)

    def add(self, piece: Tensor) -> None:
        """The next piece; all but the last one have whole rows."""
        data = piece.numpy()
        whole = data.nbytes - data.nbytes % _ROW_BYTES
        rows = data[:whole].view("<u8").reshape(-1, _ROW_BYTES // 8)
        self._digest.update(np.add.reduce(rows, axis=1))
        self._digest.update(data[whole:].tobytes())

    def digest(self) -> bytes:
        """Of everything so far."""
        return self._digest.digest()


def checksum(payload: Tensor) -> bytes:
    """Of a payload."""
    sums = Checksum()
    for piece in payload.split(PIECE_BYTES):
        sums.add(piece)
    return sums.digest()


class SharedChecksum:
    """Of a payload that several threads send: the first one computes it."""

    def __init__(self, payload: Tensor) -> None:
        self._payload, self._lock = payload, threading.Lock()
        self._digest = b""

    def digest(self) -> bytes:
        """Of the payload as it is when this is asked first."""
        with self._lock:
            self._digest = self._digest or checksum(self._payload)
        return self._digest
