"""Whole runs of the tiny task, every learner a thread of this process."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from runs import run_in_threads, tiny_config
from safetensors.torch import load_file

from roundelay.errors import DivergedError
from roundelay.training import checkpoint, state as state_module, stopping as stopping_module, trainer as trainer_module
from roundelay.training.metrics import read_rows
from roundelay.weights.serialization import read_state

SHORT = {"budget": {"epochs": 2.0}, "data": {"batch": 20}, "checkpoint": {"every_epochs": 0.5}}
STRATEGIES = ["adpsgd", "dpsgd", "allreduce", "delay-by-one", "delay-by-one-gradients"]


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(one, other) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_leaves_a_model_results_and_metrics(tmp_path, strategy):
    config = tiny_config(strategy=strategy, learners=3, **SHORT | {"metrics": {"every_s": 0.0}})
    trainers = run_in_threads(config, tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["finished"]
    assert results["samples"] == 2600
    assert results["test"]["accuracy"] > 0.3
    assert sum(trainer.loop.step.counts.samples for trainer in trainers) == 2600
    rows = list(read_rows(tmp_path / "run" / "metrics.jsonl"))
    assert {row["learner"] for row in rows if row["kind"] == "learner"} == {0, 1, 2}
    assert {row["split"] for row in rows if row["kind"] == "evaluation"} == {"valid", "test"}
    module = trainers[0].task.module()
    module.load_state_dict(weights(tmp_path / "run"))  # the file is all that is needed to build the model again


def test_a_module_of_one_learner_is_trained_as_torch_alone_would(tmp_path):
    config = tiny_config(learners=1, strategy="allreduce", **SHORT)
    (trainer,) = run_in_threads(config, tmp_path / "run")
    task = trainer.task
    module = task.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for number in range(trainer.part.partition.total):
        loss = task.loss(module, task.batch(trainer.part.partition.chunks.samples(number), torch.Generator()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert equal(weights(tmp_path / "run"), module.state_dict())


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("group_size", [1, 2])
def test_a_resumed_run_is_bit_identical_to_the_uninterrupted_one(tmp_path, strategy, group_size):
    if group_size == 2 and strategy in ("allreduce", "delay-by-one-gradients"):
        pytest.skip("refused: between groups weights are averaged")
    config = tiny_config(strategy=strategy, learners=4, group_size=group_size, topology="ring", **SHORT)
    run_in_threads(config, tmp_path / "run")
    expected = weights(tmp_path / "run")
    saved = [each.samples_seen for each in checkpoint.complete(tmp_path / "run" / "checkpoints")]
    assert saved[0] < 2600
    (tmp_path / "run" / "model.safetensors").unlink()
    run_in_threads(config, tmp_path / "run", samples_seen=saved[0])
    assert equal(weights(tmp_path / "run"), expected)


@pytest.mark.parametrize("sharding", ["static", "dynamic"])
def test_an_asynchronous_run_resumes_and_counts_every_number_once(tmp_path, sharding, monkeypatch):
    config = tiny_config(learners=3, **SHORT | {"data": {"batch": 20, "sharding": sharding}})
    with monkeypatch.context() as patched:
        run_in_threads(config, tmp_path / "run", prepare=stop_learner_after(1, 9, patched))
    (saved,) = checkpoint.complete(tmp_path / "run" / "checkpoints")[-1:]
    assert saved.samples_seen < 2600
    trainers = run_in_threads(config, tmp_path / "run", samples_seen=saved.samples_seen)
    used = Counter(number for trainer in trainers for number in trainer.part.position.used)
    assert used == Counter(range(trainers[0].part.partition.total))


def stop_learner_after(rank: int, steps: int, monkeypatch):
    """Have all learners asked to stop when that one has taken so many steps."""
    stops, asked = [], []

    class Recorded(stopping_module.StopRequest):
        def __init__(self, last_step):
            super().__init__(last_step)
            stops.append(self)
            if asked:
                self.request()

    monkeypatch.setattr(stopping_module, "StopRequest", Recorded)

    def prepare(trainer):
        step = trainer.loop._step

        def counted(*args):
            step(*args)
            if trainer.part.world.rank == rank and trainer.part.position.steps == steps:
                asked.append(rank)
                for stop in stops:
                    stop.request()

        trainer.loop._step = counted

    return prepare


@pytest.mark.parametrize(("strategy", "before", "after"), [("dpsgd", 4, 3), ("adpsgd", 2, 4)])
def test_other_learners_go_on_from_the_mean(tmp_path, strategy, before, after, caplog, monkeypatch):
    config = tiny_config(strategy=strategy, learners=before, **SHORT)
    run_in_threads(config, tmp_path / "run")
    first = checkpoint.complete(tmp_path / "run" / "checkpoints")[0]
    states = [read_state(first.path(rank)) for rank in range(before)]
    mean = torch.stack([state["module"]["0.weight"] for state in states]).double().mean(0).float()
    begun = {}

    def restored(learner, state):
        state_module.restore(learner, state)
        begun[learner.transport.rank] = learner.module[0].weight.detach().clone()

    monkeypatch.setattr(trainer_module, "restore", restored)
    other = tiny_config(strategy=strategy, learners=after, **SHORT)
    trainers = run_in_threads(other, tmp_path / "run", samples_seen=first.samples_seen)
    assert len(begun) == after
    assert all(torch.equal(weight, mean) for weight in begun.values())
    assert f"{after} learners go on from the mean of the {before} that saved" in caplog.text
    drawn = {number for state in states for number in state["used"].tolist()}
    done = len(drawn) or states[0]["position"]["steps"] * before
    assert sum(trainer.part.position.steps for trainer in trainers) == trainers[0].part.partition.total - done


@pytest.mark.parametrize("strategy", ["adpsgd", "dpsgd", "allreduce"])
def test_a_gradient_that_is_not_finite_is_skipped_counted_and_never_spreads(tmp_path, strategy):
    def poison(trainer):
        loss = trainer.task.loss

        def spoiled(module, batch):
            value = loss(module, batch)
            return value * float("nan") if trainer.part.world.rank == 1 and trainer.part.position.steps == 5 else value

        trainer.task.loss = spoiled

    trainers = run_in_threads(tiny_config(strategy=strategy, learners=3, **SHORT), tmp_path / "run", prepare=poison)
    skipped = [trainer.loop.step.counts.skipped for trainer in trainers]
    assert skipped == ([1, 1, 1] if strategy == "allreduce" else [0, 1, 0])
    assert all(torch.isfinite(each).all() for each in weights(tmp_path / "run").values())
    for trainer in trainers:
        assert all(torch.isfinite(weight).all() for weight in trainer.module.parameters())


def test_a_run_that_stays_non_finite_stops_and_names_the_last_good_checkpoint(tmp_path):
    def poison(trainer):
        loss = trainer.task.loss
        trainer.task.loss = lambda module, batch: (
            loss(module, batch) * (float("inf") if trainer.part.position.steps > 40 else 1.0)
        )

    config = tiny_config(learners=1, **SHORT)
    with pytest.raises(
        DivergedError, match=r"no finite gradient in 10 steps; .*; the last good checkpoint is '.*0000640'"
    ):
        run_in_threads(config, tmp_path / "run", prepare=poison)


def test_the_learning_rate_follows_the_samples_of_all_learners(tmp_path):
    seen: dict[int, list[float]] = {0: [], 1: []}

    def watch(trainer):
        step = trainer.loop._step

        def recorded(*args):
            step(*args)
            seen[trainer.part.world.rank].append(trainer.optimizer.param_groups[0]["lr"])

        trainer.loop._step = recorded

    schedule = {"reference_batch": 20, "warmup_epochs": 1.0}
    run_in_threads(
        tiny_config(strategy="dpsgd", topology="ring", learners=2, schedule=schedule, **SHORT),
        tmp_path / "run",
        prepare=watch,
    )
    expected = [0.1 * (1 + min(1.0, step * 40 / 1300)) for step in range(65)]
    assert seen[0] == pytest.approx(expected)
    assert seen[1] == pytest.approx(expected)


def test_a_slow_learner_does_less_and_every_sample_is_used_once_an_epoch(tmp_path):
    config = tiny_config(learners=3, slow="0:20", **SHORT | {"data": {"batch": 20, "sharding": "dynamic"}})
    trainers = run_in_threads(config, tmp_path / "run")
    used = Counter(number for trainer in trainers for number in trainer.part.position.used)
    assert used == Counter(range(trainers[0].part.partition.total))
    samples = [sample for number in used for sample in trainers[0].part.partition.chunks.samples(number)]
    assert Counter(samples) == Counter(dict.fromkeys(range(1300), 2))
    assert trainers[0].part.position.steps < min(trainer.part.position.steps for trainer in trainers[1:])
