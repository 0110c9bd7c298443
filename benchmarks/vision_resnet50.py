"""Step time and memory of ResNet-50 with a small batch on this CPU: forward, backward and SGD on random pixels.

python benchmarks/vision_resnet50.py --batch 8
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import torch
from torch.nn.functional import cross_entropy

from roundelay.vision.imagenet import ImageNet
from roundelay.vision.resnet import IMAGENET_MODELS, imagenet_resnet
from roundelay.vision.transforms import normalised


def resident_MiB() -> float:
    """Peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=IMAGENET_MODELS, default="resnet50")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    before = resident_MiB()
    module = imagenet_resnet(arguments.model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    images = torch.randint(256, (arguments.batch, 3, 224, 224), dtype=torch.uint8)
    labels = torch.randint(1000, (arguments.batch,))
    seconds, processor = [], []
    for _ in range(arguments.steps + 2):
        began, used = time.perf_counter(), time.process_time()
        cross_entropy(module(normalised(images, ImageNet.mean, ImageNet.std)), labels, label_smoothing=0.1).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        processor.append(time.process_time() - used)
    steady = sorted(seconds[2:])  # without the first two steps, which allocate memory
    weights = sum(weight.numel() for weight in module.parameters())
    print(
        f"{arguments.model}, {weights / 1e6:.2f} M parameters ({weights * 4 / 2**20:.1f} MiB), batch {arguments.batch}"
    )
    print(
        f"step: median {statistics.median(steady):.2f} s ({steady[0]:.2f} to {steady[-1]:.2f}), {arguments.threads} threads"
    )
    print(f"processor time a step: median {statistics.median(processor[2:]):.2f} s")
    print(f"peak memory of the process: {resident_MiB():.0f} MiB, of it {before:.0f} MiB before the model was made")


if __name__ == "__main__":
    main()
