"""Keyed permutations: the relabelling of the learners in round k, computable for one learner at a time.

Every learner must know its own position in round k without communication and without a list of a million positions. Up
to `TABLE_LIMIT` learners the permutation is a table: the ranks sorted by a hash, which is uniform over all n! orders
(up to ties of 64-bit hashes). Above that limit a Feistel network over Z_a x Z_b with cycle walking gives each image and
each preimage in O(1). On small domains such a network would be biased, so small sizes use the table.

The hash is our own and not numpy.random, because learners with different NumPy versions must agree.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

TABLE_LIMIT = 4096
FEW = 16  # up to this many learners a Python loop is faster than NumPy
FEISTEL_ROUNDS = 8
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

Integers = TypeVar("Integers", int, npt.NDArray[np.uint64])


def mix64(x: Integers) -> Integers:
    """Scramble 64 bits (the finaliser of splitmix64, Steele et al. 2014); works on ints and on uint64 arrays alike."""
    word: Any = x & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return cast(Integers, word ^ (word >> 31))


def key(*parts: int) -> int:
    """One 64-bit key from several integers; it depends on each of them and on their order.

    >>> key(1, 2) == key(1, 2), key(1, 2) == key(2, 1)
    (True, False)
    """
    digest = 0
    for part in parts:
        digest = mix64((digest ^ mix64((part + _GOLDEN) & _MASK)) + _GOLDEN)
    return digest


class Permutation:
    """A bijection of 0..size-1 chosen by `seed`.

    >>> p = Permutation(5, seed=1)
    >>> sorted(p(i) for i in range(5))
    [0, 1, 2, 3, 4]
    >>> all(p.inverse(p(i)) == i for i in range(5))
    True
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._table: npt.NDArray[np.int64] | None = None
        if size <= TABLE_LIMIT:
            self._table = _sorted_by_hash(size, key(seed))
            return
        # The domain a*b is hardly larger than `size`, so an image outside 0..size-1 is rare.
        self._a = math.isqrt(max(size - 1, 0)) + 1
        self._b = -(-size // self._a)
        self._keys = [key(seed, j) for j in range(FEISTEL_ROUNDS)]

    def __call__(self, position: int) -> int:
        """The learner at one position."""
        if self._table is not None:
            return int(self._table[position])
        image = self._forward(position)
        while image >= self.size:
            image = self._forward(image)
        return image

    def inverse(self, value: int) -> int:
        """The position of the learner `value`."""
        if self._table is not None:
            return int(np.flatnonzero(self._table == value)[0])
        position = self._backward(value)
        while position >= self.size:
            position = self._backward(position)
        return position

    def all(self) -> npt.NDArray[np.int64]:
        """The learners at all positions, in order of position; O(size)."""
        if self._table is not None:
            return self._table
        images = self._forward(np.arange(self.size, dtype=np.uint64))
        while (outside := images >= self.size).any():
            images[outside] = self._forward(images[outside])
        return images.astype(np.int64)

    def _forward(self, x: Integers) -> Integers:
        left: Any = x // self._b
        right: Any = x % self._b
        for j in range(0, FEISTEL_ROUNDS, 2):
            left = (left + mix64(right ^ self._keys[j]) % self._a) % self._a
            right = (right + mix64(left ^ self._keys[j + 1]) % self._b) % self._b
        return cast(Integers, left * self._b + right)

    def _backward(self, x: int) -> int:
        left, right = x // self._b, x % self._b
        for j in reversed(range(0, FEISTEL_ROUNDS, 2)):
            right = (right - mix64(left ^ self._keys[j + 1]) % self._b) % self._b
            left = (left - mix64(right ^ self._keys[j]) % self._a) % self._a
        return left * self._b + right


def _sorted_by_hash(size: int, offset: int) -> npt.NDArray[np.int64]:
    if size <= FEW:
        return np.array(sorted(range(size), key=lambda rank: mix64(rank * _GOLDEN + offset)), dtype=np.int64)
    return np.argsort(mix64(np.arange(size, dtype=np.uint64) * _GOLDEN + np.uint64(offset)), kind="stable")


@lru_cache(maxsize=64)
def permutation(size: int, seed: int, round: int) -> Permutation:
    """The permutation of round `round`: a pure function of (size, seed, round)."""
    return Permutation(size, key(seed, round))
