from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings, strategies as st

from roundelay.errors import CheckpointError
from roundelay.training import checkpoint
from roundelay.training.checkpoint import Checkpoints, choose, complete
from roundelay.weights.serialization import read_state


def state(value: float) -> dict[str, object]:
    return {"module": {"w": torch.full((300,), value), "n": torch.tensor(3)}, "steps": 7, "betas": (0.9, None)}


def save_all(folder, samples_seen, learners=2, keep=2):
    for rank in range(learners):
        saving = Checkpoints(folder, rank, keep)
        saving.save(samples_seen, state(rank), range(learners))
        saving.close()


def test_a_saved_state_comes_back_and_nothing_temporary_is_left(tmp_path):
    save_all(tmp_path, 100)
    chosen = choose(tmp_path)
    assert chosen.samples_seen == 100
    back = read_state(chosen.path(1))
    assert torch.equal(back["module"]["w"], torch.ones(300))
    assert (back["steps"], back["betas"]) == (7, (0.9, None))
    assert not list(tmp_path.rglob("*.part"))


def test_training_may_change_tensors_as_soon_as_save_returns(tmp_path):
    saving, weights = Checkpoints(tmp_path, 0, 2), torch.zeros(1_000_000)
    saving.save(1, {"w": weights}, [0])
    weights.fill_(5.0)
    saving.close()
    assert not read_state(choose(tmp_path).path(0))["w"].any()


def test_it_is_complete_only_when_all_have_saved(tmp_path):
    slow = Checkpoints(tmp_path, 1, 2)
    save_all(tmp_path, 100)
    first = Checkpoints(tmp_path, 0, 2)
    first.save(200, state(0), [0, 1])
    first.close()
    assert [each.samples_seen for each in complete(tmp_path)] == [100]
    slow.save(200, state(1), [0, 1])
    slow.close()
    assert [each.samples_seen for each in complete(tmp_path)] == [100, 200]


def test_a_dead_learner_is_not_waited_for(tmp_path):
    saving = Checkpoints(tmp_path, 0, 2)
    saving.save(10, state(0), [0])
    saving.close()
    assert list(choose(tmp_path).files) == [0]


def test_a_learner_that_saved_and_left_is_part_of_it(tmp_path):
    for rank, living in ((1, [0, 1]), (0, [0])):
        saving = Checkpoints(tmp_path, rank, 2)
        saving.save(10, state(rank), living)
        saving.close()
    assert list(choose(tmp_path).files) == [0, 1]


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    for samples_seen in (100, 200, 300, 400):
        save_all(tmp_path, samples_seen)
        if samples_seen == 100:
            Checkpoints(tmp_path, 0, 2).mark_best(100)
    assert [each.samples_seen for each in complete(tmp_path)] == [100, 300, 400]


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_torn_or_altered_file_is_refused_by_name_and_the_previous_one_offered(tmp_path, harm):
    save_all(tmp_path, 100)
    save_all(tmp_path, 200)
    path = choose(tmp_path).path(1)
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif harm == "cut":
        path.write_bytes(data[:-10])
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=r"learner-1\.safetensors.*the checkpoint at 100 is whole: --resume 100"):
        choose(tmp_path)
    assert choose(tmp_path, 100).samples_seen == 100


def test_a_manifest_that_is_no_manifest_is_refused_by_name(tmp_path):
    save_all(tmp_path, 100)
    manifest = next(tmp_path.rglob("manifest.json"))
    manifest.write_text(manifest.read_text()[:-20])
    with pytest.raises(
        CheckpointError, match=r"manifest\.json' is torn or altered.*no other checkpoint is whole, so begin a new run"
    ):
        choose(tmp_path)


