r"""The Base-(k+1) graph (Takezawa et al., NeurIPS 2023): exact averaging in finitely many rounds, any n, degree <= k.

Two building blocks, both periodic:

* hyper-hypercube: n = f_1 f_2 ... f_L with every f_l <= k+1. In round l the learners that differ only in digit l of
  their mixed-radix number average completely. Exact after L rounds.
* simple base graph, for other n: write n in base k+1, n = sum_l a_l (k+1)^{p_l} with p_1 > p_2 > ..., and give each
  term its part V_l, itself a_l cubes of s_l = (k+1)^{p_l} learners.
  1. Every part averages inside (hyper-hypercube), at the same time.
  2. For l = 1, 2, ... in turn the r learners behind V_l each meet one learner of every cube of V_l with weight
     w = s_l / (a_l s_l + r). That puts the mean of each of the cubes, and of the rest, at their common mean.
  3. After its turn each cube averages inside; the rest has gone on with the next part meanwhile.

n = p q with p the largest divisor of factors <= k+1 also splits into q-learner simple graphs followed by a
hyper-hypercube over p; the shorter of the two ways is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from roundelay.errors import TopologyError
from roundelay.topology.mixing import Entries, FormulaMixing, Mixing, Ranks, joined


def base_graph(size: int, k: int = 1) -> Mixing:
    """Base-(k+1) graph: every learner has the exact mean after one period, and at most k neighbours a round.

    Raises TopologyError if k < 1.

    >>> base_graph(12, k=1).period, base_graph(12, k=2).period
    (5, 3)
    """
    if k < 1:
        raise TopologyError(f"base_graph needs a degree k of at least 1, got {k}")
    if size < 3:
        return FormulaMixing("base-graph", size, 1, lambda ranks, phase: _cube(ranks, [size], 0))
    smooth, rest = _smooth_part(size, k + 1)
    whole = _SimpleBase(size, k + 1)
    factors, inner = _factors(smooth, k + 1), _SimpleBase(rest, k + 1)
    if len(inner) + len(factors) > len(whole):
        return FormulaMixing("base-graph", size, len(whole), whole.entries)

    def entries(ranks: Ranks, phase: int) -> Entries:
        block, place = np.divmod(ranks, rest)
        if phase < len(inner):
            index, peers, weights = inner.entries(place, phase)
            return index, block[index] * rest + peers, weights
        index, peers, weights = _cube(block, factors, phase - len(inner))
        return index, peers * rest + place[index], weights

    return FormulaMixing("base-graph", size, len(inner) + len(factors), entries)


@dataclass(frozen=True)
class _Part:
    """V_l: `cubes` cubes of `side` = base^power learners, numbered from `start`; `behind` learners stand behind it."""

    start: int
    cubes: int
    power: int
    side: int
    behind: int

    @property
    def end(self) -> int:
        return self.start + self.cubes * self.side


class _SimpleBase:
    """The simple Base-(k+1) graph over `size` learners; see the module's description."""

    def __init__(self, size: int, base: int) -> None:
        self.base = base
        self.parts: list[_Part] = []
        start, power = 0, max(int(math.log(size, base)) + 1, 0)
        while start < size:
            side = base**power
            if (cubes := (size - start) // side) > 0:
                self.parts.append(_Part(start, cubes, power, side, size - start - cubes * side))
                start = self.parts[-1].end
            power -= 1
        self._inside = max(len(self._factors(part)) for part in self.parts)

    def __len__(self) -> int:
        if len(self.parts) == 1:
            return self._inside
        return self._inside + 1 + self.parts[0].power

    def _factors(self, part: _Part) -> list[int]:
        return [self.base] * part.power + ([part.cubes] if part.cubes > 1 else [])

    def entries(self, ranks: Ranks, phase: int) -> Entries:
        found = []
        for turn, part in enumerate(self.parts):
            own = np.flatnonzero((ranks >= part.start) & (ranks < part.end))
            index, peers, weights = self._entries_of(turn, part, ranks[own], phase)
            found.append((own[index], peers, weights))
        return joined(*found)

    def _entries_of(self, turn: int, part: _Part, ranks: Ranks, phase: int) -> Entries:
        place = ranks - part.start
        if phase < self._inside:  # 1. the part averages inside
            index, peers, weights = _cube(place, self._factors(part), phase)
            return index, part.start + peers, weights
        step = phase - self._inside
        if step < turn:  # 2. it stands behind V_step, whose cubes it meets
            met = self.parts[step]
            weight = _meeting_weight(met)
            partners = [met.start + cube * met.side + ranks - met.end for cube in range(met.cubes)]
            return joined(_each(ranks, 1 - weight * met.cubes), *(_each(peers, weight) for peers in partners))
        corner = place % part.side
        if step == turn:  # 2. its own turn: the first `behind` learners of every cube are met
            weight = _meeting_weight(part)
            met_ones = np.flatnonzero(corner < part.behind)
            _, peers, weights = _each(part.end + corner[met_ones], weight)
            own = np.where(corner < part.behind, 1 - weight, 1.0)
            return joined((np.arange(len(ranks)), ranks, own), (met_ones, peers, weights))
        index, peers, weights = _cube(corner, [self.base] * part.power, step - turn - 1)  # 3. its cubes average inside
        return index, (ranks - corner)[index] + peers, weights


def _meeting_weight(part: _Part) -> float:
    return part.side / (part.cubes * part.side + part.behind)


def _cube(ranks: Ranks, factors: list[int], phase: int) -> Entries:
    """Hyper-hypercube: average with those that differ only in digit `phase` of the mixed-radix number; then rest."""
    if phase >= len(factors):
        return _each(ranks, 1.0)
    stride, factor = math.prod(factors[:phase]), factors[phase]
    first = ranks - (ranks // stride % factor) * stride
    return joined(*(_each(first + digit * stride, 1 / factor) for digit in range(factor)))


def _each(peers: Ranks, weight: float) -> Entries:
    """One peer each, all with the same weight."""
    return np.arange(len(peers)), peers, np.full(len(peers), weight)


def _smooth_part(size: int, base: int) -> tuple[int, int]:
    """(p, q): size = p q, where p has only prime factors up to `base` and q none of them."""
    rest = size
    for prime in range(2, base + 1):
        while rest % prime == 0:
            rest //= prime
    return size // rest, rest


def _factors(size: int, largest: int) -> list[int]:
    """The shortest factorisation of `size` into factors of at most `largest`."""

    @cache
    def shortest(n: int) -> tuple[int, ...]:
        if n == 1:
            return ()
        return min(
            ((f, *shortest(n // f)) for f in range(2, min(n, largest) + 1) if n % f == 0),
            key=len,
        )

    return list(shortest(size))
