"""Lightning's loop with learners that do not wait for each other, and take different numbers of batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from roundelay.errors import StrategyError
from roundelay.sampler import ElasticSampler

log = logging.getLogger("roundelay")


class SharedLoader:
    """A loader with an ElasticSampler. It has no length, so an epoch ends when the shared budget of the epoch is used up.

    If other learners have taken all batches of an epoch, this loader gives None once. Lightning skips it, and then does what
    comes at the end of an epoch: all learners must meet there.

    Args:
        loader: the user's loader.
        on_empty: called when this learner gets no batch in an epoch.
    """

    def __init__(self, loader: DataLoader[Any], on_empty: Callable[[], None]) -> None:
        self._loader, self._on_empty = loader, on_empty
        self.sampler = loader.batch_sampler  # Lightning tells it the epoch

    def __iter__(self) -> Iterator[Any]:
        batches = 0
        for batches, batch in enumerate(self._loader, 1):  # noqa: B007 - used after the loop
            yield batch
        if not batches:
            self._on_empty()
            yield None


def save_although_no_step(trainer: Trainer) -> None:
    """Make this learner save at the end of an epoch in which it took no step, because saving is a collective."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback._last_global_step_saved = -1  # it skips a step that was saved already


def check(trainer: Trainer, sampler: ElasticSampler | None, *, synchronous: bool, evaluates_consensus: bool) -> None:
    """Look whether learners that need not wait for each other would do so; called before the first batch.

    Raises StrategyError if they would wait forever. Logs a warning if the wait only ends asynchrony.

    Args:
        trainer: with all its callbacks.
        sampler: shares out the batches; None if all learners take equally many.
        synchronous: learners wait for each other in every step anyway.
        evaluates_consensus: validations are of the mean model.
    """
    if sampler is not None:
        _refuse_other_accumulation(trainer, sampler)
        _refuse_meetings_by_step(trainer, synchronous=synchronous, evaluates_consensus=evaluates_consensus)
    if not synchronous:
        _refuse_validation_by_time(trainer, evaluates_consensus=evaluates_consensus)
        _stop_meetings(trainer)
        _warn_of_meetings(trainer)


def _refuse_meetings_by_step(trainer: Trainer, *, synchronous: bool, evaluates_consensus: bool) -> None:
    """Raise StrategyError if learners would meet after a number of steps, which differs between them with an ElasticSampler."""
    meets = evaluates_consensus or bool(trainer.checkpoint_callbacks or trainer.early_stopping_callbacks)
    reasons = {
        "a synchronous strategy": synchronous,
        "max_steps": trainer.max_steps != -1 and not trainer.fast_dev_run,
        "val_check_interval": meets and trainer.val_check_interval != 1.0 and not trainer.fast_dev_run,
        "ModelCheckpoint(every_n_train_steps=...)": any(
            isinstance(each, ModelCheckpoint) and each._every_n_train_steps > 0 for each in trainer.checkpoint_callbacks
        ),
    } | dict.fromkeys(_timed(trainer), True)
    for reason in (each for each, found in reasons.items() if found):
        raise StrategyError(
            f"with an ElasticSampler learners take different numbers of steps, so {reason} would make them wait for each other "
            "forever. Use ADPSGD, and let epochs decide: max_epochs, check_val_every_n_epoch, every_n_epochs"
        )


def _refuse_other_accumulation(trainer: Trainer, sampler: ElasticSampler) -> None:
    """Raise StrategyError if the sampler would take batches whose gradients are accumulated for batches that were not used."""
    if sampler.batches_per_step != trainer.accumulate_grad_batches:
        raise StrategyError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) needs "
            f"ElasticSampler(batches_per_step={trainer.accumulate_grad_batches}), got {sampler.batches_per_step}"
        )


def _refuse_validation_by_time(trainer: Trainer, *, evaluates_consensus: bool) -> None:
    """Raise StrategyError if each learner would decide by its own clock when all validate the mean model."""
    if evaluates_consensus and getattr(trainer, "_val_check_time_interval", None) is not None:
        raise StrategyError(
            "val_check_interval is a time, and learners that do not wait for each other would not validate after the same "
            'steps. Give it as a number of batches, or use RoundelayStrategy(..., evaluate="own")'
        )


def _stop_meetings(trainer: Trainer) -> None:
    """Keep Lightning (2.6) from a broadcast in every batch, which tells all ranks whether rank 0 was asked to stop.

    With it all learners would wait for rank 0, and learners with different numbers of batches would mix up collectives. Each
    learner looks for its own SIGTERM instead; launchers send it to all of them.
    """

    def look_for_own_signal() -> None:
        if trainer.received_sigterm:
            raise SIGTERMException

    if hasattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"):
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = look_for_own_signal


def _warn_of_meetings(trainer: Trainer) -> None:
    """Warn of callbacks for which all learners wait in every batch."""
    for name in _timed(trainer):
        log.warning(
            "%s makes all learners wait for rank 0 after every batch, so a slow learner delays the others. Use "
            "every_n_train_steps or max_steps instead of a time",
            name,
        )


def _timed(trainer: Trainer) -> list[str]:
    """The callbacks that broadcast after every batch whether a time is over."""
    timers = ["Timer" for each in trainer.callbacks if isinstance(each, Timer) and each._duration is not None]
    saving = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    timed = [each for each in saving if each._train_time_interval is not None]
    return timers + ["ModelCheckpoint(train_time_interval=...)" for _ in timed]
