"""What averaging weights costs with AdamW, and what closes the gap: a small character GPT, all learners in one process.

    python benchmarks/adamw_gap.py ../shared/data/shakespeare.txt --learners 4 --seeds 0 1 2

Each learner draws its own batches and keeps its own AdamW. Weights are averaged over a topology after every step; `ddp` averages
gradients instead. The table is the validation loss of the mean model after equal numbers of samples.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from roundelay.language.gpt import GPT
from roundelay.language.text import Text, read_text
from roundelay.topology import named

BETA1, BETA2, EPS, DECAY, CLIP = 0.9, 0.999, 1e-8, 0.1, 1.0
SKETCH = 64  # numbers per tensor
SIZES = {"layers": 2, "width": 64, "heads": 4, "context": 64}

Correction = Callable[["Run", list[Tensor], Tensor], list[Tensor]]
"""(run, gradients by tensor (learners, ...), step) -> the part of g^2 by tensor (learners,) that goes into v."""


class Run:
    """n learners, stacked: every tensor has the learners as its first axis."""

    def __init__(self, text: Text, n: int, args: argparse.Namespace, seed: int) -> None:
        torch.manual_seed(seed)
        self.n, self.text, self.args = n, text, args
        self.model = GPT(tokens=len(text.characters), **SIZES)
        self.x = {name: w.detach().expand(n, *w.shape).clone() for name, w in self.model.named_parameters()}
        self.m, self.v = ([torch.zeros_like(w) for w in self.x.values()] for _ in range(2))
        self.generator = torch.Generator().manual_seed(1000 + seed)
        self.gradients = vmap(grad_and_value(self._loss))
        self.averages: dict[str, list[Tensor]] = {}

    def _loss(self, weights: dict[str, Tensor], pieces: Tensor) -> Tensor:
        logits = functional_call(self.model, weights, (pieces[:, :-1],))
        return cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())

    def batch(self) -> Tensor:
        context, numbers = SIZES["context"], self.text.splits["train"]
        starts = torch.randint(len(numbers) - context - 1, (self.n, self.args.batch, 1), generator=self.generator)
        return numbers[starts + torch.arange(context + 1)]

    def step(self, k: int, correction: Correction | None, mix: Callable[[int], Tensor] | None) -> None:
        """One step of every learner, then X <- W_k X. Without a mixing, gradients are averaged: DDP."""
        with sdpa_kernel(SDPBackend.MATH):  # vmap knows no other one
            gradients, _ = self.gradients(self.x, self.batch())
        g = list(gradients.values())
        if mix is None:
            g = [each.mean(0, keepdim=True).expand_as(each).clone() for each in g]
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in g]).norm(dim=0)
        factor = (CLIP / (norms + 1e-6)).clamp(max=1.0)
        g = [each * _like(factor, each) for each in g]
        shares = correction(self, g, torch.tensor(float(k + 1))) if correction else [torch.ones(self.n)] * len(g)
        lr = self.args.lr * 0.5 * (1 + math.cos(math.pi * k / self.args.steps))
        for weight, m, v, each, share in zip(self.x.values(), self.m, self.v, g, shares, strict=True):
            m.lerp_(each, 1 - BETA1)
            v.mul_(BETA2).addcmul_(each, each * _like(share, each), value=1 - BETA2)
            denominator = (v / (1 - BETA2 ** (k + 1))).sqrt_().add_(EPS)
            if weight.dim() > 2:
                weight.mul_(1 - lr * DECAY)
            weight.addcdiv_(m, denominator, value=-lr / (1 - BETA1 ** (k + 1)))
        if mix is not None:
            W = mix(k).float()
            for weight in self.x.values():
                weight.copy_((W @ weight.flatten(1)).view_as(weight))

    @torch.no_grad()
    def valid_loss(self) -> float:
        """Of the mean model, on the whole validation part."""
        context, numbers = SIZES["context"], self.text.splits["valid"]
        pieces = numbers.unfold(0, context + 1, context)
        mean = {name: weight.mean(0) for name, weight in self.x.items()}
        losses = [self._loss(mean, batch).item() * len(batch) for batch in pieces.split(128)]
        return sum(losses) / len(pieces)

    def average(self, name: str, values: list[Tensor]) -> list[Tensor]:
        """Running mean with Adam's beta2, corrected for its start."""
        kept = self.averages.setdefault(name, [torch.zeros_like(value) for value in values])
        torch._foreach_lerp_(kept, values, 1 - BETA2)
        return kept


