from __future__ import annotations

import contextlib
import json

import pytest
import torch
from hypothesis import given, strategies as st

from roundelay.errors import CheckpointError
from roundelay.weights.serialization import from_bytes, join_tree, read_state, split_tree, to_bytes

KEYS = st.text("abc/", min_size=1, max_size=3) | st.integers(0, 5)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text("xyz", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=10,
)


@given(TREES)
def test_a_tree_goes_through_json_and_comes_back(tree):
    shape, tensors = split_tree(tree)
    assert join_tree(json.loads(json.dumps(shape)), tensors) == tree


def test_what_is_neither_tensor_nor_plain_is_refused_with_its_place():
    with pytest.raises(CheckpointError, match="cannot save /a/0: a set is neither a tensor nor a plain value"):
        split_tree({"a": [set()]})


def test_bytes_and_a_file_with_these_bytes_give_the_same_tree(tmp_path):
    data = to_bytes({"w": torch.arange(3.0), 3: (1.5, None)})
    (tmp_path / "state").write_bytes(data)
    for tree in (from_bytes(data), read_state(tmp_path / "state")):
        assert torch.equal(tree["w"], torch.arange(3.0))
        assert tree[3] == (1.5, None)


@given(data=st.data())
def test_altered_bytes_give_a_tree_or_our_error(data):
    content = bytearray(to_bytes({"w": torch.arange(3.0)}))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CheckpointError):
        from_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
