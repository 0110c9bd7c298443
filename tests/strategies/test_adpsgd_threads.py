"""AD-PSGD with real threads and sockets, and learners that step as fast as they can."""

import numpy as np
import pytest
import torch
from loopback import loopback, together
from torch import nn

from roundelay.learner import Learner
from roundelay.strategies import ADPSGD
from roundelay.topology import random_ring
from roundelay.weights import flat

SIZE, PARAMETERS = 4, 5000
both = pytest.mark.parametrize("share_memory", [True, False], ids=["shared", "sockets"])


def vector(module):
    return module.weight.detach().flatten().numpy().copy()


def train_fast(share_memory, steps, lr, scatter=0.0, dtype=torch.float64):
    """Train all learners in threads; weights at the start and at the end, the updates applied, and metrics."""
    initial, updates, final, metrics = ([None] * SIZE for _ in range(4))
    with loopback(SIZE, share_memory=share_memory) as transports:

        def work(rank):
            rng = torch.Generator().manual_seed(rank)
            module = nn.Linear(PARAMETERS, 1, bias=False, dtype=dtype)
            optimizer = torch.optim.SGD(module.parameters(), lr=lr)
            total = torch.zeros(1, PARAMETERS, dtype=torch.float64)
            strategy = ADPSGD(random_ring(SIZE, seed=1), max_lead=2)  # so that exchanges keep up with empty steps
            with Learner(module, optimizer, strategy, transports[rank]) as learner:
                with strategy.at_rest() as weights:  # learners that differ, as after some training
                    noise = scatter * torch.randn(module.weight.shape, generator=rng, dtype=dtype)
                    weights.views[0].add_(noise)
                initial[rank] = vector(module) + noise.numpy().ravel()
                for _ in range(steps):
                    module.weight.grad = torch.randn(module.weight.shape, generator=rng, dtype=dtype)
                    total -= lr * module.weight.grad
                    optimizer.step()
            updates[rank], final[rank], metrics[rank] = total.numpy().ravel(), vector(module), learner.metrics()

        together(SIZE, work)
    return np.stack(initial), np.stack(updates), np.stack(final), metrics


@both
def test_thousands_of_exchanges_during_steps_lose_no_update(share_memory):
    initial, updates, final, metrics = train_fast(share_memory, steps=1000, lr=0.1)
    assert sum(m["exchanges_finished"] for m in metrics) > 1000
    assert sum(m["exchanges_finished"] for m in metrics) == sum(m["exchanges_served"] for m in metrics)
    np.testing.assert_allclose(final.sum(0), initial.sum(0) + updates.sum(0), rtol=0, atol=1e-9)


@both
def test_without_gradients_thousands_of_exchanges_keep_the_mean_and_shrink_the_spread(share_memory):
    initial, _, final, metrics = train_fast(share_memory, steps=500, lr=0.0, scatter=1.0)
    assert sum(m["exchanges_finished"] for m in metrics) > 500
    np.testing.assert_allclose(final.mean(0), initial.mean(0), rtol=0, atol=1e-12)
    assert final.std(0).max() < 0.05 * initial.std(0).max()


@both
@pytest.mark.parametrize("piece", [2**18, 700])
def test_the_same_in_single_precision_and_piece_by_piece(share_memory, piece, monkeypatch):
    monkeypatch.setattr(flat, "PIECE", piece)  # steps come between the pieces of one exchange
    initial, updates, final, metrics = train_fast(share_memory, steps=600, lr=0.1, dtype=torch.float32)
    assert sum(m["exchanges_finished"] for m in metrics) > 600
    np.testing.assert_allclose(
        final.sum(0), initial.sum(0) + updates.sum(0), rtol=0, atol=1e-3
    )  # updates add up to about 50
