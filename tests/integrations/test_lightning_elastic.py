"""Lightning under `roundelay launch`: batches by speed, meetings at the ends of epochs, a resume, and a learner that dies."""

from __future__ import annotations

import csv
import importlib.util
from collections import Counter
from pathlib import Path

import pytest
import torch
from integration_programs import PROGRAMS, run, what_each_saw
from regression import SAMPLES, data

from roundelay.weights.average import mean_module

LEARNERS, BATCH, EPOCHS = 3, 2, 3
EVERY_SAMPLE = set(data().tensors[0][:, 0].tolist())
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="needs the 'lightning' extra"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elastic")
    program = PROGRAMS / "lightning_elastic.py"
    ended = run("-m", "roundelay", "launch", "--learners", LEARNERS, program, folder)
    assert "learner 0 is lost (killed by SIGKILL); the others go on" in ended.stderr
    return folder


@pytest.fixture(scope="module")
def saw(folder):
    return what_each_saw(folder, LEARNERS)


def used(saw, name, epoch):
    return Counter(sample for each in saw for sample in each[name]["samples"].get(epoch, []))


def test_every_sample_is_used_once_an_epoch_and_a_slow_learner_takes_fewer(saw):
    for epoch in range(EPOCHS):
        assert used(saw, "shared", epoch) == Counter(EVERY_SAMPLE)
    steps = [each["shared"]["steps"] for each in saw]
    assert steps[1] < min(steps[0], steps[2])
    assert sum(steps) == EPOCHS * SAMPLES / BATCH


@pytest.mark.parametrize("name", ["shared", "resumed", "few"])
def test_epochs_end_for_all_learners_with_the_same_figures_and_weights(saw, name):
    for each in saw:
        assert each[name]["epochs"] == EPOCHS
        assert each[name]["figures"] == saw[0][name]["figures"]
        assert torch.equal(each[name]["end"], saw[0][name]["end"])


def checkpoints(folder, name):
    """By epoch: the checkpoint, and the states of the learners beside it."""
    paths = sorted((folder / name).glob("*.ckpt"))
    learners = [sorted(Path(f"{path}.learners").glob("*.ckpt")) for path in paths]
    return [
        (torch.load(path, weights_only=True), [torch.load(each, weights_only=True) for each in beside])
        for path, beside in zip(paths, learners, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "epochs", "beside"), [("shared", 3, [3, 3, 3]), ("few", 3, [3, 3, 3]), ("death", 3, [3, 2, 2])]
)
def test_each_epoch_has_one_checkpoint_with_the_mean_of_the_living_learners_beside_it(folder, name, epochs, beside):
    saved = checkpoints(folder, name)
    assert len(saved) == epochs, "one name, although the learners' numbers of steps differ"
    assert [len(learners) for _, learners in saved] == beside
    for checkpoint, learners in saved:
        mean = mean_module([learner["module"] for learner in learners])
        for key, value in mean.items():
            torch.testing.assert_close(checkpoint["state_dict"][key], value, rtol=1e-6, atol=1e-6)


def test_all_learners_load_the_best_checkpoint_of_the_first_one(saw):
    assert len({each["shared"]["best"] for each in saw}) > 1, "names differ, or this would prove nothing"
    assert saw[0]["tested"] == saw[1]["tested"] == saw[2]["tested"]


def test_a_resumed_run_uses_the_samples_that_were_left(saw):
    assert not used(saw, "resumed", 0)
    for epoch in (1, 2):
        assert used(saw, "resumed", epoch) == Counter(EVERY_SAMPLE)


def test_a_learner_without_a_batch_takes_part_in_the_end_of_the_epoch(saw):
    taken = [sum(len(batch) for batch in each["few"]["samples"].values()) for each in saw]
    assert sum(taken) == EPOCHS * BATCH
    assert [len(each["few"]["figures"]) for each in saw] == [EPOCHS] * LEARNERS


def test_the_others_go_on_without_a_learner_that_dies_and_no_sample_is_lost(folder, saw):
    assert "death" not in saw[0]
    survivors = saw[1:]
    assert [each["death"]["epochs"] for each in survivors] == [EPOCHS] * 2
    assert torch.equal(survivors[0]["death"]["end"], survivors[1]["death"]["end"])
    dead = [{"death": {"samples": torch.load(folder / "used by the dead.pt", weights_only=True)}}]
    total = sum((used(survivors + dead, "death", epoch) for epoch in range(EPOCHS)), Counter())
    assert total.keys() == EVERY_SAMPLE
    assert min(total.values()) == EPOCHS
    assert EPOCHS * SAMPLES <= total.total() <= EPOCHS * SAMPLES + BATCH, "its last batch may be used twice"


def test_the_logger_of_learner_0_has_its_steps_and_the_figures_of_all(folder, saw):
    with (folder / "shared-log" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(bool(row["train_loss"]) for row in rows) == saw[0]["shared"]["steps"]
    assert [float(row["val_loss"]) for row in rows if row["val_loss"]] == pytest.approx(saw[0]["shared"]["figures"])


def test_a_learner_that_comes_later_is_refused(saw):
    assert saw[0]["too late"].startswith("a learner cannot join a run of Lightning that is under way")
