"""Run with 2 processes: small runs of Hugging Face's Trainer on a tiny random model. Each rank saves what it saw."""

from __future__ import annotations

import contextlib
import logging
import runpy
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback

import roundelay
from roundelay.integrations.transformers import RoundelayMixin, RoundelayTrainer

FOLDER = Path(sys.argv[1])
SAW: dict[str, object] = {}
SAMPLES = 32


def model(*, peft: bool = False):
    torch.manual_seed(0)
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    made = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=16, n_embd=16, n_layer=1, n_head=2, **options))
    if not peft:
        return made
    return get_peft_model(made, LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True))


def samples():
    rng = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 20, (SAMPLES, 8), generator=rng)
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(name: str, **options) -> TrainingArguments:
    defaults = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.5,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 3,
        "use_cpu": True,
        "seed": 3,
    }
    return TrainingArguments(output_dir=str(FOLDER / name), **(defaults | options))


def trained(name, averaging=None, module=None, *, resume=None, kind=RoundelayTrainer, **options):
    module = module if module is not None else model()
    data = samples()
    chosen = {"model": module, "args": arguments(name, **options), "train_dataset": data, "eval_dataset": data[:8]}
    trainer = kind(averaging=averaging, **chosen) if averaging else Trainer(**chosen)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def vector(module) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in module.parameters() if weight.requires_grad]).clone()


class Counting(RoundelayTrainer):
    """Counts the bytes that learners send, from the first batch on."""

    def training_step(self, *args, **kwargs):
        if self.state.global_step == 0:
            self.bytes_before = self.learner.metrics()["bytes_sent"]
        return super().training_step(*args, **kwargs)

    def _finalize_training(self, *args, **kwargs):
        self.bytes_sent = self.learner.metrics()["bytes_sent"] - self.bytes_before
        return super()._finalize_training(*args, **kwargs)


def as_ddp() -> None:
    kinds = {"plain": {}, "accumulated": {"gradient_accumulation_steps": 2}, "bfloat16": {"bf16": True}}
    for name, options in kinds.items():
        SAW[f"{name} ddp"] = vector(trained("ddp", **options).model)
        trainer = trained("allreduce", roundelay.Allreduce(), kind=Counting, **options)
        SAW[f"{name} allreduce"], SAW[f"{name} bytes"] = vector(trainer.model), trainer.bytes_sent
        SAW[f"{name} wrapped"] = trainer.model_wrapped is not trainer.model


class Watch(TrainerCallback):
    """Notes the weights at each evaluation, and whether they are back afterwards."""

    def __init__(self) -> None:
        self.evaluated, self.own = [], []

    def on_step_end(self, args, state, control, model=None, **_):
        self.own.append(vector(model))

    def on_prediction_step(self, args, state, control, model=None, **_):
        self.evaluated.append(vector(self.model))


def dpsgd() -> None:
    """Evaluation and checkpoints on the mean; resumed in the middle."""
    options = {"save_strategy": "epoch", "eval_strategy": "epoch", "max_grad_norm": 1.0}
    watch = Watch()

    class Watched(RoundelayTrainer):
        def __init__(self, **kwargs):
            super().__init__(callbacks=[watch], **kwargs)
            watch.model = self.model

    trainer = trained("dpsgd", roundelay.DPSGD("ring"), kind=Watched, **options)
    SAW["dpsgd"], SAW["own"], SAW["evaluated"] = vector(trainer.model), watch.own, watch.evaluated
    SAW["losses"] = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    SAW["evaluated again"] = trainer.evaluate()["eval_loss"]
    first = FOLDER / "dpsgd" / "checkpoint-8"
    torch.manual_seed(9)
    trainer = trained("resumed", roundelay.DPSGD("ring"), resume=str(first), **options)
    SAW["resumed"], SAW["resumed steps"] = vector(trainer.model), trainer.state.global_step
    trainer.accelerator.wait_for_everyone()
    (first / f"learner-{trainer.args.process_index}.pt").unlink()
    trainer = trained("resumed", roundelay.DPSGD("ring"), resume=str(first), **options)
    SAW["resumed from the mean"] = vector(trainer.model)


def best() -> None:
    """The first checkpoint is the best one: the learning rate is far too large."""
    options = {
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "load_best_model_at_end": True,
        "save_total_limit": 2,
    }
    trainer = trained("best", roundelay.DPSGD("ring"), learning_rate=5.0, lr_scheduler_type="constant", **options)
    SAW["best"], SAW["best checkpoint"] = vector(trainer.model), trainer.state.best_model_checkpoint
    SAW["best predicted"] = trainer.predict(samples()[:4]).metrics["test_loss"]
    trainer.save_model(str(FOLDER / "saved"))
    with mock.patch("transformers.trainer.hf_api") as hub:
        trainer.push_to_hub()
    SAW["pushed"] = [call.kwargs["folder_path"] for call in hub().upload_folder.call_args_list]


def adpsgd() -> None:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("roundelay").addHandler(handler)
    logging.getLogger("roundelay").setLevel(logging.INFO)

    class Own(Trainer):
        """A user's own subclass."""

    class OwnAveraged(RoundelayMixin, Own):
        """Process 1 is slow."""

        def training_step(self, *args, **kwargs):
            time.sleep(0.05 * self.args.process_index)
            SAW.setdefault("times", []).append(time.time())
            return super().training_step(*args, **kwargs)

    options = {"gradient_accumulation_steps": 2, "num_train_epochs": 1, "logging_steps": 2}
    options |= {"include_num_input_tokens_seen": True}
    trainer = trained("adpsgd", "adpsgd", kind=OwnAveraged, **options)
    SAW["adpsgd"], SAW["adpsgd steps"] = vector(trainer.model), trainer.state.global_step
    SAW["tokens"] = trainer.state.num_input_tokens_seen
    SAW["logged"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    module = model(peft=True)
    frozen = [value.clone() for value in module.parameters() if not value.requires_grad]
    trainer = trained("peft", roundelay.ADPSGD(), module, save_strategy="steps", save_steps=5)
    SAW["peft"] = vector(trainer.model)
    kept = [value for value in module.parameters() if not value.requires_grad]
    SAW["frozen kept"] = all(map(torch.equal, frozen, kept))
    SAW["told"] = [message for message in told if "average" in message]
    SAW["peft bytes"] = trained("peft", roundelay.Allreduce(), model(peft=True), kind=Counting).bytes_sent


def failing() -> None:
    class Failing(RoundelayTrainer):
        def training_step(self, *args, **kwargs):
            if self.state.global_step == 3 and self.args.process_index == 1:
                raise ZeroDivisionError("this batch is bad")
            return super().training_step(*args, **kwargs)

    try:
        trained("failing", roundelay.DPSGD(), kind=Failing)
    except Exception as error:
        SAW["failure"] = f"{type(error).__name__}: {error}"


def page() -> None:
    """The complete script of the page, as written."""
    with contextlib.chdir(FOLDER):
        runpy.run_path("train.py", run_name="__main__")


if __name__ == "__main__":
    for run in (page, as_ddp, dpsgd, best, adpsgd, failing):
        run()
    torch.save(SAW, FOLDER / f"saw {torch.distributed.get_rank()}.pt")
