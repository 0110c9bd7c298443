import os
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import NumberedBatches
from torch import nn
from torch.utils.data import DataLoader

from roundelay.errors import ConfigError
from roundelay.training.config_table import read
from roundelay.vision.fashion_mnist import FashionMnist, FashionMnistConfig
from roundelay.vision.fashion_mnist_files import FashionMnistData
from roundelay.vision.imagenet import ImageNet, ImageNetConfig

HAVE_FASHION = (Path(os.environ.get("ROUNDELAY_DATA", "/nowhere")) / "fashion_mnist.tar").is_file()
needs_fashion = pytest.mark.skipif(not HAVE_FASHION, reason="set ROUNDELAY_DATA to a folder with fashion_mnist.tar")


@pytest.fixture(scope="module")
def data():
    return FashionMnistData.load()


@pytest.fixture
def fashion(data, monkeypatch):
    """The task on data that are read once for all tests."""
    monkeypatch.setattr(FashionMnistData, "load", classmethod(lambda cls, path: data))
    return lambda seed=0, **settings: FashionMnist(read(FashionMnistConfig, settings), seed)


def mini(imagenet, seed=0, **settings):
    return ImageNet(
        read(ImageNetConfig, {"data": str(imagenet), "model": "resnet18", "image_size": 32} | settings), seed
    )


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


