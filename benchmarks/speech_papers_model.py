"""Step time and memory of the papers' acoustic model on this CPU: forward, backward and SGD on random windows.

python benchmarks/speech_papers_model.py --batch 16
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from typing import cast

import torch
from torch.nn.functional import cross_entropy

from roundelay.speech.config import SpeechConfig
from roundelay.speech.model import AcousticModel
from roundelay.training import recipes

FEATURES = 260  # log-mel with derivatives, fMLLR, i-vectors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--batch", type=int, default=16, help="windows; 160 for each of 16 learners in the papers' recipe"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    # Resolving a recipe checks that `data` exists; the model does not depend on it.
    config = recipes.resolve(recipes.table_of("switchboard"), [("settings.data", ".")])
    settings = cast(SpeechConfig, config.settings)
    model = AcousticModel(FEATURES, settings.states, settings.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.optimizer.lr, momentum=config.optimizer.momentum)
    frames_BTF = torch.randn(arguments.batch, settings.window, FEATURES)
    states_BT = torch.randint(settings.states, (arguments.batch, settings.window))
    seconds, losses = [], []
    for _ in range(arguments.steps + 1):
        began = time.perf_counter()
        loss = cross_entropy(model(frames_BTF).flatten(0, 1), states_BT.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        losses.append(float(loss.detach()))
    steady = sorted(seconds[1:])  # without the first step, which allocates memory
    weights = sum(weight.numel() for weight in model.parameters())
    peak_MiB = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{weights:,} parameters, {4 * weights / 2**20:.1f} MiB; batch {arguments.batch} windows of {settings.window} frames"
    )
    median = statistics.median(steady)
    print(f"step: median {median:.2f} s ({steady[0]:.2f} to {steady[-1]:.2f}), {arguments.threads} threads")
    print(f"{arguments.batch * settings.window / median:,.0f} frames/s; peak memory {peak_MiB:.0f} MiB")
    print("loss: " + " ".join(f"{each:.3f}" for each in losses))


if __name__ == "__main__":
    main()
