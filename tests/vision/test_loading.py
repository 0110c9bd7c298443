import time

import pytest
import torch

from roundelay.training.config import read
from roundelay.vision.loading import PreparedBatches, loading_speed
from roundelay.vision.tasks import ImageNet, ImageNetConfig


class Slow:
    """Preparing an image takes 2 ms; handing it over next to nothing."""

    def __len__(self):
        return 100

    def batch(self, samples, generator):
        time.sleep(0.002 * len(samples))
        return torch.tensor(samples), torch.rand(len(samples), generator=generator)


def test_speed_is_images_per_second_and_its_limit_that_of_handing_over_alone():
    speed = loading_speed(Slow(), batch=5, workers=0, seconds=0.3)
    assert 0 < speed.images_per_s <= 500
    assert speed.limit_per_s > 3 * speed.images_per_s


def test_prepared_batches_go_round_the_samples_and_are_seeded_by_their_number():
    samples, drawn = PreparedBatches(Slow(), 30)[3]
    assert samples.tolist() == [*range(90, 100), *range(20)]
    assert torch.equal(drawn, torch.rand(30, generator=torch.Generator().manual_seed(3)))


@pytest.mark.slow  # starts two processes that import torch
def test_decoding_worker_processes_are_measured(imagenet):
    task = ImageNet(read(ImageNetConfig, {"data": str(imagenet), "model": "resnet18", "image_size": 32}), 0)
    speed = loading_speed(task, batch=20, workers=1, seconds=0.2)
    assert speed.images_per_s > 0
    assert speed.limit_per_s > 0
    assert task.unreadable == 4, "the process has gone through the folder, damaged files and all"