class Table(nn.Module):
    """Gives the i-th image it sees the i-th row of logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.seen = nn.Parameter(logits), 0

    def forward(self, images):
        self.seen += len(images)
        return self.logits[self.seen - len(images) : self.seen]


@needs_fashion
def test_the_splits_are_55000_5000_and_10000_and_valid_is_the_end_of_the_training_file(fashion, data):
    task = fashion()
    assert len(task) == 55_000
    assert len(data.valid) == 5_000
    assert len(data.test) == 10_000
    assert data.train.labels.bincount().min() > 5_400  # every class is a tenth


@needs_fashion
def test_mean_and_std_are_those_of_the_training_images(data):
    values, counts = np.arange(256) / 255, np.bincount(data.train.images.numpy().ravel(), minlength=256)
    mean = np.average(values, weights=counts)
    assert FashionMnist.mean[0] == pytest.approx(mean, abs=5e-4)
    assert FashionMnist.std[0] == pytest.approx(np.average((values - mean) ** 2, weights=counts) ** 0.5, abs=5e-4)


@needs_fashion
def test_the_same_seed_gives_the_same_module_and_another_seed_another(fashion):
    torch.manual_seed(1)
    first = fashion(seed=3).module()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second, other = fashion(seed=3).module(), fashion(seed=4).module()
    assert torch.equal(before, torch.get_rng_state()), "the global generator is left alone"
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not torch.equal(first.conv1.weight, other.conv1.weight)


@needs_fashion
def test_a_batch_depends_on_samples_and_generator_only(fashion, data):
    task = fashion()
    task.batch([5, 6], rng(9))
    images, labels = task.batch([3, 1, 2], rng(4))
    again, _ = fashion().batch([3, 1, 2], rng(4))
    assert torch.equal(images, again)
    assert labels.tolist() == data.train.labels[[3, 1, 2]].tolist()
    plain, _ = fashion(augment=False).batch([3, 1, 2], rng(4))
    assert torch.equal(plain, data.train.images[[3, 1, 2]])
    assert not torch.equal(plain, images)


@needs_fashion
@torch.no_grad()
def test_sums_of_parts_are_those_of_the_whole_and_equal_numpys(fashion, data):
    task = fashion()
    logits = torch.randn(5000, 10, generator=rng())
    whole = task.evaluate(Table(logits), "valid")
    scores, labels = logits.double().numpy(), data.valid.labels.numpy()
    right = scores[np.arange(5000), labels]
    ranks = (scores > right[:, None]).sum(1)
    expected = {
        "samples": 5000,
        "loss": (np.log(np.exp(scores).sum(1)) - right).sum(),
        "top1": (ranks < 1).sum(),
        "top5": (ranks < 5).sum(),
    }
    assert whole == pytest.approx(expected, rel=1e-5)
    parts = [task.evaluate(Table(logits[part::3]), "valid", part, 3) for part in range(3)]
    assert {key: sum(each[key] for each in parts) for key in whole} == pytest.approx(whole)


@needs_fashion
def test_an_unknown_split_is_refused(fashion):
    with pytest.raises(ConfigError, match="unknown split 'train'"):
        fashion().evaluate(nn.Linear(1, 1), "train")


@needs_fashion
def test_label_smoothing_is_the_mixture_of_the_label_and_all_classes(fashion):
    task = fashion(label_smoothing=0.3)
    logits = torch.randn(3, 10, generator=rng())
    images, labels = task.batch([0, 1, 2], rng())
    log_p = logits - logits.exp().sum(1, keepdim=True).log()
    target = 0.7 * torch.eye(10)[labels] + 0.03
    assert task.loss(Table(logits), (images, labels)).item() == pytest.approx(-(target * log_p).sum(1).mean().item())


@needs_fashion
def test_weight_decay_leaves_batch_norm_and_biases_alone(fashion):
    task = fashion()
    module = task.module()
    optimizer = torch.optim.SGD(task.parameter_groups(module), lr=0.1, weight_decay=0.01)
    decay = {id(weight): group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]}
    assert len(decay) == len(list(module.parameters()))
    for layer in module.modules():
        for name, weight in layer.named_parameters(recurse=False):
            decays = name == "weight" and isinstance(layer, nn.Conv2d | nn.Linear)
            assert decay[id(weight)] == (0.01 if decays else 0.0)


@needs_fashion
def test_a_few_steps_learn_much_more_than_chance(fashion):
    task = fashion(width=8, augment=False)
    module = task.module()
    optimizer = torch.optim.SGD(task.parameter_groups(module), lr=0.1, momentum=0.9)
    for step in range(100):
        task.loss(module, task.batch(range(64 * step, 64 * step + 64), rng(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        sums = task.evaluate(module.eval(), "valid", 0, 10)
    assert sums["samples"] == 500
    assert sums["top1"] / 500 > 0.6
    assert sums["top5"] / 500 > 0.95


def test_missing_data_are_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.delenv("ROUNDELAY_DATA", raising=False)
    with pytest.raises(ConfigError, match="--data"):
        FashionMnist.check_data(FashionMnistConfig())
    with pytest.raises(ConfigError, match=r"train/ and val/"):
        ImageNet.check_data(ImageNetConfig())
    (tmp_path / "train").mkdir()
    with pytest.raises(ConfigError, match=r"there is no folder .*val"):
        ImageNet.check_data(ImageNetConfig(data=str(tmp_path)))


def test_a_miniature_imagenet_with_damaged_files_comes_through_worker_processes(imagenet):
    task = mini(imagenet)
    loader = DataLoader(
        NumberedBatches(task, 5), batch_size=None, sampler=range(8), num_workers=2, multiprocessing_context="spawn"
    )
    batches = list(loader)
    images, labels = torch.cat([each for each, _ in batches])[:37], torch.cat([each for _, each in batches])[:37]
    assert images.shape == (37, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert task.train.unreadable == 4
    coloured = [
        sample for sample in range(37) if sample not in (17, 18, 19)
    ]  # 17 is damaged and replaced by 18, which is grey; 19 is CMYK
    brightest = images.float().mean((2, 3)).argmax(1)
    assert torch.equal(brightest[coloured], labels[coloured]), "each picture has the colour of its class"
    assert torch.equal(images[5:10], task.batch(range(5, 10), rng(1))[0]), "the same in this process"


@torch.no_grad()
def test_damaged_files_are_left_out_of_evaluation_and_parts_add_up(imagenet):
    task = mini(imagenet, threads=2)
    module = task.module().eval()
    whole = task.evaluate(module, "valid")
    parts = [task.evaluate(module, "test", part, 4) for part in range(4)]
    assert (whole["samples"], whole["unreadable"]) == (17, 1)
    assert whole["top5"] == 17, "with three classes the right one is always among five"
    assert {key: sum(each[key] for each in parts) for key in whole} == pytest.approx(whole)
    assert task.val.unreadable == 1


@torch.no_grad()
def test_the_log_says_how_many_training_images_could_not_be_read_once_for_each_number(imagenet, caplog):
    task = mini(imagenet)
    module = task.module().eval()
    task.evaluate(module, "valid")
    assert "training images" not in caplog.text, "none has been asked for"
    task.batch(range(len(task)), rng())
    for _ in range(2):
        task.evaluate(module, "valid")
    assert caplog.text.count("4 of 37 training images could not be read and were replaced") == 1


@torch.no_grad()
def test_evaluation_sees_the_images_in_order_whatever_the_number_of_threads(imagenet, monkeypatch):
    monkeypatch.setattr("roundelay.vision.imagenet.EVALUATION_BATCH", 4)
    one = list(mini(imagenet, threads=1).evaluation_batches("valid", 0, 1))
    three = list(mini(imagenet, threads=3).evaluation_batches("valid", 0, 1))
    assert [len(labels) for _, labels in one] == [4, 4, 3, 4, 2]
    for (images, labels), (others, other_labels) in zip(one, three, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)


def test_imagenet_trains_a_step_with_as_many_classes_as_there_are_folders(imagenet):
    task = mini(imagenet)
    module = task.module()
    assert module.fc.out_features == 3
    loss = task.loss(module, task.batch(range(4), rng()))
    loss.backward()
    assert loss.item() > 0
    assert all(weight.grad is not None for weight in module.parameters())


def test_different_classes_for_training_and_validation_are_refused(imagenet):
    (imagenet / "val" / "n03").rename(imagenet / "val" / "n04")
    with pytest.raises(ConfigError, match="same classes; only one of them has: n03, n04"):
        mini(imagenet)
