import sys

import pytest
import torch

from roundelay.errors import MissingExtraError
from roundelay.simulation.problems import digits


def test_shards_do_not_overlap():
    shards = digits().shards(8, seed=1)
    assert len(set(shards.of.flatten().tolist())) == shards.of.numel()


def test_batches_are_a_function_of_seed_and_step():
    shards, again = digits().shards(8, seed=1), digits().shards(8, seed=1)
    assert torch.equal(shards.batch(5, 4)[0], again.batch(5, 4)[0])
    assert not torch.equal(shards.batch(5, 4)[0], shards.batch(6, 4)[0])


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"roundelay\[digits\]"):
        digits.__wrapped__()
