"""The figure by which models are compared is checked before a step is taken."""

from __future__ import annotations

import pytest
import torch
from runs import run_in_threads, tiny_config

from roundelay.errors import ConfigError
from roundelay.training.evaluator import Evaluator, check_judged_by, evaluating
from roundelay.training.tiny import Digits, DigitsConfig


class Misspelt(Digits):
    judged_by = "-acuracy"


class WithoutSamples(Digits):
    def evaluate(self, module, split, part=0, parts=1):
        return {"loss": 1.0}


@pytest.fixture
def digits():
    return Digits(DigitsConfig(), 0)


def test_a_misspelt_judged_by_is_refused_with_the_figures_that_there_are():
    task = Misspelt(DigitsConfig(), 0)
    with pytest.raises(
        ConfigError, match=r"Misspelt\.judged_by: .*'acuracy'; did you mean 'accuracy'.* loss, accuracy"
    ):
        check_judged_by(task, task.module())


def test_an_evaluation_without_samples_is_refused():
    task = WithoutSamples(DigitsConfig(), 0)
    with pytest.raises(ConfigError, match="must return the number of samples as 'samples', got loss"):
        check_judged_by(task, task.module())


def test_a_run_with_a_misspelt_judged_by_ends_before_its_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(Digits, "judged_by", "acuracy")
    monkeypatch.setattr(Digits, "loss", lambda *args: pytest.fail("a step was taken"))
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        run_in_threads(tiny_config(learners=1), tmp_path / "run")


def test_the_check_changes_neither_the_module_nor_the_random_state(digits):
    module = digits.module()
    before, random = {name: each.clone() for name, each in module.state_dict().items()}, torch.get_rng_state()
    check_judged_by(digits, module)
    assert module.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())


@pytest.mark.parametrize(("judged_by", "best"), [("loss", [1, 3]), ("-loss", [1, 2, 4])])
def test_the_best_checkpoint_has_the_largest_figure_or_with_a_minus_the_least(digits, judged_by, best, monkeypatch):
    losses = iter([3.0, 2.0, 4.0, 1.0])
    monkeypatch.setattr(digits, "evaluate", lambda *args: {"samples": 1.0, "loss": next(losses)})
    monkeypatch.setattr(Digits, "judged_by", judged_by)
    rows, found = [], []
    evaluator = Evaluator(digits, rows.append, found.append)
    for samples_seen in (1, 2, 3, 4):
        evaluator.evaluate(digits.module(), "valid", samples_seen)
    assert found == best
    assert [row["samples_seen"] for row in rows] == [1, 2, 3, 4]


def test_random_states_are_as_before_an_evaluation(digits):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with evaluating(digits.module()):
        torch.rand(5)
    assert torch.equal(torch.rand(2), expected)