def _like(per_learner: Tensor, tensor: Tensor) -> Tensor:
    return per_learner.view(-1, *[1] * (tensor.dim() - 1))


def _dots(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    return [(x * y).flatten(1).sum(1) for x, y in zip(a, b, strict=True)]


def _kept_share(run: Run, noise: list[Tensor], total: list[Tensor]) -> list[Tensor]:
    """1 - (1 - 1/n) N / (S + N), at least 1/n: v of DDP over v of one learner, if noise is independent."""
    n = run.n
    return [(1 - (1 - 1 / n) * N / (T + 1e-30)).clamp(1 / n, 1.0) for N, T in zip(noise, total, strict=True)]


def oracle(run: Run, g: list[Tensor], k: Tensor) -> list[Tensor]:
    """The true ratio per tensor, from the mean gradient of all learners."""
    means = [each.mean(0, keepdim=True).expand_as(each) for each in g]
    mean2, own2 = run.average("mean2", _dots(means, means)), run.average("own2", _dots(g, g))
    return [(a / (b + 1e-30)).clamp(1 / run.n, 1.0) for a, b in zip(mean2, own2, strict=True)]


def sketch(run: Run, g: list[Tensor], k: Tensor) -> list[Tensor]:
    """S from g_i . g_j of one neighbour j, through `SKETCH` random sums of each tensor: small enough to ride on exchanges."""
    generator = torch.Generator().manual_seed(int(k))
    sketches = []
    for each in g:
        flat = torch.nn.functional.pad(each.flatten(1), (0, -each[0].numel() % SKETCH))
        signs = torch.randint(2, flat.shape[1:], generator=generator) * 2.0 - 1.0
        sketches.append((flat * signs).view(run.n, -1, SKETCH).sum(1))
    neighbours = [each.roll(1 + int(k) % (run.n - 1), 0) for each in sketches]
    signal, own2 = run.average("signal", _dots(sketches, neighbours)), run.average("g2", _dots(g, g))
    return _kept_share(run, [b - a for a, b in zip(signal, own2, strict=True)], own2)


def momentum_norm(run: Run, g: list[Tensor], k: Tensor) -> list[Tensor]:
    """N from |m|^2 = S + c N, with c = (1 - beta1) / (1 + beta1), and |g|^2 = S + N."""
    c = (1 - BETA1) / (1 + BETA1)
    hat = [m / (1 - BETA1 ** max(float(k) - 1, 1)) for m in run.m]
    m2, g2 = run.average("m2", _dots(hat, hat)), run.average("g2", _dots(g, g))
    return _kept_share(run, [(b - a) / (1 - c) for a, b in zip(m2, g2, strict=True)], g2)


def autocorrelation(run: Run, g: list[Tensor], k: Tensor) -> list[Tensor]:
    """N from g . m of the step before = S: the noise of two batches is independent."""
    hat = [m / (1 - BETA1 ** max(float(k) - 1, 1)) for m in run.m]
    gm, g2 = run.average("gm", _dots(g, hat)), run.average("g2", _dots(g, g))
    return _kept_share(run, [b - a for a, b in zip(gm, g2, strict=True)], g2)


def all_noise(run: Run, g: list[Tensor], k: Tensor) -> list[Tensor]:
    """1/n everywhere: as if a gradient were nothing but noise."""
    return [torch.full((run.n,), 1 / run.n)] * len(g)


CORRECTIONS: dict[str, Correction | None] = {
    "none": None,
    "oracle": oracle,
    "sketch": sketch,
    "momentum-norm": momentum_norm,
    "autocorrelation": autocorrelation,
    "all-noise": all_noise,
}


def main() -> None:
    """Run the chosen variants and print one line of JSON each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--topology", default="complete")
    parser.add_argument("--corrections", nargs="+", default=list(CORRECTIONS), choices=CORRECTIONS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    text = Text.of(read_text(args.text))
    for seed in args.seeds:
        for name in ("ddp", *args.corrections):
            began, run = time.perf_counter(), Run(text, args.learners, args, seed)
            mixing = named(args.topology, args.learners, seed)
            mix = None if name == "ddp" else (lambda k, W=mixing: torch.tensor(W.matrix(k)))
            for k in range(args.steps):
                run.step(k, CORRECTIONS.get(name), mix)
            row = {
                "name": name,
                "topology": args.topology,
                "learners": args.learners,
                "seed": seed,
                "steps": args.steps,
            }
            row |= {"lr": args.lr, "valid": round(run.valid_loss(), 4), "s": round(time.perf_counter() - began, 1)}
            print(json.dumps(row), flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
