"""Started once: Lightning itself starts the other learner, by popen or spawn."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer

import roundelay
from roundelay.integrations.lightning import RoundelayStrategy

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from lightning_model import Model
from regression import LEARNERS, loader, vector


class Saving(Model):
    """Every learner saves what it ends with."""

    folder = ""

    def on_fit_end(self) -> None:
        torch.save(vector(self.net), f"{self.folder}/{self.global_rank}.pt")


if __name__ == "__main__":
    module = Saving()
    module.folder = sys.argv[2]
    Trainer(
        strategy=RoundelayStrategy(roundelay.ADPSGD("random-ring"), start_method=sys.argv[1]),
        accelerator="cpu",
        devices=LEARNERS,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=sys.argv[2],
    ).fit(module, loader())
