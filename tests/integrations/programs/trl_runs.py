"""Run with 2 processes: trainers of TRL with our mixin, on a tiny random model. Each rank saves what it saw."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import roundelay
from roundelay.integrations.transformers import RoundelayMixin

FOLDER = Path(sys.argv[1])
SAW: dict[str, object] = {}
WORDS, ROWS = 24, 32


class AveragedSFT(RoundelayMixin, SFTTrainer):
    """Fine-tuning."""


class AveragedDPO(RoundelayMixin, DPOTrainer):
    """Direct preference optimization: a second model, which is frozen."""


class AveragedReward(RoundelayMixin, RewardTrainer):
    """A model with another head."""


class Slow(AveragedSFT):
    """Process 1 is slow; notes when each step has ended."""

    def training_step(self, *args, **kwargs):
        time.sleep(0.1 * self.args.process_index)
        loss = super().training_step(*args, **kwargs)
        SAW.setdefault("times", []).append(time.time())
        return loss


def tokenizer():
    vocabulary = {"[PAD]": 0, "[EOS]": 1, "[UNK]": 2} | {f"w{i}": 3 + i for i in range(WORDS - 3)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")


def config():
    size = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(**size, **dropout, bos_token_id=1, eos_token_id=1, pad_token_id=0)


def model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(config())


def sentence(rng):
    return " ".join(f"w{i}" for i in torch.randint(0, WORDS - 3, (6,), generator=rng).tolist())


def pairs():
    rng = torch.Generator().manual_seed(1)
    rows = [
        {"prompt": sentence(rng), "chosen": " " + sentence(rng), "rejected": " " + sentence(rng)} for _ in range(ROWS)
    ]
    return Dataset.from_list(rows)


def texts():
    return pairs().map(lambda row: {"text": row["prompt"] + row["chosen"]}).select_columns(["text"])


def trained(kind, settings, data, module=None, *, averaging=None, **options):
    defaults = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "max_length": 24,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 2,
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "seed": 3,
    }
    args = settings(str(FOLDER / kind.__name__), **(defaults | options.pop("arguments", {})))
    chosen = {"averaging": averaging} if averaging else {}
    trainer = kind(
        model() if module is None else module,
        args=args,
        train_dataset=data,
        processing_class=tokenizer(),
        **chosen,
        **options,
    )
    trainer.train()
    return trainer


def vector(module):
    return torch.cat([weight.detach().flatten() for weight in module.parameters() if weight.requires_grad]).clone()


def main() -> None:
    SAW["ddp"] = vector(trained(SFTTrainer, SFTConfig, texts()).model)
    SAW["allreduce"] = vector(trained(AveragedSFT, SFTConfig, texts(), averaging=roundelay.Allreduce()).model)
    adapters = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    saving = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    trainer = trained(
        Slow,
        SFTConfig,
        texts(),
        averaging=roundelay.ADPSGD(),
        peft_config=adapters,
        eval_dataset=texts().select(range(4)),
        arguments=saving | {"gradient_accumulation_steps": 2},
    )
    SAW["sft"] = vector(trainer.model)
    SAW["sft logged"] = [entry for entry in trainer.state.log_history if "mean_token_accuracy" in entry]
    SAW["sft evaluated"] = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    trainer = trained(AveragedDPO, DPOConfig, pairs(), averaging=roundelay.ADPSGD(), ref_model=model())
    SAW["dpo"] = vector(trainer.model)
    SAW["dpo logged"] = [entry["rewards/margins"] for entry in trainer.state.log_history if "rewards/margins" in entry]
    torch.manual_seed(0)
    reward = config()
    reward.num_labels = 1
    ranked = pairs().select_columns(["prompt", "chosen", "rejected"])
    trainer = trained(
        AveragedReward, RewardConfig, ranked, GPT2ForSequenceClassification(reward), averaging=roundelay.DPSGD("ring")
    )
    SAW["reward"] = vector(trainer.model)
    torch.save(SAW, FOLDER / f"saw {torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main()
