import pytest
import torch

from roundelay.errors import MissingExtraError
from roundelay.simulation.problems import digits
from roundelay.training.tiny import digits_dataset


def test_the_digits_are_those_of_scikit_learn():
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    images, labels = digits_dataset()
    assert torch.equal(images, torch.tensor(load_digits().data, dtype=torch.float32) / 16)
    assert torch.equal(labels, torch.tensor(load_digits().target))


def test_shards_do_not_overlap():
    shards = digits().shards(8, seed=1)
    assert len(set(shards.of.flatten().tolist())) == shards.of.numel()


def test_batches_are_a_function_of_seed_and_step():
    shards, again = digits().shards(8, seed=1), digits().shards(8, seed=1)
    assert torch.equal(shards.batch(5, 4)[0], again.batch(5, 4)[0])
    assert not torch.equal(shards.batch(5, 4)[0], shards.batch(6, 4)[0])


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"roundelay\[digits\]"):
        digits.__wrapped__()
