"""Recipes: a task with its configuration, by name, from a TOML file, or as `module:Class`."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from roundelay import plugins
from roundelay.errors import ConfigError, check_installed, unknown
from roundelay.strategies.registry import takes_option
from roundelay.topology.registry import named
from roundelay.training.config import Config, with_settings
from roundelay.training.config_table import assigned, read
from roundelay.training.recipe_files import built_in

if TYPE_CHECKING:
    from roundelay.training.task import Task


def table_of(recipe: str) -> dict[str, Any]:
    """The configuration, as plain values, of a built-in recipe, of a TOML file, or of a task given as `module:Class`.

    Raises ConfigError if there is no such recipe, or if the file is no TOML.
    """
    if plugins.is_path(recipe):
        return {"task": recipe}
    path = Path(recipe) if recipe.endswith(".toml") else built_in().get(recipe)
    if path is None:
        raise ConfigError(
            unknown("recipe", recipe, built_in()) + "; or a file that ends in .toml, or a task as module:Class"
        )
    return read_toml(path)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError, with the line, if it cannot be read."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {error.strerror}") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # ValueError also for very long numbers, RecursionError for very deep brackets
        raise ConfigError(f"'{path}' is no TOML: {error}") from None


def task_of(config: Config) -> Task:
    """Build the task that the configuration names. The task may read its data now, which can take long."""
    return task_class(config.task)(config.settings, config.seed)


def task_class(name: str) -> type[Task]:
    """The Task class called `module:Class`. Modules are searched in the working directory, too.

    Raises ConfigError if the class cannot be imported, or is no Task.
    """
    from roundelay.training.task import Task

    if not plugins.is_path(name):
        raise ConfigError(f"task must be module:Class, such as roundelay.training.tiny:Digits, got '{name}'")
    found = plugins.load(name, "task", ConfigError)
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(f"'{name}' is no task; it must be a class derived from roundelay.Task")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"the task '{name}' does not define {', '.join(missing)}; every task must")
    return found


def resolve(table: Mapping[str, Any], settings: Iterable[tuple[str, str]] = (), *, data: bool = True) -> Config:
    """The checked configuration of a table, changed by (key, text) pairs from the command line.

    Raises ConfigError for any setting that cannot work; with `data`, also if the data that a run needs are not there, and
    MissingExtraError if a library is not installed.
    """
    settings = list(settings)
    values = dict(table) | {key: text for key, text in settings if key == "task"}
    kind = _kind(values)
    for key, text in settings:
        values = assigned(kind, values, key, text)
    config = read(kind, values)
    check(config)
    if "topology" in dict(settings) and not takes_option(config.strategy, "topology"):
        raise ConfigError(
            f"topology {config.topology} has no effect on {config.strategy}, which averages over all learners; leave it out, "
            "or choose another strategy, such as dpsgd"
        )
    if data:
        if config.metrics.tensorboard:
            check_installed("tensorboard", "TensorBoard output", "tensorboard")
        task_class(config.task).check_data(config.settings)
    return config


def from_table(table: Mapping[str, Any]) -> Config:
    """The configuration of a table. Raises ConfigError for a wrong key or value, but checks no combinations."""
    return read(_kind(table), table)


def _kind(table: Mapping[str, Any]) -> type[Config]:
    """Config with the settings of the table's task."""
    task = table.get("task")
    if task is None:
        raise ConfigError(
            "the key 'task' is missing; give a task as module:Class, such as roundelay.training.tiny:Digits"
        )
    if not isinstance(task, str):
        raise ConfigError(f"task must be module:Class, got {task!r}")
    return with_settings(task_class(task).Config)


def check(config: Config) -> None:
    """Raise ConfigError for settings that cannot work, alone or together. Needs no data."""
    from roundelay.errors import StrategyError, TopologyError
    from roundelay.training.build import strategy_of

    task_class(config.task).check(config.settings)
    config.slowness()
    if config.min_learners > config.learners:
        raise ConfigError(f"min_learners {config.min_learners} must not be more than the {config.learners} learners")
    if config.group_size > 1 and config.learners % config.group_size:
        raise ConfigError(f"group_size {config.group_size} must divide the {config.learners} learners")
    for key, number in {
        "budget.epochs": config.budget.epochs,
        "checkpoint.every_epochs": config.checkpoint.every_epochs,
    }.items():
        if number <= 0:
            raise ConfigError(f"{key} must be more than 0, got {number:g}")
    if config.optimizer.nesterov and not (config.optimizer.momentum and config.optimizer.name == "sgd"):
        raise ConfigError(
            f"optimizer.nesterov needs optimizer.name sgd and a momentum above 0, got {config.optimizer.name} "
            f"and {config.optimizer.momentum:g}"
        )
    if config.schedule.warmup_epochs > config.budget.epochs:
        raise ConfigError(
            f"schedule.warmup_epochs {config.schedule.warmup_epochs:g} is longer than the run, "
            f"budget.epochs {config.budget.epochs:g}"
        )
    try:
        strategy_of(config)
        _check_options(config)
        if config.group_size:
            named(config.topology, config.learners // config.group_size, config.seed)
    except StrategyError as error:
        raise ConfigError(f"strategy: {error}") from None
    except TopologyError as error:
        raise ConfigError(f"topology: {error}") from None


def _check_options(config: Config) -> None:
    """Raise ConfigError for an option that is set, although the strategy does not take it."""
    for option in ("max_lead", "wire"):
        default = Config.__dataclass_fields__[option].default
        if getattr(config, option) != default and not takes_option(config.strategy, option):
            raise ConfigError(
                f"{option} {getattr(config, option)} has no effect on {config.strategy}, which does not take it; "
                f"leave it out ({default}), or use adpsgd"
            )


def as_table(config: Config) -> dict[str, Any]:
    """The configuration as plain values; the inverse of `from_table`."""
    return dataclasses.asdict(cast(Any, config))
