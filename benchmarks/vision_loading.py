"""Images per second out of worker processes, beside what handing over alone would allow and beside what a learner uses.

python benchmarks/vision_loading.py fashion-mnist
python benchmarks/vision_loading.py jpeg               # generated pictures of ImageNet's usual size
python benchmarks/vision_loading.py imagenet --data DIR
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from roundelay.vision.loading import loading_speed
from roundelay.vision.tasks import Classification, FashionMnist, FashionMnistConfig, ImageNet, ImageNetConfig

WIDTH, HEIGHT, QUALITY = 500, 375, 90  # the most frequent size in ImageNet
PICTURES = 40
STEPS, FIRST = 5, 2  # steps that count, and before them those that allocate


def generated(root: Path) -> Path:
    """A class folder of smooth noise, which compresses about as photographs do."""
    from PIL import Image

    for number in range(PICTURES):
        rng = np.random.default_rng(number)
        coarse = Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)).resize((WIDTH, HEIGHT))
        fine = np.asarray(coarse, dtype=float) + rng.normal(0, 8, (HEIGHT, WIDTH, 3))
        for split in ("train", "val"):
            path = root / split / "n01" / f"{number:03}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(fine.clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)
    return root


def used_per_s(task: Classification, batch: int) -> float:
    """Images per second of one learner with one thread that only computes."""
    module = task.module()
    optimizer = torch.optim.SGD(task.parameter_groups(module), lr=0.01)
    ready = task.batch(range(batch), torch.Generator())
    for step in range(FIRST + STEPS):
        if step == FIRST:
            began = time.perf_counter()
        task.loss(module, ready).backward()
        optimizer.step()
        optimizer.zero_grad()
    return STEPS * batch / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_set", choices=["fashion-mnist", "jpeg", "imagenet"])
    parser.add_argument("--data", default="", help="of ImageNet or Fashion-MNIST")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        batch = 8
        if arguments.data_set == "fashion-mnist":
            task: Classification = FashionMnist(FashionMnistConfig(data=arguments.data), 0)
            batch = 64
        else:
            data = arguments.data or str(generated(Path(scratch)))
            task = ImageNet(ImageNetConfig(data=data), 0)
            size = np.mean([(task.train.root / name).stat().st_size for name in task.train.files[:PICTURES]])
            print(f"{len(task)} pictures, {size / 1000:.0f} kB each on average")
        print(f"a learner with one thread uses {used_per_s(task, batch):.1f} images/s (batch {batch})")
        for workers in arguments.workers:
            speed = loading_speed(task, batch, workers, arguments.seconds)
            print(
                f"{workers} workers: {speed.images_per_s:.0f} images/s, {speed.limit_per_s:.0f} without preparing any"
            )


if __name__ == "__main__":
    main()
