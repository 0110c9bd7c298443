"""A task of your own: a small network classifies noisy sines by their frequency.

cd examples && roundelay train own_task:Sines --learners 4 --epochs 20 --out /tmp/sines
cd examples && roundelay train own_task:Sines --set settings.noise=1.0 --set data.batch=64 --set optimizer.lr=0.02
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import roundelay

LENGTH, CLASSES = 64, 4


@dataclass(frozen=True)
class SinesConfig(roundelay.TaskConfig):
    samples: int = 4000
    noise: float = 0.5


class Sines(roundelay.Task):
    Config = SinesConfig
    judged_by = "accuracy"

    def __len__(self):
        return self.config.samples

    def module(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return nn.Sequential(nn.Linear(LENGTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def batch(self, samples: Sequence[int], generator: torch.Generator):
        labels = torch.tensor(samples) % CLASSES
        return self._waves(labels, generator), labels

    def loss(self, module, batch):
        waves, labels = batch
        return cross_entropy(module(waves), labels)

    def evaluate(self, module, split, part=0, parts=1):
        labels = torch.arange(1000)[part::parts] % CLASSES
        generator = torch.Generator().manual_seed({"valid": 1, "test": 2}[split] + 10 * part)
        logits = module(self._waves(labels, generator))
        return {
            "samples": len(labels),
            "loss": float(cross_entropy(logits, labels, reduction="sum")),
            "accuracy": float((logits.argmax(1) == labels).sum()),
        }

    def _waves(self, labels, generator):
        phase = 2 * torch.pi * torch.rand(len(labels), 1, generator=generator)
        waves = torch.sin(phase + (labels[:, None] + 1) * torch.linspace(0, 2 * torch.pi, LENGTH))
        return waves + self.config.noise * torch.randn(waves.shape, generator=generator)
