"""Run with 2 processes: many small runs of Lightning. Each rank saves what it saw to the directory given."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer

import roundelay
from roundelay.integrations.lightning import RoundelayStrategy

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from lightning_model import Manual, Model
from regression import EPOCHS, LEARNERS, loader, vector

FOLDER = Path(sys.argv[1])
SAW: dict[str, object] = {}


def trainer(strategy, **options) -> Trainer:
    defaults = {"max_epochs": EPOCHS, "enable_checkpointing": False} | options
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=LEARNERS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=FOLDER,
        **defaults,
    )


def fitted(strategy, module=None, *, ckpt_path=None, validate=False, **options):
    module = module or Model()
    made = trainer(strategy, **options)
    made.fit(module, loader(), loader() if validate else None, ckpt_path=ckpt_path)
    return module, made


def saving(name: str, **options) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=FOLDER / name, filename="{epoch}-{step}", save_top_k=-1, **options)


def as_ddp() -> None:
    """Equal to DDP: plain, with clipping and accumulation, in manual optimization, in bfloat16, shuffled."""
    options = {
        "plain": {},
        "accumulated": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3},
        "bfloat16": {"precision": "bf16-mixed"},
    }
    for name, chosen in options.items():
        for strategy in ("ddp", "roundelay_allreduce"):
            module, _ = fitted(strategy, Model(), **chosen)
            SAW[f"{name} {strategy}"] = vector(module.net)
    for strategy in ("ddp", "roundelay_allreduce"):
        module, _ = fitted(strategy, Manual())
        SAW[f"manual {strategy}"] = vector(module.net)


def dpsgd() -> None:
    """Checkpoints after every epoch, beside them the learners; resumed after the first one."""
    averaging = roundelay.DPSGD("ring")
    module, _ = fitted(
        RoundelayStrategy(averaging),
        callbacks=[saving("dpsgd", every_n_epochs=1)],
        enable_checkpointing=True,
        validate=True,
    )
    SAW["dpsgd"] = vector(module.net)
    SAW["dpsgd validated"] = module.validated
    first = next((FOLDER / "dpsgd").glob("epoch=0*.ckpt"))
    module, _ = fitted(
        RoundelayStrategy(averaging),
        Model(seed=3),
        ckpt_path=first,
        callbacks=[saving("resumed", every_n_epochs=1)],
        enable_checkpointing=True,
        validate=True,
    )
    SAW["resumed"] = vector(module.net)


def other_seeds() -> None:
    """Learners that begin with different weights, on their own and on the mean; all end with the mean."""
    rank = int(torch.distributed.get_rank())
    for evaluate in ("consensus", "own"):
        module, made = fitted(
            RoundelayStrategy(roundelay.DPSGD("ring"), evaluate=evaluate), Model(seed=rank), validate=True
        )
        SAW[f"{evaluate} validated"] = list(module.validated)
        SAW[f"{evaluate} end"] = vector(module.net)
    SAW["validate"] = made.validate(module, loader(), verbose=False)
    SAW["test"] = made.test(module, loader(), verbose=False)
    SAW["predict"] = len(made.predict(module, loader()))
    made.fit_loop.max_epochs += 1
    made.fit(module, loader())
    SAW["second fit"] = made.global_step


def adpsgd() -> None:
    callbacks = [
        saving("adpsgd", every_n_train_steps=5, save_last="link"),
        EarlyStopping("val_loss", patience=3),
    ]
    module, made = fitted(
        "roundelay_adpsgd", callbacks=callbacks, enable_checkpointing=True, validate=True, max_steps=10, max_epochs=-1
    )
    SAW["adpsgd"] = vector(module.net)
    SAW["adpsgd steps"] = made.global_step
    module, made = fitted("roundelay_adpsgd", ckpt_path=FOLDER / "adpsgd" / "last.ckpt", max_epochs=4)
    SAW["adpsgd resumed steps"] = made.global_step
    for name in ("roundelay_delay_by_one", "roundelay_local_sgd"):
        module, made = fitted(name, fast_dev_run=True)
        SAW[name] = vector(module.net)


def warnings() -> None:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("roundelay").addHandler(handler)
    fitted("roundelay_adpsgd", callbacks=[Timer("00:01:00:00")], fast_dev_run=False, max_epochs=1)
    fitted("roundelay_allreduce", callbacks=[Timer("00:01:00:00")], max_epochs=1)
    logging.getLogger("roundelay").removeHandler(handler)
    SAW["told"] = told


def removed() -> None:
    fitted(
        "roundelay_dpsgd",
        callbacks=[ModelCheckpoint(dirpath=FOLDER / "one", filename="{epoch}", save_top_k=1, every_n_epochs=1)],
        enable_checkpointing=True,
        max_epochs=3,
    )


def failing() -> None:
    """A batch that fails on one learner: the others hear why."""

    class Failing(Model):
        def training_step(self, batch, index):
            if self.global_step == 3 and self.global_rank == 1:
                raise ZeroDivisionError("this batch is bad")
            return super().training_step(batch, index)

    try:
        fitted("roundelay_dpsgd", Failing())
    except Exception as error:
        SAW["failure"] = f"{type(error).__name__}: {error}"


def refused() -> None:
    """Options that make no sense, and a module with two optimizers."""

    class Two(Model):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]

    errors = []
    for options in ({"evaluate": "mean"}, {"find_unused_parameters": True}, {"averaging": "adpsdg"}):
        try:
            RoundelayStrategy(**options)
        except roundelay.StrategyError as error:
            errors.append(str(error))
    try:
        two = Two()
        two.automatic_optimization = False
        fitted("roundelay_adpsgd", two)
    except roundelay.StrategyError as error:
        errors.append(str(error))
    SAW["refused"] = errors


if __name__ == "__main__":
    for run in (refused, as_ddp, dpsgd, other_seeds, adpsgd, warnings, removed, failing):
        run()
    torch.save(SAW, FOLDER / f"saw {torch.distributed.get_rank()}.pt")
