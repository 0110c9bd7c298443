"""A state as bytes: trees of tensors and plain values, as a safetensors file. Nothing is ever unpickled."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from roundelay.errors import CheckpointError, described

# Everything that reading an altered file can raise. Its JSON may be anything, nested to any depth.
UNREADABLE = (
    OSError,
    SafetensorError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
    struct.error,
)
_HEADER_LENGTH = struct.Struct("<Q")  # a safetensors file begins with the length of its JSON header


def split_tree(tree: Any, path: str = "") -> tuple[Any, dict[str, Tensor]]:  # noqa: ANN401
    """Split a tree of dictionaries, lists, tuples, tensors and plain values into JSON and the tensors it refers to.

    Raises CheckpointError, with the path in the tree, for a value of any other type.

    >>> import torch
    >>> split_tree({"x": torch.zeros(2), 3: (1.5, None)})[0]
    {'pairs': [['x', {'tensor': '/x'}], [3, {'tuple': [1.5, None]}]]}
    """
    if isinstance(tree, Tensor):
        return {"tensor": path}, {path: tree}
    if isinstance(tree, dict):
        parts = {key: split_tree(value, f"{path}/{key}") for key, value in tree.items()}
        return {"pairs": [[key, part[0]] for key, part in parts.items()]}, _merged(part[1] for part in parts.values())
    if isinstance(tree, list | tuple):
        items = [split_tree(value, f"{path}/{index}") for index, value in enumerate(tree)]
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return {kind: [item[0] for item in items]}, _merged(item[1] for item in items)
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree, {}
    raise CheckpointError(
        f"cannot save {path or 'this'}: a {type(tree).__name__} is neither a tensor nor a plain value"
    )


def join_tree(shape: Any, tensors: dict[str, Tensor]) -> Any:  # noqa: ANN401
    """Rebuild the tree that `split_tree` took apart."""
    if not isinstance(shape, dict):
        return shape
    ((kind, value),) = shape.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "pairs":
        return {key: join_tree(item, tensors) for key, item in value}
    items = [join_tree(item, tensors) for item in value]
    return tuple(items) if kind == "tuple" else items


def _merged(dictionaries: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: value for each in dictionaries for key, value in each.items()}


def read_state(path: Path) -> Any:  # noqa: ANN401
    """Read the tree from a file that holds the bytes of `to_bytes`. Raises CheckpointError if they are damaged."""
    try:
        with safe_open(str(path), framework="pt") as file:
            shape = json.loads((file.metadata() or {})["state"])
            return join_tree(shape, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except UNREADABLE as error:
        raise CheckpointError(f"'{path}' is torn or altered: {described(error)}") from error


def to_bytes(tree: Any) -> bytes:  # noqa: ANN401
    """Encode a tree as the content of a safetensors file."""
    shape, tensors = split_tree(tree)
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"state": json.dumps(shape)})


def from_bytes(data: bytes) -> Any:  # noqa: ANN401
    """Decode the tree that `to_bytes` encoded. Raises CheckpointError for any other bytes."""
    try:
        (length,) = _HEADER_LENGTH.unpack_from(data)
        header = json.loads(data[_HEADER_LENGTH.size : _HEADER_LENGTH.size + length])
        return join_tree(json.loads(header["__metadata__"]["state"]), load(data))
    except UNREADABLE as error:
        raise CheckpointError(f"these bytes are no state: {described(error)}") from error


def snapshot(tree: Any) -> Any:  # noqa: ANN401
    """Copy the tree, with its tensors on the CPU, so that training cannot change the copy."""
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        return {key: snapshot(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(snapshot(value) for value in tree)
    return tree
