"""What averaging costs with AdamW, and what another learning rate gains: all learners of one run in one process.

    python benchmarks/adamw.py --data FILE --learners 4 --rate 4e-3 --factor 2 --seeds 11 12 13

A small GPT on characters (2 layers of width 64, 110 k parameters), 600 steps, warm-up over a tenth of them, cosine decay,
clipping at 1.
`ddp` averages gradients; `averaging` replaces every learner's weights by their mean before each step; `dpsgd` and `adpsgd`
average on the random ring. `--factor` multiplies the rate of all but ddp. Prints one JSON row per run.
"""

from __future__ import annotations

import argparse
import json
import math
import time

import torch
from torch.nn.functional import cross_entropy

from roundelay.language.gpt import GPT
from roundelay.language.text import Text, read_text
from roundelay.topology import named

STRATEGIES = ("ddp", "averaging", "dpsgd", "adpsgd")
CONTEXT, BATCH, STEPS, WARMUP, BETA1, BETA2, EPS, DECAY, CLIP = 64, 8, 600, 0.1, 0.9, 0.99, 1e-8, 0.1, 1.0


class Learners:
    """The weights, gradients and moments of all learners, one row each."""

    def __init__(self, text: Text, learners: int, seed: int, strategy: str) -> None:
        torch.manual_seed(seed)
        self._text, self._strategy = text, strategy
        self._modules = [
            GPT(tokens=len(text.characters), context=CONTEXT, layers=2, width=64, heads=4) for _ in range(learners)
        ]
        shapes = [parameter.shape for parameter in self._modules[0].parameters()]
        self._sizes = [shape.numel() for shape in shapes]
        first = torch.cat([parameter.detach().flatten() for parameter in self._modules[0].parameters()])
        self.weights = first.expand(learners, -1).clone()
        self._gradients, self._m, self._v = (torch.zeros_like(self.weights) for _ in range(3))
        for module, *rows in zip(self._modules, self.weights, self._gradients, strict=True):
            weights, gradients = (row.split(self._sizes) for row in rows)
            for parameter, weight, gradient in zip(module.parameters(), weights, gradients, strict=True):
                parameter.data, parameter.grad = weight.view(parameter.shape), gradient.view(parameter.shape)
        decays = [torch.full((shape.numel(),), float(len(shape) > 1)) for shape in shapes]
        self._decay = DECAY * torch.cat(decays)
        self._draws = [torch.Generator().manual_seed(7919 * seed + learner) for learner in range(learners)]
        self._partners = torch.Generator().manual_seed(seed)
        self._ring = named("random-ring", learners, seed)

    def step(self, step: int, rate: float) -> None:
        """Every learner computes a gradient, averages its weights, and applies AdamW."""
        gradients = self._computed()
        if self._strategy == "ddp":
            gradients = gradients.mean(0, keepdim=True).expand_as(gradients)
        gradients = gradients * (CLIP / (gradients.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1)
        self._average(step)
        self._m.lerp_(gradients, 1 - BETA1)
        self._v.mul_(BETA2).addcmul_(gradients, gradients, value=1 - BETA2)
        self.weights.mul_(1 - rate * self._decay)
        root = (self._v / (1 - BETA2 ** (step + 1))).sqrt_().add_(EPS)
        self.weights.addcdiv_(self._m, root, value=-rate / (1 - BETA1 ** (step + 1)))

    def _computed(self) -> torch.Tensor:
        self._gradients.zero_()
        train = self._text.splits["train"]
        for module, draw in zip(self._modules, self._draws, strict=True):
            begins = torch.randint(len(train) - CONTEXT - 1, (BATCH, 1), generator=draw)
            pieces = train[begins + torch.arange(CONTEXT + 1)]
            cross_entropy(module(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten()).backward()
        return self._gradients

    def _average(self, step: int) -> None:
        if self._strategy == "averaging":
            self.weights.copy_(self.weights.mean(0, keepdim=True).expand_as(self.weights))
        elif self._strategy == "dpsgd":
            self.weights.copy_(torch.tensor(self._ring.matrix(step)).float() @ self.weights)
        elif self._strategy == "adpsgd":  # every learner in random order, each with a random neighbour
            count = len(self._modules)
            matrix = torch.tensor(self._ring.matrix(step))
            for one in torch.randperm(count, generator=self._partners).tolist():
                near = [other for other in range(count) if other != one and matrix[one, other] > 0]
                other = near[int(torch.randint(len(near), (1,), generator=self._partners))]
                part = (self.weights[one] - self.weights[other]) / 3
                self.weights[one] -= part
                self.weights[other] += part

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Of the mean model."""
        pieces = self._text.splits["valid"].unfold(0, CONTEXT + 1, CONTEXT)
        self.weights[0] = self.weights.mean(0)
        total = 0.0
        for batch in pieces.split(128):
            logits = self._modules[0](batch[:, :-1]).flatten(0, 1)
            total += cross_entropy(logits, batch[:, 1:].flatten()).item() * len(batch)
        return total / len(pieces)


def rate_at(step: int, rate: float) -> float:
    """Cosine decay from the first step on, times a linear warm-up."""
    done = step / STEPS
    return rate * 0.5 * (1 + math.cos(math.pi * done)) * min(1.0, (done + 1 / STEPS) / WARMUP)


def main() -> None:
    """Run every strategy with every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a text file")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--factor", type=float, default=1.0, help="multiplies the rate of all strategies but ddp")
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = Text.of(read_text(args.data))
    for seed in args.seeds:
        for strategy in args.strategies:
            begin = time.process_time()
            learners = Learners(text, args.learners, seed, strategy)
            factor = 1.0 if strategy == "ddp" else args.factor
            for step in range(STEPS):
                learners.step(step, factor * rate_at(step, args.rate))
            row = {"strategy": strategy, "learners": args.learners, "rate": args.rate, "factor": factor, "seed": seed}
            figures = {"valid_loss": round(learners.validation_loss(), 4), "cpu_s": round(time.process_time() - begin)}
            print(json.dumps(row | figures), flush=True)


if __name__ == "__main__":
    main()
