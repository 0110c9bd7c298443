"""A small network and its data, and the plain loops that integrations are compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from roundelay.topology import ring

LEARNERS, SAMPLES, BATCH, EPOCHS = 2, 48, 4, 2
LR, MOMENTUM = 0.05, 0.9


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, 5, generator=generator)
    return TensorDataset(x, x[:, :1] * 2 + torch.randn(SAMPLES, 1, generator=generator))


def loader(*, shuffle: bool = False) -> DataLoader:
    return DataLoader(data(), batch_size=BATCH, shuffle=shuffle)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


def vector(module: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in module.parameters()]).clone()


def shares(rank: int, epoch: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of a learner: what DistributedSampler gives it."""
    sampler = DistributedSampler(data(), LEARNERS, rank, shuffle=True, seed=0)
    sampler.set_epoch(epoch)
    return list(DataLoader(data(), batch_size=BATCH, sampler=sampler))


def in_turns(rank: int, epoch: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of a learner: every second one, as Accelerate deals them out."""
    return list(loader())[rank::LEARNERS]


def dpsgd_by_matrix(
    epochs: int = EPOCHS, decay: float = 0.5, shares: Callable[[int, int], list[tuple[Tensor, Tensor]]] = shares
) -> list[nn.Module]:
    """D-PSGD on a ring by hand: X <- W X - lr V, V <- momentum V + G(X). The learning rate decays after each epoch."""
    modules = [network() for _ in range(LEARNERS)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM) for module in modules]
    step = 0
    for epoch in range(epochs):
        for batches in zip(*(shares(rank, epoch) for rank in range(LEARNERS)), strict=True):
            for module, optimizer, (x, y) in zip(modules, optimizers, batches, strict=True):
                optimizer.zero_grad()
                nn.functional.mse_loss(module(x), y).backward()
            before = [[weight.detach().clone() for weight in module.parameters()] for module in modules]
            for rank, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
                with torch.no_grad():
                    for index, weight in enumerate(module.parameters()):
                        row = ring(LEARNERS).row(rank, step).items()
                        weight.copy_(sum(share * before[peer][index] for peer, share in row))
                optimizer.step()
            step += 1
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] *= decay
    return modules
