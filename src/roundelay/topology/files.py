"""Topologies from files: a graph (.edgelist, .graphml) or a mixing matrix (.csv, .npy)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from roundelay.errors import MissingExtraError, RoundelayError, TopologyError
from roundelay.topology.matrix import from_graph, from_matrix
from roundelay.topology.mixing import Mixing

READERS: dict[str, Callable[[Path], Mixing]] = {
    ".npy": lambda path: from_matrix(_read_npy(path), path.name),
    ".csv": lambda path: from_matrix(np.loadtxt(path, delimiter=",", ndmin=2), path.name),
    ".edgelist": lambda path: from_graph(_networkx().read_edgelist(path), path.name),
    ".graphml": lambda path: from_graph(_networkx().read_graphml(path), path.name),
}


def mixing_from_file(path: Path) -> Mixing:
    """The mixing in a file whose ending is one of `READERS`. A graph gets Metropolis weights.

    Raises TopologyError if the file is missing, unreadable, or not a valid mixing.
    Raises MissingExtraError if the file is a graph and networkx is not installed.
    """
    if not path.is_file():
        raise TopologyError(f"cannot read {path}: {'it is a folder' if path.is_dir() else 'there is no such file'}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # NumPy only warns about an empty file, which is an error here
            return READERS[path.suffix](path)
    except RoundelayError:
        raise
    except OSError as error:
        raise TopologyError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # the readers raise many kinds of errors for a malformed file
        what = str(error).partition("\n")[0] or type(error).__name__
        raise TopologyError(f"cannot read {path} as {path.suffix}: {what}") from error


def _read_npy(path: Path) -> Any:  # noqa: ANN401 - checked by `from_matrix`
    """The array in a file. np.load would take any file for a pickle, and advise to unpickle it."""
    with path.open("rb") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _networkx() -> Any:  # noqa: ANN401 - a module without types
    try:
        import networkx
    except ImportError as error:
        raise MissingExtraError("reading a graph from a file", "analysis") from error
    return networkx
