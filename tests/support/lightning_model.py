"""A small LightningModule, for tests of the integration."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from regression import LR, MOMENTUM, network, vector
from torch import Tensor, nn


class Model(LightningModule):
    """Automatic optimization."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = network(seed)
        self.seen, self.validated = [], []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss, sync_dist=False)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.validated.append(vector(self.net))

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.log("test_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [scheduler]


class Manual(Model):
    """Manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
