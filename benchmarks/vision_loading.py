"""Images per second out of worker processes, beside the limit of sending alone, and beside what a learner uses.

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
from torch.utils.data import DataLoader, Dataset

from roundelay.training.task import Batch, Task
from roundelay.vision.classification import Classification
from roundelay.vision.fashion_mnist import FashionMnist, FashionMnistConfig
from roundelay.vision.imagenet import ImageNet, ImageNetConfig

WIDTH, HEIGHT, QUALITY = 500, 375, 90  # the most frequent size in ImageNet
PICTURES = 40
STEPS, FIRST = 5, 2  # steps that are timed, and warm-up steps before them
AHEAD = 4  # batches that each worker prepares in advance, the most of a training run


class PreparedBatches(Dataset[Batch]):
    """Batch k has the samples from k·size on, prepared as in training with a generator seeded by k."""

    def __init__(self, task: Task, size: int) -> None:
        self._task, self._size = task, size

    def __getitem__(self, number: int) -> Batch:
        samples = [(number * self._size + position) % len(self._task) for position in range(self._size)]
        return self._task.batch(samples, torch.Generator().manual_seed(number))


class SameBatch(Dataset[Batch]):
    """A copy of the same batch for every k; a copy, because sending moves a tensor to shared memory."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __getitem__(self, number: int) -> Batch:
        return tuple(tensor.clone() for tensor in self._batch)


def images_per_s(batches: Dataset[Batch], batch: int, workers: int, seconds: float) -> float:
    """Images per second out of `workers` processes, 0: this process. The first batches, which start processes, do not count."""
    loader = DataLoader(
        batches,
        batch_size=None,
        sampler=range(1_000_000_000),
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,  # as in training runs, which have threads
        prefetch_factor=AHEAD if workers else None,
    )
    iterator, count = iter(loader), 0
    for _ in range(workers * (AHEAD + 1) + 1):
        next(iterator)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        next(iterator)
        count += 1
    return count * batch / (time.perf_counter() - began)


def generated(root: Path) -> Path:
    """A class folder with images of smooth noise, which compress about as well as photographs."""
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
    """Images per second of one learner with one thread, without loading."""
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
            prepared = PreparedBatches(task, batch)
            speed = images_per_s(prepared, batch, workers, arguments.seconds)
            limit = images_per_s(SameBatch(prepared[0]), batch, workers, arguments.seconds)
            print(f"{workers} workers: {speed:.0f} images/s, {limit:.0f} without preparing any")


if __name__ == "__main__":
    main()
