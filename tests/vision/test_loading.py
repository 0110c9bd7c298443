import time

import torch
from torch.utils.data import DataLoader

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
    assert 200 < speed.images_per_s <= 500
    assert speed.limit_per_s > 10 * speed.images_per_s


def test_prepared_batches_go_round_the_samples_and_are_the_same_in_any_process():
    batches = PreparedBatches(Slow(), 30)
    assert batches[3][0].tolist() == [*range(90, 100), *range(20)]
    loader = DataLoader(batches, batch_size=None, sampler=range(4), num_workers=2, multiprocessing_context="fork")
    for number, (samples, drawn) in enumerate(loader):
        assert torch.equal(samples, batches[number][0])
        assert torch.equal(drawn, torch.rand(30, generator=torch.Generator().manual_seed(number)))


def test_decoding_worker_processes_are_measured(imagenet):
    task = ImageNet(read(ImageNetConfig, {"data": str(imagenet), "model": "resnet18", "image_size": 32}), 0)
    speed = loading_speed(task, batch=4, workers=1, seconds=0.2)
    assert 0 < speed.images_per_s < speed.limit_per_s
