r"""The Base-(k+1) graph (Takezawa et al., NeurIPS 2023): exact averaging in finitely many rounds, any n, degree <= k.

Two building blocks, both periodic:

* hyper-hypercube: n = f_1 f_2 ... f_L with every f_l <= k+1. In round l the learners that differ only in digit l of
  their mixed-radix number average completely. Exact after L rounds.
* simple base graph, for any other n: write n in base k+1, n = sum_l a_l (k+1)^{p_l} with p_1 > p_2 > .... Term l owns
  part V_l of the learners, which consists of a_l cubes of s_l = (k+1)^{p_l} learners. The parts are numbered in this
  order, and the learners of all later parts stand "behind" V_l.
  1. All parts average inside at the same time (hyper-hypercube).
  2. For l = 1, 2, ... in turn, each of the r learners behind V_l averages with one learner of every cube of V_l, with
     weight w = s_l / (a_l s_l + r). Then each cube and the learners behind all have the common mean as their mean.
  3. After its turn each cube of V_l averages inside, while the learners behind go on with the next part.

If n = p q, where p has only factors <= k+1 and q has none, there is a second way: simple base graphs over q learners,
followed by a hyper-hypercube over p. The shorter of the two ways is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from roundelay.errors import TopologyError
from roundelay.topology.mixing import Entries, FormulaMixing, Mixing, Ranks, joined


def base_graph(size: int, k: int = 1) -> Mixing:
    """Base-(k+1) graph: every learner has the exact mean after one period, with at most k neighbours per round.

    Raises TopologyError if k < 1.

    >>> base_graph(12, k=1).period, base_graph(12, k=2).period
    (5, 3)
    """
    if k < 1:
        raise TopologyError(f"base_graph needs a degree k of at least 1, got {k}")
    if size < 3:
        return FormulaMixing("base-graph", size, 1, partial(_at_once, size))
    smooth, rest = _smooth_part(size, k + 1)
    whole = _SimpleBase(size, k + 1)
    factors, inner = _factors(smooth, k + 1), _SimpleBase(rest, k + 1)
    if len(inner) + len(factors) > len(whole):
        return FormulaMixing("base-graph", size, len(whole), whole.entries)
    formula = partial(_blocks, inner, factors, rest)
    return FormulaMixing("base-graph", size, len(inner) + len(factors), formula)


def _at_once(size: int, ranks: Ranks, phase: int) -> Entries:
    return _cube(ranks, [size], 0)


def _blocks(inner: _SimpleBase, factors: list[int], rest: int, ranks: Ranks, phase: int) -> Entries:
    """First inside blocks of `rest` learners, then between them."""
    block, position = np.divmod(ranks, rest)
    if phase < len(inner):
        index, peers, weights = inner.entries(position, phase)
        return index, block[index] * rest + peers, weights
    index, peers, weights = _cube(block, factors, phase - len(inner))
    return index, peers * rest + position[index], weights


@dataclass(frozen=True)
class _Part:
    """V_l: `cubes` cubes of `side` = base^power learners, numbered from `start`; `behind` learners belong to later parts."""

    start: int
    cubes: int
    power: int
    side: int
    behind: int

    @property
    def end(self) -> int:
        return self.start + self.cubes * self.side


class _SimpleBase:
    """The simple Base-(k+1) graph over `size` learners; the steps 1 to 3 are those of the module's docstring."""

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
        position = ranks - part.start
        if phase < self._inside:  # 1. the part averages inside
            index, peers, weights = _cube(position, self._factors(part), phase)
            return index, part.start + peers, weights
        step = phase - self._inside
        if step < turn:  # 2. the part is behind V_step: its learners average with the cubes of V_step
            front = self.parts[step]
            weight = _crossing_weight(front)
            partners = [front.start + cube * front.side + ranks - front.end for cube in range(front.cubes)]
            return joined(_each(ranks, 1 - weight * front.cubes), *(_each(peers, weight) for peers in partners))
        corner = position % part.side
        if step == turn:  # 2. the part's own turn: the first `behind` learners of every cube have a partner
            weight = _crossing_weight(part)
            paired = np.flatnonzero(corner < part.behind)
            _, peers, weights = _each(part.end + corner[paired], weight)
            own = np.where(corner < part.behind, 1 - weight, 1.0)
            return joined((np.arange(len(ranks)), ranks, own), (paired, peers, weights))
        index, peers, weights = _cube(
            corner, [self.base] * part.power, step - turn - 1
        )  # 3. the part's cubes average inside
        return index, (ranks - corner)[index] + peers, weights


def _crossing_weight(part: _Part) -> float:
    """The weight w of step 2 in the module's docstring."""
    return part.side / (part.cubes * part.side + part.behind)


def _cube(ranks: Ranks, factors: list[int], phase: int) -> Entries:
    """Hyper-hypercube: average with the learners that differ only in digit `phase`; rest once all digits are done."""
    if phase >= len(factors):
        return _each(ranks, 1.0)
    stride, factor = math.prod(factors[:phase]), factors[phase]
    first = ranks - (ranks // stride % factor) * stride
    return joined(*(_each(first + digit * stride, 1 / factor) for digit in range(factor)))


def _each(peers: Ranks, weight: float) -> Entries:
    """Entries with one peer per row, all with the same weight."""
    return np.arange(len(peers)), peers, np.full(len(peers), weight)


def _smooth_part(size: int, base: int) -> tuple[int, int]:
    """(p, q) with size = p q: p has only prime factors up to `base`, q has none of these."""
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
