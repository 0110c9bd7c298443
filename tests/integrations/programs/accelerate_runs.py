"""Run with 2 processes: small loops of Accelerate. Each rank saves what it saw to the directory given."""

from __future__ import annotations

import contextlib
import runpy
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
    SAW["rate"] = optimizer.param_groups[0]["lr"]
    accelerator.free_memory()
    return accelerator, model


def counting(name):
    """Notes the bytes that reductions have sent."""

    def look(accelerator, learner, model) -> None:
        SAW[name] = learner.metrics()["bytes_sent"]

    return look


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


def refused() -> None:
    """Another engine; and a script that roundelay launch has started, of whose processes Accelerate knows nothing."""
    accelerator = Accelerator(cpu=True)
    before = accelerator.distributed_type
    for name, state in {
        "engine": {"distributed_type": type(before).DEEPSPEED},
        "launcher": {"distributed_type": before, "num_processes": 1},
    }.items():
        for key, value in state.items():
            setattr(accelerator.state, key, value)
        module = network()
        try:
            with averaging(accelerator, module, torch.optim.SGD(module.parameters(), lr=LR), roundelay.ADPSGD()):
                pass
        except roundelay.errors.RoundelayError as error:
            SAW[f"refused {name}"] = f"{type(error).__name__}: {error}"


def page() -> None:
    """The complete script of the page, as written. It comes first, because Accelerate keeps the state that it makes."""
    with contextlib.chdir(FOLDER):
        runpy.run_path("train.py", run_name="__main__")


def main() -> None:
    page()
    for accumulation in (1, 2):
        _, model = trained(accumulation=accumulation)
        SAW[f"ddp {accumulation}"], SAW[f"ddp {accumulation} rate"] = vector(model), SAW["rate"]
        for wrapped in (True, False):
            name = f"allreduce {accumulation} {wrapped}"
            _, model = trained(
                roundelay.Allreduce(), accumulation=accumulation, wrapped=wrapped, look=counting(f"bytes {name}")
            )
            SAW[name], SAW[f"{name} rate"] = vector(model), SAW["rate"]
    plain_dpsgd()
    _, model = trained(roundelay.ADPSGD(), accumulation=2)
    SAW["adpsgd"] = vector(model)
    try:
        trained(roundelay.ADPSGD(), look=lambda *_: 1 / 0)
    except ZeroDivisionError as error:
        SAW["raised"] = str(error)
    refused()
    torch.save(SAW, FOLDER / f"saw {torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main()
