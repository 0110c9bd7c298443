from __future__ import annotations

import pytest

from roundelay.errors import ConfigError
from roundelay.training import recipe_files, recipes
from roundelay.training.config import Config

TINY = "roundelay.training.tiny:Digits"


def test_every_built_in_recipe_names_a_task_that_can_be_imported():
    assert {"tiny", "an4", "an4/best"} <= recipe_files.built_in().keys()
    for name, path in recipe_files.built_in().items():
        recipes.task_class(recipes.read_toml(path)["task"])
        assert name in (path.parent.name, f"{path.parent.name}/{path.stem}")


def test_a_recipe_is_a_name_a_file_or_a_task(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(f'task = "{TINY}"\nlearners = 3\n')
    assert recipes.resolve(recipes.table_of(str(file))).learners == 3
    assert recipes.resolve(recipes.table_of("tiny")).task == TINY
    assert recipes.resolve(recipes.table_of(TINY)).learners == 4


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            "tinny",
            "unknown recipe 'tinny'; did you mean 'tiny'?.*or a file that ends in .toml, or a task as module:Class",
        ),
        ("no/such.toml", "cannot read 'no/such.toml': No such file or directory"),
        ("nowhere.at_all:Task", "cannot import the task 'nowhere.at_all:Task': No module named 'nowhere'"),
        ("roundelay.training.tiny:Digit", "the module 'roundelay.training.tiny' has no 'Digit'"),
        ("roundelay.training.tiny:DigitsConfig", "is no task; it must be a class derived from roundelay.Task"),
    ],
)
def test_a_recipe_that_is_none_is_refused(recipe, message):
    with pytest.raises(ConfigError, match=message):
        recipes.resolve(recipes.table_of(recipe))


def test_a_broken_file_is_refused_with_its_line(tmp_path):
    file = tmp_path / "broken.toml"
    file.write_text("learners = \n")
    with pytest.raises(ConfigError, match=r"broken.toml' is no TOML: .*line 1"):
        recipes.table_of(str(file))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learners": "6", "group_size": "4"}, "group_size 4 must divide the 6 learners"),
        ({"group_size": "2", "strategy": "allreduce"}, "strategy: between groups .* Allreduce averages gradients"),
        (
            {"strategy": "adpsg"},
            "strategy: unknown strategy 'adpsg'; did you mean 'adpsgd'?.* or a class as module:Class",
        ),
        ({"strategy": "roundelay.learner:Learner"}, "strategy: 'roundelay.learner:Learner' is no strategy"),
        ({"min_learners": "5"}, "min_learners 5 must not be more than the 4 learners"),
        ({"strategy": "allreduce", "topology": "ring"}, "topology ring has no effect on allreduce"),
        ({"topology": "no.edgelist"}, "topology: .*no.edgelist"),
        ({"topology": "rnig"}, "topology: unknown topology 'rnig'; did you mean 'ring'?"),
        ({"topology": "hypercube", "learners": "6"}, "topology: "),
        ({"budget.epochs": "0"}, "budget.epochs must be more than 0, got 0"),
        ({"checkpoint.every_epochs": "0"}, "checkpoint.every_epochs must be more than 0"),
        ({"optimizer.nesterov": "true", "optimizer.momentum": "0"}, "nesterov needs .* a momentum above 0"),
        ({"optimizer.nesterov": "true", "optimizer.name": "adam"}, "nesterov needs optimizer.name sgd"),
        ({"schedule.warmup_epochs": "50", "budget.epochs": "5"}, "warmup_epochs 50 is longer than the run"),
        ({"slow": "9:2"}, "slow needs"),
        ({"slow": "0:inf"}, "slow needs .* got '0:inf'"),
        ({"slow": "0:nan"}, "slow needs .* got '0:nan'"),
        ({"slow": "0:0.5"}, "slow needs .* got '0:0.5'"),
        ({"optimizer.momentum": "2"}, "optimizer.momentum must be at least 0 and below 1, got 2.0"),
        ({"optimizer.lr": "inf"}, "optimizer.lr must be at least 0 and finite, got inf"),
        ({"settings.dropout": "5"}, "settings.dropout must be at least 0 and below 1, got 5.0"),
        (
            {"max_lead": "3", "strategy": "dpsgd"},
            "max_lead 3 has no effect on dpsgd, which does not take it; leave it out",
        ),
        ({"wire": "float16", "strategy": "allreduce"}, "wire float16 has no effect on allreduce"),
        ({"settings.hidden": "0"}, "settings.hidden must be at least 1, got 0"),
        ({"task": "x"}, "task must be module:Class, such as .*, got 'x'"),
    ],
)
def test_contradictory_settings_are_refused_before_anything_starts(settings, message):
    with pytest.raises(ConfigError, match=message):
        recipes.resolve(recipes.table_of("tiny"), settings.items())


def test_the_resolved_configuration_can_be_written_and_resolved_again(tmp_path):
    from roundelay.training.config_table import to_toml

    config = recipes.resolve(recipes.table_of("tiny"), [("settings.dropout", "0.25"), ("slow", "0:10")])
    file = tmp_path / "config.toml"
    file.write_text(to_toml(recipes.as_table(config)))
    again = recipes.resolve(recipes.read_toml(file))
    assert recipes.as_table(again) == recipes.as_table(config)
    assert isinstance(again, Config)


def test_a_task_of_the_users_own_needs_no_change_of_ours(tmp_path, monkeypatch):
    (tmp_path / "my_task.py").write_text(
        "from roundelay.training.tiny import Digits\nclass Mine(Digits):\n    judged_by = '-loss'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert recipes.task_class("my_task:Mine").judged_by == "-loss"


def test_a_task_that_lacks_methods_is_refused_with_their_names(tmp_path, monkeypatch):
    (tmp_path / "own_half_task.py").write_text("import roundelay\nclass Half(roundelay.Task):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"'own_half_task:Half' does not define .*batch, .*loss"):
        recipes.task_class("own_half_task:Half")


def test_a_file_without_a_task_is_refused(tmp_path):
    (tmp_path / "empty.toml").touch()
    with pytest.raises(ConfigError, match="the key 'task' is missing; give a task as module:Class"):
        recipes.resolve(recipes.table_of(str(tmp_path / "empty.toml")))
