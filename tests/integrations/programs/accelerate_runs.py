"""Run with 2 processes: small loops of Accelerate. Each rank saves what it saw to the directory given."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

import roundelay
from roundelay.integrations.accelerate import averaging

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from regression import EPOCHS, LR, MOMENTUM, loader, network, vector

FOLDER = Path(sys.argv[1])
SAW: dict[str, object] = {}


def prepared(accelerator, *, wrapped=True):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    model = accelerator.prepare_model(model, evaluation_mode=not wrapped)
    return model, *accelerator.prepare(optimizer, loader(), scheduler)


def trained(strategy=None, *, accumulation=1, wrapped=True, look=lambda accelerator, learner, model: None):
    """Accelerate's usual loop, with DDP if there is no strategy."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model, optimizer, batches, scheduler = prepared(accelerator, wrapped=wrapped)
    block = averaging(accelerator, model, optimizer, strategy) if strategy else contextlib.nullcontext()
    with block as learner:
        for _ in range(EPOCHS):
            for x, y in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.mse_loss(model(x), y))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        look(accelerator, learner, model)
    accelerator.free_memory()
    return accelerator, model


def plain_dpsgd() -> None:
    """Without clipping and scheduler; looks at the learner's own weights and at the mean."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, batches, _ = prepared(accelerator)
    with averaging(accelerator, model, optimizer, roundelay.DPSGD("ring")) as learner:
        for _ in range(EPOCHS):
            for x, y in batches:
                optimizer.zero_grad()
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        SAW["dpsgd own"] = vector(learner.module)
        with learner.consensus() as mean:
            SAW["dpsgd mean"] = vector(mean)
            accelerator.save_model(mean, FOLDER / "mean")
            SAW["gathered"] = accelerator.gather_for_metrics(torch.tensor([accelerator.process_index]))
    SAW["dpsgd"] = vector(model)
    # DDP works again after the block: gradients are the mean of both processes.
    x, y = next(iter(batches))
    model.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    SAW["gradient after"] = torch.cat([weight.grad.flatten() for weight in model.parameters()])


def main() -> None:
    for accumulation in (1, 2):
        _, model = trained(accumulation=accumulation)
        SAW[f"ddp {accumulation}"] = vector(model)
        for wrapped in (True, False):
            _, model = trained(roundelay.Allreduce(), accumulation=accumulation, wrapped=wrapped)
            SAW[f"allreduce {accumulation} {wrapped}"] = vector(model)
    plain_dpsgd()
    _, model = trained(roundelay.ADPSGD(), accumulation=2)
    SAW["adpsgd"] = vector(model)
    try:
        trained(roundelay.ADPSGD(), look=lambda *_: 1 / 0)
    except ZeroDivisionError as error:
        SAW["raised"] = str(error)
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = type(accelerator.distributed_type).DEEPSPEED
    try:
        with averaging(accelerator, network(), None, roundelay.ADPSGD()):
            pass
    except roundelay.StrategyError as error:
        SAW["refused"] = str(error)
    torch.save(SAW, FOLDER / f"saw {accelerator.process_index}.pt")


if __name__ == "__main__":
    main()
