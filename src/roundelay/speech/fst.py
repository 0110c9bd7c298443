"""Weighted transducers as NumPy arrays, and their conversion to and from kaldifst.

A `const` file of OpenFst is a header and two tables. Reading and writing the tables as arrays is thousands of times faster than
one Python call per arc. Arrays can also be pickled and rescaled.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roundelay.speech.libraries import library

Fst: TypeAlias = Any  # one of kaldifst's classes; the library has no types

_ARC = np.dtype([("ilabel", "<i4"), ("olabel", "<i4"), ("cost", "<f4"), ("target", "<i4")])
_STATE = np.dtype([("final", "<f4"), ("first", "<u4"), ("arcs", "<u4"), ("ilabel_0", "<u4"), ("olabel_0", "<u4")])
# magic, "const", "standard", version, flags, properties, start, states, arcs
_HEADER = struct.Struct("<i i5s i8s i i Q q q q")
_MAGIC, _VERSION, _EXPANDED = 2125659606, 2, 1


@dataclass(frozen=True, eq=False)
class Arcs:
    """The arcs of a transducer, one array per column, and the final cost of every node (infinite if it is not final)."""

    source: NDArray[np.int32]
    target: NDArray[np.int32]
    ilabel: NDArray[np.int32]
    olabel: NDArray[np.int32]
    cost: NDArray[np.float32]
    final: NDArray[np.float32]
    start: int = 0

    def __len__(self) -> int:
        return len(self.source)

    @property
    def num_nodes(self) -> int:
        return len(self.final)


def arcs(rows: Iterable[tuple[int, int, int, int, float]], final: ArrayLike, start: int = 0) -> Arcs:
    """Arcs from rows of (source, target, ilabel, olabel, cost)."""
    columns: Any = list(zip(*rows, strict=True)) or [()] * 5
    source, target, ilabel, olabel = (np.array(column, dtype=np.int32) for column in columns[:4])
    cost = np.array(columns[4], dtype=np.float32)
    return Arcs(source, target, ilabel, olabel, cost, np.asarray(final, dtype=np.float32), start)


def to_kaldi(graph: Arcs) -> Fst:
    """The transducer as a StdConstFst, for kaldifst and kaldi-decoder."""
    kaldifst = kaldifst_library()
    order = np.argsort(graph.source, kind="stable")
    table = np.empty(len(graph), dtype=_ARC)
    for name in ("ilabel", "olabel", "cost", "target"):
        table[name] = getattr(graph, name)[order]
    states = np.zeros(graph.num_nodes, dtype=_STATE)
    states["final"] = graph.final
    states["arcs"] = np.bincount(graph.source, minlength=graph.num_nodes)
    states["first"] = np.cumsum(states["arcs"]) - states["arcs"]
    states["ilabel_0"] = np.bincount(graph.source[graph.ilabel == 0], minlength=graph.num_nodes)
    states["olabel_0"] = np.bincount(graph.source[graph.olabel == 0], minlength=graph.num_nodes)
    header = _HEADER.pack(
        _MAGIC, 5, b"const", 8, b"standard", _VERSION, 0, _EXPANDED, graph.start, graph.num_nodes, len(graph)
    )
    with _file_in_memory() as path:
        path.write_bytes(header + states.tobytes() + table.tobytes())
        return kaldifst.StdConstFst.read(str(path))


def from_kaldi(fst: Fst) -> Arcs:
    """The arrays of any transducer of kaldifst."""
    kaldifst = kaldifst_library()
    with _file_in_memory() as path:
        kaldifst.StdConstFst(fst).write(str(path))
        content = path.read_bytes()
    *_, start, num_nodes, num_arcs = _HEADER.unpack_from(content)
    states = np.frombuffer(content, _STATE, num_nodes, _HEADER.size)
    table = np.frombuffer(content, _ARC, num_arcs, _HEADER.size + states.nbytes)
    source = np.repeat(np.arange(num_nodes, dtype=np.int32), states["arcs"])
    target, ilabel, olabel, cost = (table[name].copy() for name in ("target", "ilabel", "olabel", "cost"))
    return Arcs(source, target, ilabel, olabel, cost, states["final"].copy(), start)


def vector(graph: Arcs) -> Fst:
    """The transducer as a StdVectorFst, for the algorithms of kaldifst."""
    return kaldifst_library().StdVectorFst(to_kaldi(graph))


@contextmanager
def _file_in_memory() -> Iterator[Path]:
    """The path of a file in memory, because kaldifst reads and writes files only."""
    descriptor = os.memfd_create("graph.fst")
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def kaldifst_library() -> Any:  # noqa: ANN401  # a module
    """The library `kaldifst`. Raises MissingExtraError if it is not installed."""
    return library("kaldifst", "decoding")
