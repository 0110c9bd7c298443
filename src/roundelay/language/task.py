"""The training task of a character language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from roundelay.errors import ConfigError, unknown
from roundelay.language.gpt import GPT
from roundelay.language.text import Text, read_text
from roundelay.training.config import TaskConfig, at_least, fraction
from roundelay.training.task import Task

EVALUATION_BATCH = 32
SAMPLE_LENGTH = 400  # characters


@dataclass(frozen=True)
class CharactersConfig(TaskConfig):
    """Settings of `Characters`. 12 layers of width 768 are those of GPT-2: 85 million parameters without its vocabulary.

    Attributes:
        data: a text file, or a folder with shakespeare.txt; empty: $ROUNDELAY_DATA.
        layers: transformer blocks.
        width: numbers per character; a multiple of `heads`.
        heads: attention heads.
        context: characters that a prediction looks at.
        dropout: share of activations that is dropped in training.
    """

    data: str = ""
    layers: int = at_least(1, 4)
    width: int = at_least(1, 128)
    heads: int = at_least(1, 4)
    context: int = at_least(1, 128)
    dropout: float = fraction(0.0)


class Characters(Task):
    """Predict every character of a text from those before it. A sample is a piece of `context` characters.

    Training pieces begin at random places, one in each `context` characters, so an epoch sees about every character once.
    """

    Config = CharactersConfig
    judged_by = "-loss"
    config: CharactersConfig

    def __init__(self, config: CharactersConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.text = Text.of(read_text(config.data, config.context))

    @classmethod
    def check(cls, config: CharactersConfig) -> None:
        """Raise ConfigError unless heads divide the width."""
        if config.width % config.heads:
            raise ConfigError(f"settings.width {config.width} must be a multiple of settings.heads {config.heads}")

    @classmethod
    def check_data(cls, config: CharactersConfig) -> None:
        """Raise DataError unless the text is there, can be read and is long enough."""
        read_text(config.data, config.context)

    def __len__(self) -> int:
        return (len(self.text.splits["train"]) - 1) // self.config.context

    def module(self) -> nn.Module:
        """A GPT."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            sizes = self.config
            return GPT(
                tokens=len(self.text.characters),
                context=sizes.context,
                layers=sizes.layers,
                width=sizes.width,
                heads=sizes.heads,
                dropout=sizes.dropout,
            )

    def batch(self, samples: Sequence[int], generator: torch.Generator) -> Tensor:
        """Pieces (B, context + 1). Each begins up to `context` characters away from the place that its number gives."""
        context, numbers = self.config.context, self.text.splits["train"]
        shifts = torch.randint(context, (len(samples),), generator=generator)
        starts = (torch.tensor(samples) * context + shifts).clamp_(max=len(numbers) - context - 1)
        return numbers[starts[:, None] + torch.arange(context + 1)]

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        """Mean cross-entropy of the next character, in nats."""
        return _cross_entropy(module, batch).mean()

    def evaluate(self, module: nn.Module, split: str, part: int = 0, parts: int = 1) -> dict[str, float]:
        """Sums over the consecutive pieces of a split. The loss of a piece is its mean loss per character."""
        if split not in ("valid", "test"):
            raise ConfigError(unknown("split", split, ("valid", "test")))
        context, numbers = self.config.context, self.text.splits[split]
        pieces = numbers.unfold(0, context + 1, context)[part::parts]
        device = next(module.parameters()).device
        losses = [_cross_entropy(module, batch.to(device)) for batch in pieces.split(EVALUATION_BATCH)]
        return {"samples": float(len(pieces)), "loss": float(torch.cat(losses).double().sum() / context)}

    def parameter_groups(self, module: nn.Module) -> list[dict[str, Any]]:
        """Weight decay for matrices only, not for LayerNorm and biases."""
        weights = list(module.parameters())
        return [
            {"params": [weight for weight in weights if weight.dim() > 1]},
            {"params": [weight for weight in weights if weight.dim() <= 1], "weight_decay": 0.0},
        ]

    def describe(self, mean: nn.Module) -> dict[str, Any]:
        """A text that the mean model writes."""
        assert isinstance(mean, GPT)
        start = self.text.splits["valid"][:1].to(next(mean.parameters()).device)
        generator = torch.Generator().manual_seed(self.seed)
        return {"sample": self.text.decode(mean.generate(start, SAMPLE_LENGTH, generator))}


def _cross_entropy(module: nn.Module, pieces: Tensor) -> Tensor:
    """Cross-entropy (B * T,) of every character but the first of each piece."""
    logits = module(pieces[:, :-1])
    return cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten(), reduction="none")