def test_a_manifest_cannot_point_out_of_its_folder(tmp_path):
    save_all(tmp_path, 100)
    manifest = next(tmp_path.rglob("manifest.json"))
    manifest.write_text(manifest.read_text().replace("learner-0.safetensors", "../learner-0.safetensors"))
    with pytest.raises(CheckpointError, match="is not the name of a file beside the manifest"):
        choose(tmp_path)


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no complete checkpoint.*begin a new run with another --out"):
        choose(tmp_path)
    save_all(tmp_path, 100)
    with pytest.raises(
        CheckpointError, match="there is no checkpoint at 7 samples; give --resume one of these numbers of samples: 100"
    ):
        choose(tmp_path, 7)


@settings(max_examples=60)
@given(data=st.data())
def test_whatever_bytes_a_file_has_reading_it_gives_a_state_or_our_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "learner-0.safetensors"
    saving = Checkpoints(path.parent, 0, 2)
    saving.save(1, state(1.0), [0])
    saving.close()
    content = bytearray(choose(path.parent).path(0).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(len(content) - 1, 600)))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(CheckpointError):
        read_state(path)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path, monkeypatch, caplog):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_whole", full)
    monkeypatch.setattr(checkpoint, "PATIENCE_S", 0.0)
    saving = Checkpoints(tmp_path, 0, 2)
    saving.save(1, state(0), [0])
    saving.close()
    assert "could not write a checkpoint: [Errno 28] No space left on device" in caplog.text


def test_a_disk_that_is_full_for_a_moment_costs_nothing(tmp_path, monkeypatch):
    failures = [OSError(28, "No space left on device")] * 2
    write_whole = checkpoint.write_whole

    def sometimes_full(path, data):
        if failures:
            raise failures.pop()
        write_whole(path, data)

    monkeypatch.setattr(checkpoint, "write_whole", sometimes_full)
    monkeypatch.setattr(checkpoint, "RETRY_EVERY_S", 0.01)
    saving = Checkpoints(tmp_path, 0, 2)
    saving.save(1, state(0), [0])
    saving.close()
    assert choose(tmp_path).samples_seen == 1


def test_the_next_checkpoint_does_not_wait_for_a_full_disk(tmp_path, monkeypatch, caplog):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "RETRY_EVERY_S", 1000.0)
    saving = Checkpoints(tmp_path, 0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_whole", full)
        saving.save(1, state(0), [0])
        saving.save(2, state(0), [0])  # gives up the first one
    saving._next_one_waits.set()
    saving.close()
    assert "could not write a checkpoint" in caplog.text


def test_a_checkpoint_that_another_learner_removes_meanwhile_is_left_out(tmp_path, monkeypatch):
    for samples_seen in (1, 2):
        save_all(tmp_path, samples_seen)
    read = checkpoint._read_manifest

    def removed_first(path):
        if path.parent.name.endswith("1"):
            path.unlink()
        return read(path)

    monkeypatch.setattr(checkpoint, "_read_manifest", removed_first)
    assert [each.samples_seen for each in complete(tmp_path)] == [2]


def test_a_full_disk_does_not_stop_the_mark_of_the_best(tmp_path, monkeypatch, caplog):
    saving = Checkpoints(tmp_path / "absent", 0, 2)
    saving.mark_best(7)
    assert "could not mark the best checkpoint" in caplog.text
    assert saving.best() is None
    saving.close()


def test_going_back_puts_later_checkpoints_aside(tmp_path):
    for samples_seen in (100, 200, 300):
        save_all(tmp_path, samples_seen, keep=3)
    checkpoint.abandon_after(tmp_path, 100)
    assert [each.samples_seen for each in complete(tmp_path)] == [100]
    assert len(list(tmp_path.glob("abandoned-*/*/manifest.json"))) == 2


def test_what_few_learners_save_does_not_remove_what_more_have_saved(tmp_path):
    save_all(tmp_path, 100, learners=1)
    save_all(tmp_path, 200, learners=3)  # such as the checkpoint of a stop
    for samples_seen in (300, 400, 500):
        save_all(tmp_path, samples_seen, learners=1)
    assert [each.samples_seen for each in complete(tmp_path)] == [200, 400, 500]
    for samples_seen in (600, 700):
        save_all(tmp_path, samples_seen, learners=3)
    assert [each.samples_seen for each in complete(tmp_path)] == [600, 700]
