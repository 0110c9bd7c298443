"""Topologies from files: a graph (.edgelist, .graphml) or a mixing matrix (.csv, .npy)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import networkx as nx
import numpy as np

from roundelay.errors import TopologyError
from roundelay.topology.graphs import from_graph, from_matrix
from roundelay.topology.mixing import Mixing

READERS: dict[str, Callable[[Path], Mixing]] = {
    ".npy": lambda path: from_matrix(np.load(path, allow_pickle=False), path.name),
    ".csv": lambda path: from_matrix(np.loadtxt(path, delimiter=",", ndmin=2), path.name),
    ".edgelist": lambda path: from_graph(nx.read_edgelist(path), path.name),
    ".graphml": lambda path: from_graph(nx.read_graphml(path), path.name),
}


def mixing_from_file(path: Path) -> Mixing:
    """The mixing that a file describes; a graph gets Metropolis weights.

    Raises TopologyError if the file is missing, unreadable, or describes no valid mixing.
    """
    if path.suffix not in READERS:
        raise TopologyError(f"{path} has no ending that is known; use {', '.join(READERS)}")
    if not path.is_file():
        raise TopologyError(f"cannot read {path}: there is no such file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # NumPy only warns about an empty file
            return READERS[path.suffix](path)
    except TopologyError:
        raise
    except OSError as error:
        raise TopologyError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # readers raise many kinds of errors for a malformed file
        what = str(error).partition("\n")[0] or type(error).__name__
        raise TopologyError(f"{path} is no {path.suffix} file that can be read: {what}") from error
