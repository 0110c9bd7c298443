"""What averaging costs with AdamW, and what another learning rate gains: all learners of one run in one process.

    python benchmarks/adamw.py FILE --learners 4 --rates 4e-3 --factors 1 2 --seeds 21 22 23 --out adamw.json

A small GPT on the characters of a text (2 layers of width 64, 110 k parameters). A step has 32 pieces of 64 characters, shared
by all learners. torch's default betas, clipping at 1, warm-up over a tenth of the steps, cosine decay. `ddp` averages gradients
and has the rates as given; all others multiply them by each factor. `delay-by-one` averages all weights in each step, `dpsgd`
and `adpsgd` average on the random ring, `local-sgd` averages all weights once in 10 steps. Prints one JSON row per run, with
the loss of the mean model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from roundelay.language.gpt import GPT
from roundelay.language.text import Text, read_text
from roundelay.topology import named

STRATEGIES = ("ddp", "delay-by-one", "dpsgd", "adpsgd", "local-sgd")
CONTEXT, BATCH, WARMUP, BETA1, BETA2, EPS, DECAY, CLIP = 64, 32, 0.1, 0.9, 0.999, 1e-8, 0.1, 1.0
EVERY, OUTER_RATE, OUTER_MOMENTUM = 10, 0.7, 0.9  # of local-sgd


class Learners:
    """The weights, gradients and moments of all learners, one row each. With ddp all learners are equal: there is one row."""

    def __init__(self, text: Text, learners: int, seed: int, strategy: str) -> None:
        torch.manual_seed(seed)
        self._text, self._strategy, self._learners = text, strategy, learners
        rows = 1 if strategy == "ddp" else learners
        sizes = {"context": CONTEXT, "layers": 2, "width": 64, "heads": 4}
        self._modules = [GPT(tokens=len(text.characters), **sizes) for _ in range(rows)]
        shapes = [parameter.shape for parameter in self._modules[0].parameters()]
        first = torch.cat([parameter.detach().flatten() for parameter in self._modules[0].parameters()])
        self.weights = first.expand(rows, -1).clone()
        self._gradients, self._m, self._v = (torch.zeros_like(self.weights) for _ in range(3))
        for module, *row in zip(self._modules, self.weights, self._gradients, strict=True):
            weights, gradients = (each.split([shape.numel() for shape in shapes]) for each in row)
            for parameter, weight, gradient in zip(module.parameters(), weights, gradients, strict=True):
                parameter.data, parameter.grad = weight.view(parameter.shape), gradient.view(parameter.shape)
        self._decay = DECAY * torch.cat([torch.full((shape.numel(),), float(len(shape) > 1)) for shape in shapes])
        self._draws = [torch.Generator().manual_seed(7919 * seed + learner) for learner in range(learners)]
        self._partners = torch.Generator().manual_seed(seed)
        self._ring = named("random-ring", learners, seed)
        self._outer, self._outer_m = first.clone(), torch.zeros_like(first)

    def step(self, step: int, rate: float) -> None:
        """Every learner computes a gradient, averages its weights, and applies AdamW."""
        g = self._clipped_gradients()
        self._average(step)
        self._m.lerp_(g, 1 - BETA1)
        self._v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
        self.weights.mul_(1 - rate * self._decay)
        root = (self._v / (1 - BETA2 ** (step + 1))).sqrt_().add_(EPS)
        self.weights.addcdiv_(self._m, root, value=-rate / (1 - BETA1 ** (step + 1)))
        if self._strategy == "local-sgd" and (step + 1) % EVERY == 0:
            self._outer_step()

    def _clipped_gradients(self) -> Tensor:
        self._gradients.zero_()
        train = self._text.splits["train"]
        size = BATCH // self._learners, 1
        begins = [torch.randint(len(train) - CONTEXT - 1, size, generator=draw) for draw in self._draws]
        for module, own in zip(self._modules, torch.cat(begins).chunk(len(self._modules)), strict=True):
            pieces = train[own + torch.arange(CONTEXT + 1)]
            cross_entropy(module(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten()).backward()
        norms = self._gradients.norm(dim=1, keepdim=True)
        return self._gradients * (CLIP / (norms + 1e-6)).clamp(max=1)

    def _average(self, step: int) -> None:
        if self._strategy == "delay-by-one":
            self.weights.copy_(self.weights.mean(0, keepdim=True).expand_as(self.weights))
        elif self._strategy == "dpsgd":
            self.weights.copy_(torch.tensor(self._ring.matrix(step)).float() @ self.weights)
        elif self._strategy == "adpsgd":  # every learner in random order, each with a random neighbour
            matrix = torch.tensor(self._ring.matrix(step)).fill_diagonal_(0)
            for one in torch.randperm(self._learners, generator=self._partners).tolist():
                other = int(torch.multinomial(matrix[one], 1, generator=self._partners))
                part = (self.weights[one] - self.weights[other]) / 3
                self.weights[one] -= part
                self.weights[other] += part

    def _outer_step(self) -> None:
        """Delta = mean x - phi,  m <- mu m + Delta,  phi <- phi + eta (mu m + Delta),  x_i <- phi."""
        delta = self.weights.mean(0) - self._outer
        self._outer_m.mul_(OUTER_MOMENTUM).add_(delta)
        self._outer.add_(OUTER_MOMENTUM * self._outer_m + delta, alpha=OUTER_RATE)
        self.weights.copy_(self._outer.expand_as(self.weights))

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


def rate_at(done: float, rate: float) -> float:
    """Cosine decay from the first step on, times a linear warm-up; `done` is the share of the run that is over."""
    return rate * 0.5 * (1 + math.cos(math.pi * done)) * min(1.0, done / WARMUP)


def main() -> None:
    """Run every strategy with every rate, factor and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a text file")
    parser.add_argument("--learners", type=int, default=4, help="a divisor of 32")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rates", type=float, nargs="+", default=[4e-3])
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0], help="for all strategies but ddp")
    parser.add_argument("--seeds", type=int, nargs="+", default=[21, 22, 23])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--out", type=Path, help="rows are added to this JSON document after each run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = Text.of(read_text(args.text))
    for seed, rate, strategy in itertools.product(args.seeds, args.rates, args.strategies):
        for factor in [1.0] if strategy == "ddp" else args.factors:
            begin, learners = time.process_time(), Learners(text, args.learners, seed, strategy)
            for step in range(args.steps):
                learners.step(step, factor * rate_at((step + 1) / (args.steps + 1), rate))
            row = {"strategy": strategy, "learners": args.learners, "steps": args.steps, "rate": rate, "factor": factor}
            row |= {"seed": seed, "loss": round(learners.validation_loss(), 4)}
            print(json.dumps(row | {"cpu_s": round(time.process_time() - begin)}), flush=True)
            if args.out:
                add_row(args.out, row)


def add_row(path: Path, row: dict[str, object]) -> None:
    """Add a row to the document, which says by which commands, where and at which commit it was made."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout
    document = json.loads(path.read_text()) if path.exists() else {"commands": [], "rows": []}
    document |= {"machine": f"{platform.machine()}, one thread", "torch": torch.__version__, "commit": commit.strip()}
    command = f"python {' '.join(sys.argv)}"
    document["commands"] += [command] if command not in document["commands"] else []
    document["rows"].append(row)
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
