"""Lightning with our strategies: equal to its own `ddp`, to the matrix recursion, and exact after a restart."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from integration_programs import PROGRAMS, run, torchrun, what_each_saw
from regression import LEARNERS, SAMPLES, dpsgd_by_matrix, vector

from roundelay.weights.average import mean_module

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="needs the 'lightning' extra"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the program has left its checkpoints, and what each learner saw."""
    folder = tmp_path_factory.mktemp("lightning")
    torchrun("lightning_runs.py", folder, page="lightning")
    return folder


@pytest.fixture(scope="module")
def saw(folder):
    return what_each_saw(folder, LEARNERS)


def checkpoint(folder, name, pattern):
    """A checkpoint, and the learners' states beside it."""
    (path,) = (folder / name).glob(pattern)
    learners = [torch.load(f"{path}.learners/{rank}.ckpt", weights_only=True) for rank in range(LEARNERS)]
    return torch.load(path, weights_only=True), learners


@pytest.mark.parametrize("name", ["plain", "accumulated", "bfloat16", "manual"])
def test_allreduce_equals_ddp(saw, name):
    for each in saw:
        torch.testing.assert_close(each[f"{name} roundelay_allreduce"], each[f"{name} ddp"], rtol=0, atol=1e-6)


def test_accumulated_gradients_are_reduced_once_a_step(saw):
    sent = [saw[0][f"{name} roundelay_allreduce bytes"] for name in ("plain", "accumulated")]
    assert sent[0] == 3 * sent[1] > 0, "6 batches an epoch are 6 steps, or 2 with 3 batches each"


def test_dpsgd_equals_the_matrix_recursion(folder):
    _, learners = checkpoint(folder, "dpsgd", "epoch=1*.ckpt")
    for learner, expected in zip(learners, dpsgd_by_matrix(), strict=True):
        for name, value in expected.state_dict(prefix="net.").items():
            torch.testing.assert_close(learner["module"][name], value, rtol=1e-5, atol=1e-5)
    first, second = (vector_of(learner) for learner in learners)
    assert (first - second).abs().max() > 1e-3, "learners differ, or this would prove nothing"


def vector_of(learner):
    return torch.cat([value.flatten() for value in learner["module"].values() if value.is_floating_point()])


