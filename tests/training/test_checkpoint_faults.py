"""Checkpoints on a disk that fails at any operation: what is called complete can be read, and the one before stays."""

from __future__ import annotations

import pytest
import torch
from faulty_disk import FaultyDisk, PowerOffError

from roundelay.training import checkpoint
from roundelay.training.checkpoint import Checkpoints, choose, complete
from roundelay.weights.serialization import read_state

KEEP, SEEDS = 1, 2
# Two learners save three checkpoints, of which the first is the best one; then learner 1 is lost; then it is back.
SAVES = [(100, 0), (100, 1), ("best", 0), (200, 1), (200, 0), (300, 0), (300, 1), (400, 0), (500, 0), (500, 1)]
ALONE = {400}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(checkpoint, "PATIENCE_S", 0.02)
    monkeypatch.setattr(checkpoint, "RETRY_EVERY_S", 0.001)


def save(folder, samples_seen, learner):
    """One learner saves, as its own process would. Raises PowerOffError if that process ends."""
    saving = Checkpoints(folder, learner, KEEP)
    try:
        if samples_seen == "best":
            saving.mark_best(100)
        else:
            state = {"w": torch.full((50,), float(samples_seen + learner))}
            saving.save(samples_seen, state, [0] if samples_seen in ALONE else [0, 1])
    finally:
        saving.close()


def newest(folder):
    """The newest complete checkpoint, -1 if there is none; all that are called complete are read and compared."""
    found = complete(folder)
    for each in found:
        assert choose(folder, each.samples_seen) == each
        for learner in each.files:
            values = read_state(each.path(learner))["w"]
            assert torch.equal(values, torch.full((50,), float(each.samples_seen + learner)))
        assert each.files.keys() == ({0} if each.samples_seen in ALONE else {0, 1})
    return max((each.samples_seen for each in found), default=-1)


def train(folder, disk):
    """Save everything; a process that ends is started again, and goes on behind what it has saved last."""
    before = -1
    for samples_seen, learner in SAVES:
        try:
            save(folder, samples_seen, learner)
        except PowerOffError:
            if disk.fault == "power":
                disk.lose_power()
            disk.mend()
        found = newest(folder)
        assert found >= before, f"the checkpoint at {before} is gone"
        before = found
    return before


def operations(folder):
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        disk = FaultyDisk(folder, patch)
        assert train(folder, disk) == 500
        return disk.operations


@pytest.mark.parametrize("fault", ["killed", "power", "full once", "full"])
def test_wherever_a_disk_fails_a_complete_checkpoint_can_be_read_and_the_one_before_stays(tmp_path, fault):
    total = operations(tmp_path / "whole")
    assert total > 100
    for at in range(total):
        for seed in range(SEEDS if fault == "power" else 1):
            folder = tmp_path / f"{at}-{seed}"
            folder.mkdir()
            with pytest.MonkeyPatch.context() as patch:
                disk = FaultyDisk(folder, patch, fault, at, seed)
                train(folder, disk)
                disk.mend()
                for learner in (0, 1):
                    save(folder, 600, learner)
                assert newest(folder) == 600
