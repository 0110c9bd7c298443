"""A claim of the first paper on Fashion-MNIST: many learners converge worse on a fixed ring than on a random ring.

Virtual learners run the real D-PSGD, each with a small ResNet and its own part of the images. Both rings send the same number of
bytes. The spectral gap of the fixed ring shrinks with the number of learners, that of the random ring does not. `complete` shows
perfect averaging.

    python benchmarks/vision_rings.py --out out/rings
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import roundelay
from roundelay.clock import VirtualClock
from roundelay.reports.plots.figures import picture
from roundelay.simulation import VirtualLearner
from roundelay.topology import Mixing
from roundelay.transport import SimulatedNetwork
from roundelay.vision.fashion_mnist import FashionMnist, FashionMnistConfig
from roundelay.weights.average import mean_module

TOPOLOGIES: dict[str, Callable[[int], Mixing]] = {
    "ring": roundelay.ring,
    "random-ring": roundelay.random_ring,
    "complete": roundelay.complete,
}
COLOURS = {"ring": "tab:red", "random-ring": "tab:blue", "complete": "0.4"}
WIDTH, BATCH, MOMENTUM = 8, 16, 0.9
VALID_PARTS = 2  # every second validation image


class Experiment:
    """Virtual learners on one topology. `run` returns one row of figures every `every` steps."""

    def __init__(self, topology: str, learners: int, steps: int, lr: float, images: int) -> None:
        self.mixing, self.size, self.steps, self.lr = TOPOLOGIES[topology](learners), learners, steps, lr
        self.task = FashionMnist(FashionMnistConfig(width=WIDTH), seed=0)
        self.shards = torch.randperm(images, generator=torch.Generator().manual_seed(1)).split(images // learners)
        self.clock = VirtualClock()
        network = SimulatedNetwork(self.clock, learners, latency_s=0.0)
        self.learners = [self.learner(rank, network) for rank in range(learners)]
        self.rows: list[dict[str, float]] = []

    def learner(self, rank: int, network: SimulatedNetwork) -> VirtualLearner:
        module = self.task.module()
        optimizer = torch.optim.SGD(self.task.parameter_groups(module), lr=self.lr, momentum=MOMENTUM)
        rng = torch.Generator().manual_seed(1000 + rank)

        def gradient(step: int) -> None:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * min(1.0, (step + 1) / (0.1 * self.steps))
            optimizer.zero_grad()
            chosen = torch.randint(len(self.shards[rank]), (BATCH,), generator=rng)
            self.task.loss(module, self.task.batch(self.shards[rank][chosen].tolist(), rng)).backward()

        strategy = roundelay.DPSGD(self.mixing)
        return VirtualLearner(module, optimizer, strategy, network.transports[rank], gradient, lambda step: 1.0)

    def run(self, every: int) -> list[dict[str, float]]:
        for rank, learner in enumerate(self.learners):
            self.clock.spawn(learner.process(self.steps), f"learner {rank}")
        for step in range(every, self.steps + 1, every):
            self.clock.run(until=step + 0.5)  # a step takes one virtual second
            self.rows.append({"step": step} | self.figures())
        self.clock.run()
        return self.rows

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        """Figures of the mean model, and the distance of the learners from it, relative to its norm."""
        modules = [learner.module for learner in self.learners]
        mean = consensus(self.task.module(), modules)
        sums = self.task.evaluate(mean.eval(), "valid", 0, VALID_PARTS)
        one = self.task.evaluate(modules[0].eval(), "valid", 0, VALID_PARTS)
        modules[0].train()
        own, centre = torch.stack([flat(module) for module in modules]), flat(mean)
        return {
            "loss": sums["loss"] / sums["samples"],
            "top1": sums["top1"] / sums["samples"],
            "top1_of_learner_0": one["top1"] / one["samples"],
            "spread": float((own - centre).square().sum(1).mean().sqrt() / centre.norm()),
        }


def flat(module: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in module.parameters()]).double()


def consensus(into: nn.Module, modules: list[nn.Module]) -> nn.Module:
    """The mean model, with the BatchNorm statistics over the data of all learners."""
    into.load_state_dict(mean_module([module.state_dict() for module in modules]))
    return into


def draw(document: dict[str, Any], path: Path) -> None:
    """One row of plots per number of learners: spectral gap, validation loss, spread of the learners."""
    sizes = sorted({run["learners"] for run in document["runs"]})
    with picture(path, len(sizes), 3, size=(11, 3.6 * len(sizes))) as (_, axes):
        for row, size in enumerate(sizes):
            gap, loss, spread = axes[3 * row : 3 * row + 3]
            for run in (run for run in document["runs"] if run["learners"] == size):
                steps, look = [each["step"] for each in run["rows"]], {"color": COLOURS[run["topology"]]}
                counts = list(range(4, 65, 2))
                gap.plot(counts, [roundelay.spectral_gap(TOPOLOGIES[run["topology"]](n)) for n in counts], **look)
                gap.plot(size, run["gap"], "o", label=f"{run['topology']}: {run['gap']:.3f}", **look)
                loss.plot(steps, [each["loss"] for each in run["rows"]], label=run["topology"], **look)
                spread.plot(steps, [each["spread"] for each in run["rows"]], label=run["topology"], **look)
            gap.set(title="spectral gap", xlabel="learners", yscale="log")
            last = min(run["rows"][-1]["loss"] for run in document["runs"])
            loss.set(title=f"validation loss, mean of {size}", xlabel="steps", ylim=(0.9 * last, 2.5 * last))
            spread.set(title="spread / size of the mean model", xlabel="steps", yscale="log")
            gap.legend()
            loss.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/rings"), help="writes OUT.json and OUT.svg")
    parser.add_argument("--learners", type=int, nargs="+", default=[32])
    parser.add_argument("--topologies", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument(
        "--lr",
        type=float,
        default=0.4,
        help="learning rate of every learner; 0.1 for a batch of 128, scaled linearly to 32 x 16",
    )
    parser.add_argument(
        "--images", type=int, default=12_800, help="number of training images, divided among the learners"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    document: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "batch": BATCH,
        "runs": [],
    }
    began = time.perf_counter()
    for size in arguments.learners:
        for topology in arguments.topologies:
            experiment = Experiment(topology, size, arguments.steps, arguments.lr, arguments.images)
            rows = experiment.run(arguments.every)
            gap = roundelay.spectral_gap(experiment.mixing)
            document["runs"].append({"topology": topology, "learners": size, "gap": gap, "rows": rows})
            last = "  ".join(f"{key} {value:.4f}" for key, value in rows[-1].items() if key != "step")
            print(
                f"{size:3} learners  {topology:12} gap {gap:.4f}  {last}  after {time.perf_counter() - began:.0f} s",
                flush=True,
            )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    draw(document, arguments.out.with_suffix(".svg"))
    print(f"{arguments.out.with_suffix('.json')}  {arguments.out.with_suffix('.svg')}")


if __name__ == "__main__":
    main()
