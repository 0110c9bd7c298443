"""The named topologies. Each function returns a Mixing with Metropolis weights 1 / (1 + max(d_i, d_j))."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from roundelay.errors import TopologyError
from roundelay.topology.cayley import CayleyMixing
from roundelay.topology.mixing import Entries, FormulaMixing, Mixing, Ranks, RelabelledMixing, joined, pairs


def ring(size: int) -> Mixing:
    r"""Fixed ring: weights 1/3 for the learner, its successor and its predecessor (1/2 and 1/2 for two learners).

    $\lambda_k = (1 + 2\cos(2\pi k/n))/3$; the gap falls as $1/n^2$.

    >>> ring(5).row(0)
    {0: 0.333..., 1: 0.333..., 4: 0.333...}
    """
    return CayleyMixing("ring", (size,), [[(1,), (-1,)]])


def random_ring(size: int, seed: int = 0) -> Mixing:
    r"""Ring over a fresh random permutation each round (arXiv:2002.01119): $\rho = (n-3) / (3(n-1)) < 1/3$ for every n.

    >>> random_ring(1_000_000, seed=3).neighbours(7, round=12)
    (..., ...)
    """
    return RelabelledMixing("random-ring", ring(size), seed)


def complete(size: int) -> Mixing:
    """Every learner averages with every other one: W = J/n, exact after one round."""
    return CayleyMixing("complete", (size,), [[(offset,) for offset in range(1, size)]])


def star(size: int) -> Mixing:
    """Learner 0 is the hub and averages with every other learner; all edges have the weight 1/n."""
    return FormulaMixing("star", size, 1, partial(_star, size))


def torus(size: int) -> Mixing:
    """Grid with wrapped edges in the squarest shape that `size` allows; a ring if `size` is prime.

    >>> torus(12).neighbours(0)
    (1, 3, 4, 8)
    """
    rows = next((d for d in range(math.isqrt(max(size, 1)), 0, -1) if size % d == 0), 1)
    return CayleyMixing("torus", (rows, size // rows), [[(0, 1), (0, -1), (1, 0), (-1, 0)]])


def hypercube(size: int) -> Mixing:
    """Learners average if their ranks differ in exactly one bit.

    Raises TopologyError unless `size` is a power of two.
    """
    bits = _bits("hypercube", size)
    return CayleyMixing("hypercube", (2,) * bits or (1,), [_unit_offsets(bits)])


def exponential(size: int) -> Mixing:
    """Neighbours at the distances 1, 2, 4, ... in both directions (the exponential graph, made symmetric)."""
    jumps = [1 << bit for bit in range(max(size - 1, 0).bit_length())]
    return CayleyMixing("exponential", (size,), [[(sign * jump,) for jump in jumps for sign in (1, -1)]])


def one_peer_exponential(size: int) -> Mixing:
    """Round k pairs i with i XOR 2^k: one peer per round, exact after log2(n) rounds.

    Raises TopologyError unless `size` is a power of two.

    >>> [one_peer_exponential(8).neighbours(0, k) for k in range(4)]
    [(1,), (2,), (4,), (1,)]
    """
    bits = _bits("one-peer-exponential", size)
    phases = [[offset] for offset in reversed(_unit_offsets(bits))] or [[]]
    return CayleyMixing("one-peer-exponential", (2,) * bits or (1,), phases)


def odd_even_ring(size: int) -> Mixing:
    """Ring whose edges take turns: round k pairs (k, k+1), (k+2, k+3), ... modulo n. If n is odd, one learner rests.

    >>> odd_even_ring(4).neighbours(0, 0), odd_even_ring(4).neighbours(0, 1)
    ((1,), (3,))
    """
    formula = partial(_odd_even_ring, size)
    if size % 2:
        return FormulaMixing("odd-even-ring", size, size, formula, drift=1)
    return FormulaMixing("odd-even-ring", size, min(2, size), formula, shift=2 if size > 2 else None)


def random_matching(size: int, seed: int = 0) -> Mixing:
    r"""Random pairs each round: $\rho = (n-2) / (2(n-1))$ for even n, 1/2 for odd n, when one learner rests.

    >>> len(random_matching(8, seed=1).neighbours(0))
    1
    """
    fixed = FormulaMixing("matching", size, 1, partial(_matching, size), shift=2 if size % 2 == 0 else None)
    return RelabelledMixing("random-matching", fixed, seed)


# Formulas are functions of the module, so that mixings can be pickled.


def _star(size: int, ranks: Ranks, phase: int) -> Entries:
    hub, leaves = np.flatnonzero(ranks == 0), np.flatnonzero(ranks)
    return joined(
        (hub.repeat(size), np.tile(np.arange(size), len(hub)), np.full(len(hub) * size, 1 / size)),
        (leaves, np.zeros_like(leaves), np.full(len(leaves), 1 / size)),
        (leaves, ranks[leaves], np.full(len(leaves), 1 - 1 / size)),
    )


def _odd_even_ring(size: int, ranks: Ranks, phase: int) -> Entries:
    position = (ranks - phase) % size
    return pairs(ranks, (ranks + np.where(position % 2, -1, 1)) % size, position == 2 * (size // 2))


def _matching(size: int, ranks: Ranks, phase: int) -> Entries:
    return pairs(ranks, ranks ^ 1, ranks ^ 1 >= size)


def _bits(name: str, size: int) -> int:
    if size < 1:
        raise TopologyError(f"{name} needs at least 1 learner, got {size}")
    if size & (size - 1):
        raise TopologyError(f"{name} needs a power of two learners, got {size}; base-graph works for any number")
    return size.bit_length() - 1


def _unit_offsets(bits: int) -> list[tuple[int, ...]]:
    """The unit vectors e_1 .. e_d. The first one flips the highest bit, because learners are numbered in row-major order."""
    return [tuple(int(i == j) for j in range(bits)) for i in range(bits)]
