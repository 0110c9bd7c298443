"""Accelerate: `with averaging(accelerator, model, optimizer, roundelay.ADPSGD()) as learner:` around the training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from roundelay.errors import LaunchError, MissingExtraError, StrategyError
from roundelay.learner import Learner
from roundelay.strategies.base import Strategy

try:
    from accelerate import Accelerator
except ImportError as error:
    raise MissingExtraError("training with Accelerate", "accelerate") from error

ENGINES = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")  # these engines own the weights or the optimizer


@contextlib.contextmanager
def averaging(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, strategy: Strategy
) -> Iterator[Learner]:
    """Learners average as `strategy` says, in this block. At its end all of them have the mean model.

    In the block the DistributedDataParallel that `prepare` has put around the model does nothing: calls go to the module inside.
    `accelerator.accumulate(model)`, `clip_grad_norm_`, `gather_for_metrics` and prepared schedulers work as usual. To evaluate
    or save the mean model in the middle of training, all processes enter `with learner.consensus() as mean:`.

    Raises StrategyError if DeepSpeed, FSDP or another engine owns the weights, LaunchError if Accelerate does not know of all
    learners.

    Args:
        accelerator: the Accelerator that has prepared the model and the optimizer.
        model: as `prepare` has returned it, or without DistributedDataParallel.
        optimizer: as `prepare` has returned it.
        strategy: how learners average.
    """
    engine = accelerator.distributed_type.name
    if engine in ENGINES:
        raise StrategyError(
            f"Accelerate trains with {engine}, which owns the weights; averaging() needs plain data parallelism "
            "(MULTI_GPU, MULTI_CPU). For sharded models use fully_shard and a Learner"
        )
    with (
        bypassed(model) as module,
        Learner(module, optimizer, strategy) as learner,
        replaced(model, "no_sync", learner.accumulate),
    ):
        check_processes(learner, accelerator.num_processes, "Accelerate")
        yield learner
        learner.finish()
        learner.settle()


def check_processes(learner: Learner, processes: int, library: str) -> None:
    """Raise LaunchError if the library does not know of all learners: then each process would train on all samples."""
    if learner.transport.size != processes:
        raise LaunchError(
            f"{library} knows of {processes} of the {learner.transport.size} learners. Start the script with torchrun or "
            "accelerate launch, not with roundelay launch. Without GPUs, say so: Accelerator(cpu=True), or "
            "TrainingArguments(use_cpu=True)"
        )


@contextlib.contextmanager
def bypassed(model: nn.Module) -> Iterator[nn.Module]:
    """The module inside a DistributedDataParallel, to which calls of the latter go directly in this block."""
    if not isinstance(model, DistributedDataParallel):
        yield model
        return
    with replaced(model, "forward", model.module.__call__):
        yield model.module


@contextlib.contextmanager
def replaced(target: object, name: str, value: object) -> Iterator[None]:
    """In this block the attribute `name` of this one object is `value`."""
    setattr(target, name, value)
    try:
        yield
    finally:
        delattr(target, name)
