"""Hugging Face: `RoundelayTrainer(..., averaging=roundelay.ADPSGD())` instead of `Trainer`.

`RoundelayMixin` adds the same to a subclass of Trainer: `class MyTrainer(RoundelayMixin, SFTTrainer)`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roundelay.errors import MissingExtraError, StrategyError

try:
    from transformers import Trainer
except ImportError as error:
    raise MissingExtraError("training with Hugging Face's Trainer", "transformers") from error

from roundelay.integrations.accelerate import ENGINES, check_processes, replaced
from roundelay.integrations.learner_state import learner_state, resume
from roundelay.learner import Learner
from roundelay.strategies.base import Strategy
from roundelay.strategies.registry import strategy_named

log = logging.getLogger("roundelay")


class RoundelayMixin:
    """Makes the learners of a Trainer average as `averaging` says. Stands before the Trainer in the list of base classes.

    The model is not wrapped in DistributedDataParallel. Evaluations, predictions and saved models are those of the mean model of
    all learners; they are collectives while `train` runs. Each checkpoint has a file `learner-RANK.pt` for every learner, from
    which `train(resume_from_checkpoint=...)` continues exactly. After `train` all learners have the mean model, or the best one
    with `load_best_model_at_end`.

    Raises StrategyError if DeepSpeed or FSDP owns the weights.

    Args:
        averaging: a strategy of Roundelay, or its name, such as "adpsgd".

    Attributes:
        learner: while `train` runs; None before and after.
    """

    def __init__(self, *args: Any, averaging: Strategy | str, **kwargs: Any) -> None:  # noqa: ANN401
        self.averaging = strategy_named(averaging) if isinstance(averaging, str) else averaging
        super().__init__(*args, **kwargs)
        self.learner: Learner | None = None
        self._cleanup = contextlib.ExitStack()
        self._has_mean = False  # the model has the mean of all learners at the moment
        trainer: Any = self
        engine = trainer.accelerator.distributed_type.name
        if engine in ENGINES:
            raise StrategyError(f"{engine} owns the weights, so learners cannot average them; train without it")
        if not self.averaging.reduces_gradients:
            # The gradient is a learner's own: its loss is the mean over its own tokens. This also saves a meeting in every step.
            trainer.args.average_tokens_across_devices = False

    # The life of the learner -----------------------------------------------------------------------------------------

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        try:
            return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            if self.learner is not None:
                learner, self.learner = self.learner, None
                learner.__exit__(type(error), error, error.__traceback__)
            raise
        finally:
            self._cleanup.close()

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:  # noqa: ANN401
        """Have Accelerate prepare everything but DistributedDataParallel, then make the learner."""
        trainer: Any = self
        without_ddp = functools.partial(trainer.accelerator.prepare_model, evaluation_mode=True)
        with replaced(trainer.accelerator, "prepare_model", without_ddp):
            prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore[misc]
        learner = self.learner = Learner(trainer.model, trainer.optimizer, copy.deepcopy(self.averaging))
        check_processes(learner, trainer.args.world_size, "Trainer")
        self._cleanup.enter_context(replaced(trainer.model, "no_sync", learner.accumulate))
        averaged, total = (
            sum(t.numel() for t in each) for each in (learner.replica.weights, trainer.model.parameters())
        )
        nbytes = sum(tensor.nbytes for tensor in learner.replica.tensors())
        log.info("learners average %d of %d parameters (%.3g MB)", averaged, total, nbytes / 1e6)
        if resume_from_checkpoint is not None:
            own = Path(resume_from_checkpoint) / self._own_file
            state = torch.load(own, weights_only=True, map_location="cpu") if own.is_file() else {}
            resume(learner, state, resume_from_checkpoint)
        return prepared

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """First put the mean into the model for good; then `load_best_model_at_end` may replace it by the best one."""
        assert self.learner is not None
        learner, self.learner = self.learner, None
        with learner:
            learner.finish()
            learner.settle()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    # The mean model --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _mean(self) -> Iterator[None]:
        """In this block the model has the mean of all learners."""
        if self.learner is None or self._has_mean:
            yield
            return
        with self.learner.consensus():
            self._has_mean = True
            try:
                yield
            finally:
                self._has_mean = False

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:  # noqa: ANN401
        """Evaluate the mean model. All processes must call this."""
        with self._mean():
            figures: dict[str, float] = super().evaluate(*args, **kwargs)  # type: ignore[misc]
            return figures

    def predict(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Predict with the mean model. All processes must call this."""
        with self._mean():
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Save the mean model, on process 0. All processes must call this."""
        with self._mean():
            super().save_model(*args, **kwargs)  # type: ignore[misc]

    # An asynchronous learner waits for no other -------------------------------------------------------------------------

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """The loss of a batch. Trainers of TRL gather figures here in every step: an asynchronous learner keeps its own."""
        with self._alone() if model.training else contextlib.nullcontext():
            return super().compute_loss(model, *args, **kwargs)  # type: ignore[misc]

    def _track_num_input_tokens(self, inputs: Any) -> None:  # noqa: ANN401
        """With `include_num_input_tokens_seen` an asynchronous learner counts its own tokens."""
        with self._alone():
            super()._track_num_input_tokens(inputs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """In this block an asynchronous learner gathers nothing from others, and so does not wait for them."""
        trainer: Any = self
        with contextlib.ExitStack() as stack:
            for name in () if self.averaging.synchronous else ("gather", "gather_for_metrics"):
                stack.enter_context(replaced(trainer.accelerator, name, _own))
            yield

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Tensor,
        grad_norm: Tensor | float | None,
        *args: Any,  # noqa: ANN401
        learning_rate: float | None = None,
    ) -> None:
        """An asynchronous learner logs its own loss: Trainer would gather the losses of all, and so wait for the slowest."""
        if not self.averaging.synchronous:
            self._log_own_loss(tr_loss, grad_norm, learning_rate, start_time=args[-1])
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, learning_rate=learning_rate)  # type: ignore[misc]

    def _log_own_loss(
        self, total: Tensor, grad_norm: Tensor | float | None, learning_rate: float | None, start_time: float
    ) -> None:
        trainer: Any = self
        steps = trainer.state.global_step - trainer._globalstep_last_logged
        if not trainer.control.should_log or steps <= 0:
            return
        loss = total.item()
        total.zero_()
        trainer._total_loss_scalar += loss
        trainer._globalstep_last_logged = trainer.state.global_step  # so that Trainer does not log this step again
        rate = trainer._get_learning_rate() if learning_rate is None else learning_rate
        norm = {} if grad_norm is None else {"grad_norm": float(grad_norm)}
        trainer.log({"loss": loss / steps, "learning_rate": rate} | norm, start_time)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # noqa: ANN401
        """Save the state of this learner beside the mean model."""
        trainer: Any = self
        if self.learner is not None and not trainer.args.save_only_model:
            folder = Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{trainer.state.global_step}"
            os.makedirs(folder, exist_ok=True)
            torch.save(learner_state(self.learner), folder / self._own_file)
        super()._save_checkpoint(model, trial)  # type: ignore[misc]

    @property
    def _own_file(self) -> str:
        trainer: Any = self
        return f"learner-{trainer.args.process_index}.pt"


def _own(figures: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """What Accelerate gathers from one process."""
    return figures


class RoundelayTrainer(RoundelayMixin, Trainer):
    """Hugging Face's Trainer with a strategy of Roundelay; see `RoundelayMixin`."""
