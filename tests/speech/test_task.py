"""Speech as a task: windows in, sums over frames out."""

import json
import pickle
import shutil
from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("kaldi_decoder")

from tones import tones_config

from roundelay.errors import ConfigError
from roundelay.speech.prepare import UNLABELLED
from roundelay.speech.task import Speech

pytestmark = pytest.mark.usefixtures("tones_cache")


@pytest.fixture
def task(tones_folder):
    return Speech(tones_config(tones_folder).settings, seed=0)


def all_windows(task):
    return task._gathered(*task._windows.rows(np.arange(len(task))))


def test_a_batch_has_windows_of_21_frames_of_120_features(task):
    frames, states = task.batch([0, 1, 5], torch.Generator().manual_seed(0))
    assert frames.shape == (3, 21, 120)
    assert states.shape == (3, 21)
    assert frames.dtype == torch.float32


def test_a_batch_depends_on_its_generator_alone(task):
    def batch(seed):
        return task.batch([3, 4], torch.Generator().manual_seed(seed))[0]

    assert torch.equal(batch(1), batch(1))
    assert not torch.equal(batch(1), batch(2))


def test_the_module_is_the_same_on_every_call(task):
    one, other = task.module(), task.module()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_the_loss_of_an_untrained_model_is_near_that_of_a_guess(task):
    loss = float(task.loss(task.module(), all_windows(task)).detach())
    assert loss == pytest.approx(np.log(task.prepared.tying.num_states), abs=0.2)


def test_every_member_of_an_ensemble_is_trained_by_its_own_loss(tones_folder):
    """Each member's gradient is that of its loss alone, divided by the number of members."""
    sizes = {"layers": 1, "width": 16, "bottleneck": 12, "members": 2}
    task = Speech(tones_config(tones_folder, model=sizes).settings, seed=0)
    module, batch = task.module(), all_windows(task)
    loss = task.loss(module, batch)
    loss.backward()
    losses = [float(task.loss(member, batch).detach()) for member in module.members]
    assert losses[0] != losses[1]
    assert float(loss.detach()) == pytest.approx(sum(losses) / 2)
    together = [parameter.grad.clone() for parameter in module.members[1].parameters()]
    module.zero_grad()
    task.loss(module.members[1], batch).backward()
    for parameter, half in zip(module.members[1].parameters(), together, strict=True):
        torch.testing.assert_close(half, parameter.grad / 2)


def test_smoothed_labels_have_a_part_of_every_state(tones_folder):
    """(1 - ε)·CE + ε·mean over states of -log p(s|x), over the frames whose state is known; evaluation has no smoothing."""
    plain = Speech(tones_config(tones_folder).settings, seed=0)
    smooth = Speech(tones_config(tones_folder, label_smoothing=0.2).settings, seed=0)
    module, (frames, states) = plain.module().eval(), all_windows(plain)
    states[0, :5] = UNLABELLED
    log_p = module(frames).log_softmax(-1)[states != UNLABELLED].detach().numpy()
    of_label = log_p[np.arange(len(log_p)), states[states != UNLABELLED].numpy()]
    wanted = -(0.8 * of_label.mean() + 0.2 * log_p.mean())
    assert float(smooth.loss(module, (frames, states)).detach()) == pytest.approx(wanted, rel=1e-5)
    assert float(plain.loss(module, (frames, states)).detach()) == pytest.approx(-of_label.mean(), rel=1e-5)
    with torch.no_grad():
        assert smooth.evaluate(module, "valid") == plain.evaluate(module, "valid")


@pytest.mark.parametrize("wrong", [-0.1, 1.0])
def test_label_smoothing_is_a_probability(wrong, tones_folder):
    with pytest.raises(ConfigError, match=r"settings\.label_smoothing must be at least 0 and below 1"):
        tones_config(tones_folder, label_smoothing=wrong)


def test_evaluation_counts_every_frame_once_and_parts_add_up(task):
    module = task.module().eval()
    with torch.no_grad():
        whole = task.evaluate(module, "valid")
        parts = [task.evaluate(module, "valid", part, 3) for part in range(3)]
    assert whole["samples"] == sum(last - first for first, last in task.prepared.spans("valid"))
    for name, total in whole.items():
        assert sum(part[name] for part in parts) == pytest.approx(total, rel=1e-4)


def test_a_missing_split_has_no_samples(task):
    assert task.evaluate(task.module(), "dance") == {"samples": 0.0, "loss": 0.0, "accuracy": 0.0}


def test_the_task_is_pickled_as_its_settings(task):
    copy = pickle.loads(pickle.dumps(task))
    assert len(pickle.dumps(task)) < 2000
    assert torch.equal(all_windows(copy)[0], all_windows(task)[0])


def test_a_run_has_all_files_that_decoding_needs(task, tmp_path):
    task.leave(tmp_path)
    assert {path.name for path in (tmp_path / "recogniser").iterdir()} == {"states.json", "lexicon.txt", "lm.arpa"}
    states = json.loads((tmp_path / "recogniser" / "states.json").read_text())
    said = Counter(word for each in task.prepared.corpus.split("train") for word in each.text.split())
    assert {word: count for word, _, count in states["pronunciations"]} == said


@pytest.fixture
def whole(tones_folder):
    return Speech(tones_config(tones_folder, window=0).settings, seed=0)


def test_without_windows_a_sample_is_an_utterance(whole):
    assert len(whole) == len(whole.prepared.spans("train"))
    frames, states, lengths = whole.batch([0, 1, 5], torch.Generator().manual_seed(0))
    assert frames.shape[:2] == states.shape == (3, int(lengths.max()))
    assert lengths.tolist() == [last - first for first, last in np.array(whole.prepared.spans("train"))[[0, 1, 5]]]
    assert ((states != UNLABELLED).sum(1) == lengths).all()


def test_padding_of_shorter_utterances_is_neither_seen_nor_counted(whole):
    module = whole.module().eval()
    with torch.no_grad():
        batches = [whole.batch([i], torch.Generator()) for i in range(4)]
        alone = [float(whole.loss(module, batch)) for batch in batches]
        together = float(whole.loss(module, whole.batch(range(4), torch.Generator())))
        counts = [len(batch[1][0]) for batch in batches]
        assert together == pytest.approx(np.average(alone, weights=counts), rel=1e-5)
        judged = whole.evaluate(module, "valid")
    assert judged["samples"] == sum(last - first for first, last in whole.prepared.spans("valid"))


def test_whole_utterances_train(whole):
    module = whole.module()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(30):
        loss = whole.loss(module, whole.batch(range(8), generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


def test_problems_of_the_data_are_written_into_the_run(tones_folder, tmp_path, caplog):
    folder = tmp_path / "broken"
    shutil.copytree(tones_folder, folder)
    (folder / "wav" / "train000.wav").unlink()
    (folder / "wav" / "train001.wav").write_bytes(b"")
    task = Speech(tones_config(folder).settings, seed=0)
    assert "missing file: 1, first train000" in caplog.text
    task.leave(tmp_path / "run")
    lines = (tmp_path / "run" / "problems.txt").read_text().splitlines()
    assert [line.split(": ")[:2] for line in lines] == [["missing file", "train000"], ["empty file", "train001"]]
