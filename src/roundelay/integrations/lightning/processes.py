"""Lightning's processes without DistributedDataParallel, and its collectives when learners may be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from roundelay.errors import StrategyError, unknown
from roundelay.integrations.lightning.environment import ElasticEnvironment
from roundelay.learner import Learner
from roundelay.transport.collectives import NEVER, backends

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
PLAIN = str | bool | int | float | None  # what travels through the rendezvous
OPERATIONS: dict[str, Callable[[Tensor, int], Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


class LearnerProcesses(DDPStrategy):
    """One process per learner, started as for Lightning's `ddp`; the module is not wrapped.

    In an elastic run, while a learner trains, Lightning's barriers, broadcasts and reductions are among the living learners.
    Everything else uses Lightning's process group, which fails when a process is lost.

    Raises StrategyError for an option that only DistributedDataParallel has.

    Args:
        options: see `OPTIONS`; as DDPStrategy's.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401
        for option in options.keys() - set(OPTIONS):
            raise StrategyError(unknown("option of RoundelayStrategy", option, OPTIONS))
        if ElasticEnvironment.detect():
            options = {"cluster_environment": ElasticEnvironment()} | options
        super().__init__(**({"timeout": NEVER} | options))  # learners may come to a meeting at very different times
        self.learner: Learner | None = None

    def configure_ddp(self) -> None:
        """Leave the module as it is."""

    def setup_distributed(self) -> None:
        """Form the process group: through the rendezvous if there is one, else as Lightning does."""
        if isinstance(self.cluster_environment, ElasticEnvironment):
            self.cluster_environment.form_process_group(self._get_process_group_backend(), self._timeout)
        super().setup_distributed()

    def _get_process_group_backend(self) -> str:
        """One backend for each kind of tensor, because exchanges go through host memory."""
        return self._process_group_backend or backends(self.root_device.type)

    # Collectives -----------------------------------------------------------------------------------------------------

    def gathered(self, value: object) -> list[Any] | None:
        """In an elastic run, the values of all living learners in order of their ids; else None. A collective."""
        if self.learner is None or not self.learner.elastic:
            return None
        return [each for _, each in sorted(self.learner.gather(value).items())]

    def barrier(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Wait for all learners."""
        if self.gathered(None) is None:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:  # noqa: ANN401
        """What rank 0 has, or the first living learner."""
        values = self.gathered(obj) if isinstance(obj, PLAIN) else None
        return super().broadcast(obj, src) if values is None else values[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:  # noqa: ANN401
        """The mean or the sum over learners, or another reduction that Lightning knows."""
        values = self.gathered(tensor.tolist()) if isinstance(tensor, Tensor) else None
        if values is None:
            return super().reduce(tensor, group, reduce_op)
        name = str(reduce_op).rpartition(".")[2].lower()
        stacked = torch.tensor(values, dtype=tensor.dtype, device=tensor.device)
        if name in ("mean", "avg"):
            return (stacked.sum(0) / len(values)).to(tensor.dtype)
        return OPERATIONS[name](stacked, 0)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: FBT001, FBT002
        """Whether all learners say yes, or any of them."""
        values = self.gathered(bool(decision))
        if values is None:
            return bool(super().reduce_boolean_decision(decision, all))
        return sum(values) == len(values) if all else any(values)
