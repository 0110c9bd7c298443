"""Run with 4 processes, one of which is five times slower: seconds from the first batch until all have the mean model."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

import roundelay.integrations.lightning

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from lightning_model import Model
from regression import data

STRATEGY, FOLDER = sys.argv[1], Path(sys.argv[2])
LEARNERS, REPEATS, BATCH, STEP_S, SLOW = 4, 20, 3, 0.15, 5
RANK = int(os.environ.get("ROUNDELAY_LEARNER", os.environ.get("RANK")))


class Paced(Model):
    """Takes its time for every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.ended, self.seen_samples = 0.0, 0.0, []

    def training_step(self, batch, index):
        self.began = self.began or time.perf_counter()
        time.sleep(STEP_S * (SLOW if RANK == 0 else 1))
        self.seen_samples += batch[0][:, 0].tolist()
        return super().training_step(batch, index)

    def on_fit_end(self) -> None:
        self.ended = time.perf_counter()


if __name__ == "__main__":
    samples = torch.utils.data.ConcatDataset([data()] * REPEATS)
    if STRATEGY == "ddp":
        loader = DataLoader(samples, batch_size=BATCH)
    else:
        loader = DataLoader(samples, batch_sampler=roundelay.ElasticSampler(len(samples), BATCH))
    module = Paced()
    trainer = Trainer(
        strategy=STRATEGY,
        accelerator="cpu",
        devices=LEARNERS,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=STRATEGY == "ddp",
    )
    trainer.fit(module, loader)
    result = {"seconds": module.ended - module.began, "steps": trainer.global_step, "samples": module.seen_samples}
    (FOLDER / f"{STRATEGY} {RANK}.json").write_text(json.dumps(result))
