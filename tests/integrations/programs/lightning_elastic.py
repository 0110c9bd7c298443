"""Run by `roundelay launch` with 3 learners, of which learner 1 is slow: batches are shared, and learner 0 dies at the end.

Each learner saves what it saw to the directory given.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

import roundelay
from roundelay.integrations.lightning import RoundelayStrategy

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from lightning_model import Model
from regression import data, loader, vector

FOLDER = Path(sys.argv[1])
LEARNERS, BATCH, EPOCHS = 3, 2, 3
RANK = int(os.environ["ROUNDELAY_LEARNER"])
SAW: dict[str, object] = {}


class Slow(Model):
    """Learner 1 is slow. Notes the samples of every epoch; learner 0 dies in its second step of epoch `dies_in`."""

    def __init__(self, dies_in: int | None = None) -> None:
        super().__init__()
        self.dies_in, self.samples, self.figures = dies_in, {}, []

    def training_step(self, batch, index):
        if RANK == 0 and self.current_epoch == self.dies_in and self.current_epoch in self.samples:
            torch.save(self.samples, FOLDER / "used by the dead.pt")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.06 if RANK == 1 else 0.02)
        self.samples.setdefault(self.current_epoch, []).extend(batch[0][:, 0].tolist())
        return super().training_step(batch, index)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.figures.append(float(self.trainer.callback_metrics["val_loss"]))


def fitted(name, module, samples, *, epochs=EPOCHS, ckpt_path=None):
    sampler = roundelay.ElasticSampler(samples, BATCH, epochs)
    saving = ModelCheckpoint(dirpath=FOLDER / name, filename="{epoch}-{step}", save_top_k=-1, every_n_epochs=1)
    trainer = Trainer(
        strategy="roundelay_adpsgd",
        accelerator="cpu",
        devices=LEARNERS,
        max_epochs=epochs,
        log_every_n_steps=1,
        logger=CSVLogger(FOLDER, name=f"{name}-log"),
        callbacks=[saving, EarlyStopping("val_loss", patience=9)],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        default_root_dir=FOLDER,
    )
    trainer.fit(module, DataLoader(samples, batch_sampler=sampler), loader(), ckpt_path=ckpt_path)
    SAW[name] = {
        "samples": module.samples,
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "figures": module.figures,
        "end": vector(module.net),
        "best": saving.best_model_path,
    }
    return trainer


def main() -> None:
    trainer = fitted("shared", Slow(), data())
    SAW["tested"] = trainer.test(Slow(), loader(), ckpt_path="best", verbose=False)
    (first,) = (FOLDER / "shared").glob("epoch=0*.ckpt")
    fitted("resumed", Slow(), data(), ckpt_path=first)
    one_batch = TensorDataset(*(tensor[:BATCH] for tensor in data().tensors))
    fitted("few", Slow(), one_batch)
    os.environ["ROUNDELAY_JOINS"] = "1"
    try:
        RoundelayStrategy()
    except roundelay.errors.LaunchError as error:
        SAW["too late"] = str(error)
    del os.environ["ROUNDELAY_JOINS"]
    torch.save(SAW, FOLDER / f"saw {RANK}.pt")
    fitted("death", Slow(dies_in=1), data())
    torch.save(SAW, FOLDER / f"saw {RANK}.pt")


if __name__ == "__main__":
    main()
