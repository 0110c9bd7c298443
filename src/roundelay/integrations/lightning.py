"""Lightning: `Trainer(strategy="roundelay_adpsgd", devices=4)`. Importing this module registers the strategies."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.utils.data import DataLoader

from roundelay.errors import MissingExtraError, StrategyError, unknown
from roundelay.learner import Learner
from roundelay.sampler import ElasticSampler
from roundelay.strategies.base import Strategy
from roundelay.strategies.registry import strategy_named
from roundelay.transport.collectives import NEVER
from roundelay.weights.serialization import snapshot

try:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint, Timer
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.utilities.exceptions import SIGTERMException
except ImportError as error:
    raise MissingExtraError("training with Lightning", "lightning") from error

log = logging.getLogger("roundelay")

NAMES = {
    "roundelay_adpsgd": "adpsgd",
    "roundelay_dpsgd": "dpsgd",
    "roundelay_delay_by_one": "delay-by-one",
    "roundelay_local_sgd": "local-sgd",
    "roundelay_allreduce": "allreduce",
}
OPTIONS = (  # of DDPStrategy; its other options are about DistributedDataParallel
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "timeout",
    "start_method",
)


class RoundelayStrategy(DDPStrategy):
    """Trains as Lightning's `ddp` does, but learners average as `averaging` says; the module is not wrapped.

    The learner exists from the start to the end of a `fit`. Checkpoints have the mean model of all learners, so saving one is a
    collective. Beside a checkpoint FILE, FILE.learners/RANK.ckpt has the state of each learner, from which `fit(ckpt_path=FILE)`
    continues exactly. At the end of `fit` every learner has the mean model.

    Raises StrategyError for an option that only DistributedDataParallel has, or if the LightningModule has several optimizers.

    Args:
        averaging: a strategy of Roundelay, or its name, such as "adpsgd".
        evaluate: "consensus" validates the mean model of all learners, which is a collective; "own" validates each learner's own.
        options: see `OPTIONS`; as DDPStrategy's.
    """

    def __init__(
        self,
        averaging: Strategy | str = "adpsgd",
        evaluate: Literal["consensus", "own"] = "consensus",
        **options: Any,  # noqa: ANN401
    ) -> None:
        if evaluate not in ("consensus", "own"):
            raise StrategyError(f"evaluate must be 'consensus' or 'own', got {evaluate!r}")
        for option in options.keys() - set(OPTIONS):
            raise StrategyError(unknown("option of RoundelayStrategy", option, OPTIONS))
        super().__init__(**({"timeout": NEVER} | options))  # learners may come to a meeting at very different times
        self._averaging = strategy_named(averaging) if isinstance(averaging, str) else averaging
        self._evaluates_consensus = evaluate == "consensus"
        self._learner: Learner | None = None
        self._consensus: contextlib.ExitStack | None = None  # while the module has the mean model
        self._resumed_from: str | None = None

    # No DistributedDataParallel --------------------------------------------------------------------------------------

    def configure_ddp(self) -> None:
        """Leave the module as it is."""

    def _get_process_group_backend(self) -> str:
        """One backend for each kind of tensor, because exchanges go through host memory."""
        default = "cpu:gloo,cuda:nccl" if self.root_device.type == "cuda" else "gloo"
        return self._process_group_backend or default

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """While gradients are accumulated, no reduction."""
        with self._learner.accumulate() if self._learner else contextlib.nullcontext():
            yield

    def process_dataloader(self, dataloader: object) -> object:
        """Hide the length of a loader with an ElasticSampler: how many batches a learner gets is not known before."""
        shared = isinstance(getattr(dataloader, "batch_sampler", None), ElasticSampler)
        return _Unlimited(dataloader) if shared and isinstance(dataloader, DataLoader) else dataloader

    # The life of the learner -----------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Make the learner: now the module and the optimizer have what was restored."""
        assert self.lightning_module is not None
        if len(self.optimizers) != 1:
            raise StrategyError(
                f"a Learner hooks one optimizer, but configure_optimizers returned {len(self.optimizers)}; use one with "
                "parameter groups, or Lightning's ddp"
            )
        averaging = copy.deepcopy(self._averaging)  # so that a second fit begins anew
        if not averaging.synchronous:
            _stop_meetings(self.lightning_module.trainer)
            _warn_of_meetings(self.lightning_module.trainer)
        self._learner = Learner(self.lightning_module, self.optimizers[0], averaging)
        if self._resumed_from is not None:
            self._resume(self._learner, self._resumed_from)
            self._resumed_from = None

    def on_train_end(self) -> None:
        """Wait for the other learners; all of them end with the mean model."""
        assert self._learner is not None
        self._learner.finish()
        self._learner.settle()
        self._learner.close()
        self._learner = None

    def on_exception(self, exception: BaseException) -> None:
        """Leave at once; the other learners are told why."""
        self._leave_consensus()
        if self._learner is not None:
            learner, self._learner = self._learner, None
            learner.__exit__(type(exception), exception, exception.__traceback__)
        super().on_exception(exception)

    # The mean model --------------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """The module gets the mean model."""
        if self._evaluates_consensus:
            self._enter_consensus()

    def on_validation_end(self) -> None:
        """The module gets its own weights back. Lightning calls this after callbacks such as ModelCheckpoint."""
        self._leave_consensus()

    def _enter_consensus(self) -> None:
        if self._learner is not None and self._consensus is None:
            self._consensus = contextlib.ExitStack()
            self._consensus.enter_context(self._learner.consensus())

    def _leave_consensus(self) -> None:
        if self._consensus is not None:
            stack, self._consensus = self._consensus, None
            stack.close()

    @contextlib.contextmanager
    def _with_mean(self, *, mean: bool) -> Generator[nn.Module, None, None]:
        """In this block the module has the mean model, or its own weights, whatever it has outside."""
        assert self.lightning_module is not None
        before = self._consensus is not None
        self._enter_consensus() if mean else self._leave_consensus()
        try:
            yield self.lightning_module
        finally:
            self._enter_consensus() if before else self._leave_consensus()

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the mean model. A collective while a learner trains; only rank 0 gets the mean then."""
        if self._learner is None:
            return dict(super().lightning_module_state_dict())
        with self._with_mean(mean=True):
            state = super().lightning_module_state_dict()
            return dict(copy.deepcopy(state)) if self.is_global_zero else dict(state)

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any = None,  # noqa: ANN401
    ) -> None:
        """Rank 0 saves the checkpoint, every learner its own state beside it."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._learner is None or "optimizer_states" not in checkpoint:  # only the model is saved
            return
        with self._with_mean(mean=False) as module:
            state = {"learners": self.world_size, "learner": self._learner.state_dict()}
            state |= {"module": module.state_dict(), "optimizer": self.optimizers[0].state_dict()}
            self.checkpoint_io.save_checkpoint(snapshot(state), self._own_file(filepath), storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove the checkpoint, and the states beside it; on each machine, since machines may have file systems of their own."""
        super().remove_checkpoint(filepath)
        if self.local_rank == 0:
            self.checkpoint_io.remove_checkpoint(_folder_of(filepath))

    def load_checkpoint(
        self,
        checkpoint_path: str | Path,
        weights_only: bool | None = None,  # noqa: FBT001
    ) -> dict[str, Any]:
        """The checkpoint with the mean model. `fit` continues from the states beside it."""
        self._resumed_from = os.path.realpath(checkpoint_path)  # ModelCheckpoint(save_last="link") makes a link
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return loaded

    def _resume(self, learner: Learner, filepath: str) -> None:
        """Continue from this learner's state beside the checkpoint if every learner has one; else from the mean."""
        own = Path(self._own_file(filepath))
        state = self.checkpoint_io.load_checkpoint(own, weights_only=True) if own.is_file() else {}
        if not self.reduce_boolean_decision(state.get("learners") == self.world_size):
            log.warning(
                "learner %d begins with the mean model: not all learners have a state in %s",
                self.global_rank,
                own.parent,
            )
            return
        learner.module.load_state_dict(state["module"])
        self.optimizers[0].load_state_dict(state["optimizer"])
        learner.load_state_dict(state["learner"])

    def _own_file(self, filepath: str | Path) -> str:
        return f"{_folder_of(filepath)}/{self.global_rank}.ckpt"

    def teardown(self) -> None:
        """Forget a checkpoint that was loaded for an evaluation."""
        self._resumed_from = None
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:  # noqa: ANN401
        """Make the names known to `Trainer(strategy=...)`."""
        for name, averaging in NAMES.items():
            strategy_registry.register(name, cls, description=f"Roundelay: {averaging}", averaging=averaging)


class _Unlimited:
    """A loader without a length, so that an epoch ends when the loader does."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


def _folder_of(filepath: str | Path) -> str:
    """The folder of the learners' states beside a checkpoint."""
    return f"{filepath}.learners"


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
    for callback in trainer.callbacks:
        timed = isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None
        if timed or (isinstance(callback, Timer) and callback._duration is not None):
            log.warning(
                "%s makes all learners wait for rank 0 after every batch, so a slow learner delays the others. Use "
                "every_n_train_steps or max_steps instead of a time",
                "ModelCheckpoint(train_time_interval=...)" if timed else "Timer",
            )


RoundelayStrategy.register_strategies(StrategyRegistry)
