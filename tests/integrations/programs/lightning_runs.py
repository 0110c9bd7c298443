"""Run with 2 processes: many small runs of Lightning. Each rank saves what it saw to the directory given."""

from __future__ import annotations

import contextlib
import logging
import runpy
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

import roundelay
from roundelay.integrations.lightning import RoundelayStrategy

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from lightning_model import Manual, Model
from regression import EPOCHS, LEARNERS, data, loader, vector

FOLDER = Path(sys.argv[1])
SAW: dict[str, object] = {}


def trainer(strategy, **options) -> Trainer:
    defaults = {"max_epochs": EPOCHS, "enable_checkpointing": False, "logger": False} | options
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=LEARNERS,
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


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """What Roundelay logs in this block."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("roundelay").addHandler(handler)
    yield messages
    logging.getLogger("roundelay").removeHandler(handler)


def saving(name: str, **options) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=FOLDER / name, filename="{epoch}-{step}", save_top_k=-1, **options)


class Counting(Model):
    """Counts the bytes of reductions, from the first batch on."""

    def _bytes_sent(self) -> float:
        learner = getattr(self.trainer.strategy, "learner", None)
        return learner.metrics()["bytes_sent"] if learner else 0.0

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 0:
            self.bytes_before = self._bytes_sent()

    def on_train_end(self) -> None:
        self.bytes_sent = self._bytes_sent() - self.bytes_before


def as_ddp() -> None:
    """Equal to DDP: plain, with clipping and accumulation, in manual optimization, in bfloat16, shuffled."""
    options = {
        "plain": {},
        "accumulated": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3},
        "bfloat16": {"precision": "bf16-mixed"},
    }
    for name, chosen in options.items():
        for strategy in ("ddp", "roundelay_allreduce"):
            module, _ = fitted(strategy, Counting(), **chosen)
            SAW[f"{name} {strategy}"] = vector(module.net)
            SAW[f"{name} {strategy} bytes"] = module.bytes_sent
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
    module, made = fitted(
        RoundelayStrategy(averaging),
        Model(seed=3),
        ckpt_path=first,
        callbacks=[saving("resumed", every_n_epochs=1)],
        enable_checkpointing=True,
        validate=True,
    )
    SAW["resumed"] = vector(module.net)
    alone = FOLDER / "alone.ckpt"  # without the learners
    if made.is_global_zero:
        alone.write_bytes(first.read_bytes())
    made.strategy.barrier()
    with told() as messages:
        module, _ = fitted(RoundelayStrategy(averaging), Model(seed=4), ckpt_path=alone)
    SAW["resumed from the mean"], SAW["told of the mean"] = vector(module.net), messages


def saved_in_validation() -> None:
    """With val_check_interval ModelCheckpoint saves while the module has the mean model."""
    fitted(
        RoundelayStrategy(roundelay.DPSGD("ring")),
        callbacks=[saving("in validation", monitor="val_loss")],
        enable_checkpointing=True,
        validate=True,
        val_check_interval=3,
        max_epochs=1,
    )


def other_seeds() -> None:
    """Learners that begin with different weights, on their own and on the mean; all end with the mean."""
    rank = int(torch.distributed.get_rank())
    for evaluate in ("consensus", "own"):
        module, made = fitted(
            RoundelayStrategy(roundelay.DPSGD("ring"), evaluate=evaluate), Model(seed=rank), validate=True
        )
        SAW[f"{evaluate} validated"] = list(module.validated)
        SAW[f"{evaluate} end"] = vector(module.net)
    SAW["loss of all"] = float(torch.nn.functional.mse_loss(module.net.eval()(data().tensors[0]), data().tensors[1]))
    SAW["validate"] = made.validate(module, loader(), verbose=False)
    SAW["test"] = made.test(module, loader(), verbose=False)
    SAW["predict"] = torch.cat(made.predict(module, loader())).flatten()
    share = data().tensors[0][rank::LEARNERS]  # what DistributedSampler gives without shuffling
    SAW["predict expected"] = module.net.eval()(share).detach().flatten()
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
    with told() as messages:
        module, made = fitted("roundelay_adpsgd", ckpt_path=FOLDER / "adpsgd" / "last.ckpt", max_epochs=4)
    SAW["told after the link"] = messages
    SAW["adpsgd resumed steps"] = made.global_step
    for name in ("roundelay_delay_by_one", "roundelay_local_sgd"):
        module, made = fitted(name, fast_dev_run=True)
        SAW[name] = vector(module.net)


def early() -> None:
    """No improvement is large enough, so all stop after two validations."""
    _, made = fitted(
        "roundelay_adpsgd",
        callbacks=[EarlyStopping("val_loss", min_delta=1e9, patience=1)],
        validate=True,
        max_epochs=9,
    )
    SAW["early"] = made.current_epoch


def unhindered() -> None:
    """Learner 1 is slow. Learner 0 validates its own weights, logs every step, and does not wait."""

    class Slow(Model):
        def training_step(self, batch, index):
            time.sleep(0.05 * self.global_rank)
            SAW.setdefault("times", []).append(time.time())
            return super().training_step(batch, index)

        def validation_step(self, batch, index):
            self.log("own_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    fitted(
        RoundelayStrategy("adpsgd", evaluate="own"),
        Slow(),
        validate=True,
        val_check_interval=2,
        logger=CSVLogger(FOLDER, name="unhindered"),
        log_every_n_steps=1,
        max_epochs=2,
    )


def warnings() -> None:
    with told() as messages:
        fitted("roundelay_adpsgd", callbacks=[Timer("00:01:00:00")], max_epochs=1)
        fitted("roundelay_allreduce", callbacks=[Timer("00:01:00:00")], max_epochs=1)
        timed = saving("timed", train_time_interval=timedelta(hours=1))
        fitted("roundelay_local_sgd", callbacks=[timed], enable_checkpointing=True, max_epochs=1)
    SAW["told"] = messages


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


def refused_with_an_elastic_sampler() -> None:
    """Settings with which learners would wait for each other after different numbers of steps."""
    errors = {}
    checkpoints = {"enable_checkpointing": True}
    for name, (averaging, options) in {
        "synchronous": ("dpsgd", {}),
        "max_steps": ("adpsgd", {"max_steps": 5}),
        "val_check_interval": ("adpsgd", {"val_check_interval": 2}),
        "every_n_train_steps": ("adpsgd", checkpoints | {"callbacks": [saving("none", every_n_train_steps=2)]}),
        "Timer": ("adpsgd", {"callbacks": [Timer("00:01:00:00")]}),
        "accumulation": ("adpsgd", {"accumulate_grad_batches": 2}),
    }.items():
        batches = DataLoader(data(), batch_sampler=roundelay.ElasticSampler(data(), 4))
        made = trainer(RoundelayStrategy(averaging), use_distributed_sampler=False, **options)
        try:
            made.fit(Model(), batches, loader())
        except roundelay.StrategyError as error:
            errors[name] = str(error)
    try:
        fitted("roundelay_adpsgd", validate=True, val_check_interval=timedelta(seconds=1))
    except roundelay.StrategyError as error:
        errors["time"] = str(error)
    SAW["refused with a sampler"] = errors


def page() -> None:
    """The complete script of the page, as written."""
    with contextlib.chdir(FOLDER):
        runpy.run_path("train.py", run_name="__main__")


RUNS = (
    refused,
    refused_with_an_elastic_sampler,
    as_ddp,
    dpsgd,
    saved_in_validation,
    other_seeds,
    adpsgd,
    early,
    unhindered,
    warnings,
    removed,
    page,
    failing,
)

if __name__ == "__main__":
    for run in RUNS:
        run()
    torch.save(SAW, FOLDER / f"saw {torch.distributed.get_rank()}.pt")