@pytest.mark.parametrize("pattern", ["epoch=0*.ckpt", "epoch=1*.ckpt"])
def test_a_checkpoint_has_the_mean_of_the_learners_beside_it(folder, pattern):
    saved, learners = checkpoint(folder, "dpsgd", pattern)
    mean = mean_module([learner["module"] for learner in learners])
    assert saved["state_dict"].keys() == mean.keys()
    for name, value in mean.items():
        torch.testing.assert_close(saved["state_dict"][name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("step", [3, 6])
def test_a_checkpoint_in_a_validation_has_the_mean_and_beside_it_learners_that_differ(folder, step):
    saved, learners = checkpoint(folder, "in validation", f"*step={step}.ckpt")
    mean = mean_module([learner["module"] for learner in learners])
    torch.testing.assert_close(saved["state_dict"]["net.0.weight"], mean["net.0.weight"], rtol=0, atol=1e-6)
    assert (vector_of(learners[0]) - vector_of(learners[1])).abs().max() > 1e-3


def test_a_checkpoint_between_validations_has_the_mean_as_well(folder):
    saved, learners = checkpoint(folder, "adpsgd", "epoch=0-step=5.ckpt")
    mean = mean_module([learner["module"] for learner in learners])
    torch.testing.assert_close(saved["state_dict"]["net.0.weight"], mean["net.0.weight"], rtol=0, atol=1e-6)
    assert [learner["learner"]["steps"] for learner in learners] == [5, 5]


def test_a_run_that_is_resumed_continues_exactly(folder, saw):
    _, expected = checkpoint(folder, "dpsgd", "epoch=1*.ckpt")
    _, resumed = checkpoint(folder, "resumed", "epoch=1*.ckpt")
    for one, other in zip(resumed, expected, strict=True):
        torch.testing.assert_close(one["module"], other["module"], rtol=0, atol=0)
        torch.testing.assert_close(
            one["optimizer"]["state"][0]["momentum_buffer"], other["optimizer"]["state"][0]["momentum_buffer"]
        )
    for each in saw:
        assert torch.equal(each["resumed"], each["dpsgd"])


def test_a_run_without_the_states_of_all_learners_begins_with_the_mean(saw):
    for rank, each in enumerate(saw):
        (message,) = each["told of the mean"]
        assert message.startswith(f"learner {rank} begins with the mean model: not all learners have a state in")
        assert torch.equal(each["resumed from the mean"], saw[0]["resumed from the mean"])
        assert not torch.equal(each["resumed from the mean"], each["resumed"])


def test_validation_sees_the_mean_or_the_own_weights(folder, saw):
    for one, other in zip(saw[0]["consensus validated"], saw[1]["consensus validated"], strict=True):
        assert torch.equal(one, other)
    means = [checkpoint(folder, "dpsgd", f"epoch={epoch}*.ckpt")[0]["state_dict"] for epoch in range(2)]
    for validated, mean in zip(saw[0]["dpsgd validated"], means, strict=True):
        assert torch.equal(validated[:30], mean["net.0.weight"].flatten())
    for one, other in zip(saw[0]["own validated"], saw[1]["own validated"], strict=True):
        assert (one - other).abs().max() > 1e-3


def test_all_learners_end_with_the_mean(saw):
    mean = sum(map(vector, dpsgd_by_matrix())) / LEARNERS
    for each in saw:
        for name in ("dpsgd", "consensus end", "own end"):  # the way of validating changes nothing
            torch.testing.assert_close(each[name], mean, rtol=1e-5, atol=1e-5)
    for name in ("adpsgd", "roundelay_delay_by_one", "roundelay_local_sgd"):
        assert torch.equal(saw[0][name], saw[1][name])


def test_validate_test_and_predict_use_the_mean(saw):
    assert saw[0]["validate"] == saw[1]["validate"]
    assert saw[0]["test"] == saw[1]["test"]
    for figure in (saw[0]["validate"][0]["val_loss"], saw[0]["test"][0]["test_loss"]):
        assert figure == pytest.approx(saw[0]["loss of all"], rel=1e-5), (
            "sync_dist: the mean over both learners' shares"
        )
    for rank, each in enumerate(saw):
        torch.testing.assert_close(each["predict"], each["predict expected"], rtol=0, atol=1e-6)
        assert len(each["predict"]) == SAMPLES / LEARNERS, f"learner {rank} has its share"


def test_a_second_fit_goes_on(saw):
    assert [each["second fit"] for each in saw] == [18, 18]


def test_steps_are_limited_and_counted_over_a_restart(saw):
    assert [each["adpsgd steps"] for each in saw] == [10, 10]
    assert [each["adpsgd resumed steps"] for each in saw] == [24, 24]


def test_a_link_to_the_last_checkpoint_finds_the_learners(folder, saw):
    assert (folder / "adpsgd" / "last.ckpt").is_symlink()
    assert [each["told after the link"] for each in saw] == [[], []], "no learner begins with the mean"


def test_early_stopping_stops_all_learners_after_the_same_epoch(saw):
    assert [each["early"] for each in saw] == [2, 2]


def test_a_slow_learner_delays_no_other_that_validates_its_own_weights_and_logs(folder, saw):
    """12 batches each with a validation after every second; learner 1 sleeps 0.05 s in each."""
    fast, slow = (each["times"] for each in saw)
    assert len(fast) == len(slow) == 12
    assert fast[-1] < slow[-1] - 0.25
    rows = (folder / "unhindered" / "version_0" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + 12 + 6, "learner 0 has logged each step and each validation"


def test_a_time_limit_is_warned_of_only_if_it_ends_asynchrony(saw):
    for each in saw:
        assert [message.partition(" makes all learners wait")[0] for message in each["told"]] == [
            "Timer",
            "ModelCheckpoint(train_time_interval=...)",
        ]


def test_learners_go_with_their_checkpoint(folder):
    left = sorted(path.name for path in (folder / "one").iterdir())
    assert left == ["epoch=2.ckpt", "epoch=2.ckpt.learners"]


def test_a_failure_is_told_to_the_others(saw):
    assert saw[1]["failure"] == "ZeroDivisionError: this batch is bad"
    assert saw[0]["failure"] == "PeerLostError: lost learner 1: it gave up (ZeroDivisionError: this batch is bad)"


def test_wrong_options_and_several_optimizers_are_refused(saw):
    evaluate, option, averaging, optimizers = saw[0]["refused"]
    assert evaluate == "evaluate must be 'consensus' or 'own', got 'mean'"
    assert option.startswith("unknown option of RoundelayStrategy 'find_unused_parameters'")
    assert "did you mean 'adpsgd'?" in averaging
    assert optimizers.startswith("a Learner hooks one optimizer, but configure_optimizers returned 2")


def test_with_an_elastic_sampler_meetings_by_steps_are_refused(saw):
    errors = saw[0]["refused with a sampler"]
    assert errors.keys() == saw[1]["refused with a sampler"].keys()
    named = {"synchronous": "a synchronous strategy", "every_n_train_steps": "ModelCheckpoint(every_n_train_steps=...)"}
    for name in ("synchronous", "max_steps", "val_check_interval", "every_n_train_steps", "Timer"):
        beginning = "with an ElasticSampler learners take different numbers of steps, so "
        assert errors[name].startswith(f"{beginning}{named.get(name, name)} would make them wait")
    assert errors["accumulation"].startswith(
        "Trainer(accumulate_grad_batches=2) needs ElasticSampler(batches_per_step=2)"
    )
    assert errors["time"].startswith("val_check_interval is a time")


def test_the_script_of_the_page_saves_the_mean_of_its_learners(folder):
    (path,) = (folder / "lightning_logs" / "version_0" / "checkpoints").glob("*.ckpt")
    learners = [torch.load(f"{path}.learners/{rank}.ckpt", weights_only=True) for rank in range(LEARNERS)]
    mean = mean_module([learner["module"] for learner in learners])
    saved = torch.load(path, weights_only=True)["state_dict"]
    torch.testing.assert_close(saved["net.0.weight"], mean["net.0.weight"], rtol=0, atol=1e-6)
    assert not torch.equal(*(learner["module"]["net.0.weight"] for learner in learners))


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["popen", "spawn"])
def test_lightnings_own_launchers(tmp_path, start_method):
    run(PROGRAMS / "lightning_launched.py", start_method, tmp_path)
    ends = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(LEARNERS)]
    assert torch.equal(*ends)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_straggler_delays_ddp_and_not_adpsgd(tmp_path):
    """4 learners, one 5 times slower, and 320 batches: ddp takes 80 slow steps, adpsgd 1 / (3 + 1/5) of 320 fast ones.

    That is 15 s for 60 s, a ratio of 1/4; 1.3/4 is asked. Steps sleep, because there are fewer cores than learners. The time of a
    learner is from its first batch until it has the mean model, so processes that start and import are not counted.
    """
    program = PROGRAMS / "lightning_straggler.py"
    run("-m", "torch.distributed.run", "--nproc-per-node", 4, program, "ddp", tmp_path)
    run("-m", "roundelay", "launch", "--learners", 4, program, "roundelay_adpsgd", tmp_path)
    seconds, samples = {}, {}
    for name in ("ddp", "roundelay_adpsgd"):
        learners = [json.loads((tmp_path / f"{name} {rank}.json").read_text()) for rank in range(4)]
        seconds[name] = max(learner["seconds"] for learner in learners)
        samples[name] = sorted(sample for learner in learners for sample in learner["samples"])
    assert samples["roundelay_adpsgd"] == samples["ddp"], "every sample is used once"
    assert seconds["roundelay_adpsgd"] <= 1.3 / 4 * seconds["ddp"], seconds
