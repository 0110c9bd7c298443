"""The strategy for Lightning's Trainer: the life of the learner, the mean model, checkpoints."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import DataLoader

from roundelay.errors import StrategyError
from roundelay.integrations.learner_state import learner_state, resume
from roundelay.integrations.lightning import loops
from roundelay.integrations.lightning.learner_files import LearnerFiles
from roundelay.integrations.lightning.processes import LearnerProcesses
from roundelay.learner import Learner
from roundelay.sampler import ElasticSampler
from roundelay.strategies.base import Strategy
from roundelay.strategies.registry import strategy_named

NAMES = {
    "roundelay_adpsgd": "adpsgd",
    "roundelay_dpsgd": "dpsgd",
    "roundelay_delay_by_one": "delay-by-one",
    "roundelay_local_sgd": "local-sgd",
    "roundelay_allreduce": "allreduce",
}


class RoundelayStrategy(LearnerProcesses):
    """Trains as Lightning's `ddp` does, but learners average as `averaging` says; the module is not wrapped.

    The learner exists from the start to the end of a `fit`. Checkpoints have the mean model of all learners, so saving one is a
    collective. Beside a checkpoint FILE, FILE.learners/RANK.ckpt has the state of each learner, from which `fit(ckpt_path=FILE)`
    continues exactly. At the end of `fit` every learner has the mean model.

    Raises StrategyError for an option that only DistributedDataParallel has, if the LightningModule has several optimizers, or if
    learners would wait for each other forever, because they take different numbers of steps.

    Args:
        averaging: a strategy of Roundelay, or its name, such as "adpsgd".
        evaluate: "consensus" validates the mean model of all learners, which is a collective; "own" validates each learner's own.
        options: see `processes.OPTIONS`; as DDPStrategy's.

    Attributes:
        learner: while `fit` trains; None before and after. `trainer.strategy.learner.metrics()` shows what it does.
    """

    def __init__(
        self,
        averaging: Strategy | str = "adpsgd",
        evaluate: Literal["consensus", "own"] = "consensus",
        **options: Any,  # noqa: ANN401
    ) -> None:
        if evaluate not in ("consensus", "own"):
            raise StrategyError(f"evaluate must be 'consensus' or 'own', got {evaluate!r}")
        self._averaging = strategy_named(averaging) if isinstance(averaging, str) else averaging
        super().__init__(**options)
        self._evaluates_consensus = evaluate == "consensus"
        self._consensus: contextlib.ExitStack | None = None  # while the module has the mean model
        self._sampler: ElasticSampler | None = None  # of the loader of training batches
        self._resumed_from: str | None = None
        self._writes = False  # this learner has written the last checkpoint

    @functools.cached_property
    def _files(self) -> LearnerFiles:
        return LearnerFiles(self.checkpoint_io, self.global_rank)

    # The life of the learner -----------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Hide the length of a loader with an ElasticSampler: how many batches a learner gets is not known before."""
        sampler = getattr(dataloader, "batch_sampler", None)
        if not (isinstance(dataloader, DataLoader) and isinstance(sampler, ElasticSampler)):
            return dataloader
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self._resumed_from is not None:
            self._files.load_sampler(self._resumed_from, sampler)
        sampler.set_epoch(
            trainer.fit_loop.epoch_progress.current.processed
        )  # Lightning does so after the first batch only
        self._sampler = sampler
        return loops.SharedLoader(dataloader, functools.partial(loops.save_although_no_step, trainer))

    def on_train_start(self) -> None:
        """Make the learner: now the module and the optimizer have what was restored."""
        assert self.lightning_module is not None
        if len(self.optimizers) != 1:
            raise StrategyError(
                f"a Learner hooks one optimizer, but configure_optimizers returned {len(self.optimizers)}; use one with "
                "parameter groups, or Lightning's ddp"
            )
        averaging = copy.deepcopy(self._averaging)  # so that a second fit begins anew
        loops.check(
            self.lightning_module.trainer,
            self._sampler,
            synchronous=averaging.synchronous,
            evaluates_consensus=self._evaluates_consensus,
        )
        self.learner = Learner(self.lightning_module, self.optimizers[0], averaging)
        if self._resumed_from is not None:
            resume(self.learner, self._files.load(self._resumed_from), self._files.folder(self._resumed_from))
            self._resumed_from = None

    def on_train_end(self) -> None:
        """Wait for the other learners; all of them end with the mean model."""
        assert self.learner is not None
        self.learner.finish()
        self.learner.settle()
        self.learner.close()
        self.learner = self._sampler = None

    def on_exception(self, exception: BaseException) -> None:
        """Leave at once; the other learners are told why."""
        self._leave_consensus()
        if self.learner is not None:
            learner, self.learner = self.learner, None
            learner.__exit__(type(exception), exception, exception.__traceback__)
        super().on_exception(exception)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """While gradients are accumulated, no reduction."""
        with self.learner.accumulate() if self.learner else contextlib.nullcontext():
            yield

    # The mean model --------------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """The module gets the mean model."""
        if self._evaluates_consensus:
            self._enter_consensus()

    def on_validation_end(self) -> None:
        """The module gets its own weights back. Lightning calls this after callbacks such as ModelCheckpoint."""
        self._leave_consensus()

    def _enter_consensus(self) -> None:
        if self.learner is not None and self._consensus is None:
            self._consensus = contextlib.ExitStack()
            self._consensus.enter_context(self.learner.consensus())

    def _leave_consensus(self) -> None:
        if self._consensus is not None:
            stack, self._consensus = self._consensus, None
            stack.close()

    @contextlib.contextmanager
    def _with_mean(self, *, mean: bool) -> Generator[None, None, None]:
        """In this block the module has the mean model, or its own weights, whatever it has outside."""
        before = self._consensus is not None
        self._enter_consensus() if mean else self._leave_consensus()
        try:
            yield
        finally:
            self._enter_consensus() if before else self._leave_consensus()

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the mean model. A collective while a learner trains; only learners that may save it keep the mean then."""
        if self.learner is None:
            return dict(super().lightning_module_state_dict())
        with self._with_mean(mean=True):
            state = super().lightning_module_state_dict()
            return dict(copy.deepcopy(state)) if self.is_global_zero or self.learner.elastic else dict(state)

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any = None,  # noqa: ANN401
    ) -> None:
        """Rank 0, or the first living learner, saves the checkpoint, and every learner its own state beside it."""
        if self.learner is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        writer, _, agreed = str(self.broadcast(f"{self.global_rank} {filepath}")).partition(" ")
        self._writes = writer == str(self.global_rank)
        self._files.agree(filepath, agreed)
        if self._writes:
            self.checkpoint_io.save_checkpoint(checkpoint, agreed, storage_options=storage_options)
        if "optimizer_states" in checkpoint:  # else only the model is saved
            with self._with_mean(mean=False):
                state = learner_state(self.learner)
            state |= {"sampler": self._sampler.state_dict()} if self._sampler is not None else {}
            self._files.save(agreed, state, storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove the checkpoint, and the states beside it; on each machine, since machines may have file systems of their own."""
        agreed = self._files.checkpoint(filepath)
        if self._writes:
            self.checkpoint_io.remove_checkpoint(agreed)
        if self._writes or self.local_rank == 0:
            self._files.remove(agreed)

    def load_checkpoint(
        self,
        checkpoint_path: str | Path,
        weights_only: bool | None = None,  # noqa: FBT001
    ) -> dict[str, Any]:
        """The checkpoint with the mean model. `fit` continues from the states beside it."""
        agreed = self._files.checkpoint(checkpoint_path)
        self._resumed_from = os.path.realpath(agreed)  # ModelCheckpoint(save_last="link") makes a link
        loaded: dict[str, Any] = super().load_checkpoint(agreed, weights_only)
        return loaded

    def teardown(self) -> None:
        """Forget a checkpoint that was loaded for an evaluation."""
        self._resumed_from = None
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:  # noqa: ANN401
        """Make the names known to `Trainer(strategy=...)`."""
        for name, averaging in NAMES.items():
            strategy_registry.register(name, cls, description=f"Roundelay: {averaging}", averaging=averaging)
