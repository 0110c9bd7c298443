"""How far Adam moves the mean of n learners, if each optimizer sees the noise of its own gradient only."""

import pytest
import torch

STEPS, COORDINATES, RATE = 400, 4000, 1e-3


def displacement(n, noise, rate):
    """How far the mean of n learners with Adam moves against a gradient of 1 plus noise. Each coordinate is a repetition."""
    generator = torch.Generator().manual_seed(n)
    x = torch.zeros(n, COORDINATES, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=rate, betas=(0.9, 0.99))
    for _ in range(STEPS):
        x.grad = 1 + noise * torch.randn(x.shape, generator=generator)
        optimizer.step()
    return -x.detach().mean().item()


@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("noise", [0.0, 1.0, 20.0])
def test_at_the_factor_of_the_docs_the_mean_of_n_learners_moves_as_far_as_with_ddp(n, noise):
    """v is S + N for a learner and S + N/n for DDP, so the factor is their root: 1 without noise, sqrt(n) with nothing else."""
    factor = ((1 + noise**2) / (1 + noise**2 / n)) ** 0.5
    ddp = displacement(1, noise / n**0.5, RATE)
    assert displacement(n, noise, factor * RATE) == pytest.approx(ddp, rel=0.05)
    if noise == 20.0:
        assert factor == pytest.approx(n**0.5, rel=0.02)
