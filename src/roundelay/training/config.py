"""The configuration of a run: frozen dataclasses, read from TOML, every field checked before anything starts."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from roundelay.errors import ConfigError, unknown

T = TypeVar("T")

_SHOWN = 200  # characters of a value that is wrong


def at_least(least: float, default: Any) -> Any:  # noqa: ANN401  # dataclasses.field is typed so, too
    """A field whose value must be at least `least`."""
    return field(default=default, metadata={"least": least})


def fraction(default: float) -> Any:  # noqa: ANN401
    """A field whose value must be at least 0 and below 1."""
    return field(default=default, metadata={"least": 0.0, "below": 1.0})


@dataclass(frozen=True)
class TaskConfig:
    """Settings of a task without any; a task with settings has a frozen dataclass of its own, derived from this one."""


@dataclass(frozen=True)
class DataConfig:
    """Who trains on which samples.

    Attributes:
        batch: samples per learner and step, at most.
        sharding: static: every learner has its share; dynamic: learners draw the next batch from a shared cursor, so that
            with stragglers, too, every sample is used exactly once an epoch.
        workers: processes per learner that prepare batches; 0 prepares them in the learner itself.
    """

    batch: int = at_least(1, 32)
    sharding: Literal["static", "dynamic"] = "static"
    workers: int = at_least(0, 0)


@dataclass(frozen=True)
class BudgetConfig:
    """How much to train, counted over all learners.

    Attributes:
        epochs: passes over the data; may be a fraction.
    """

    epochs: float = at_least(0.0, 10.0)


@dataclass(frozen=True)
class OptimizerConfig:
    """One of torch's optimizers.

    Attributes:
        name: which.
        lr: the learning rate before scaling.
        momentum: sgd's.
        nesterov: sgd's.
        weight_decay: of all weights, unless the task says otherwise.
        clip: the largest norm of a learner's gradient; 0: none.
    """

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = at_least(0.0, 0.1)
    momentum: float = fraction(0.9)
    nesterov: bool = False
    weight_decay: float = at_least(0.0, 0.0)
    clip: float = at_least(0.0, 0.0)


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the samples that all learners together have used.

    Attributes:
        reference_batch: the batch for which `optimizer.lr` is meant; it grows linearly with the batch of all learners. 0:
            as it is.
        warmup_epochs: linear, from the unscaled rate to the scaled one.
        shape: constant; factor: times `factor` per epoch, from epoch `decay_after_epochs` on; cosine: to zero.
        factor: 1/sqrt(2) in the papers.
        decay_after_epochs: where `factor` begins.
    """

    reference_batch: int = at_least(0, 0)
    warmup_epochs: float = at_least(0.0, 0.0)
    shape: Literal["constant", "factor", "cosine"] = "constant"
    factor: float = at_least(0.0, 0.5**0.5)
    decay_after_epochs: float = at_least(0.0, 10.0)


@dataclass(frozen=True)
class CheckpointConfig:
    """When learners save, and the mean model is evaluated.

    Attributes:
        every_epochs: between checkpoints.
        keep: so many, and the best one.
    """

    every_epochs: float = at_least(0.0, 1.0)
    keep: int = at_least(1, 2)


@dataclass(frozen=True)
class MetricsConfig:
    """What a run writes down.

    Attributes:
        every_s: between rows of one learner.
        tensorboard: write its event files too (an extra).
        audit: write down every chunk used and the sums of weights and updates, to see what faults have cost.
    """

    every_s: float = at_least(0.0, 1.0)
    tensorboard: bool = False
    audit: bool = False


@dataclass(frozen=True)
class Config:
    """The configuration of a run.

    Attributes:
        task: `module:Class` of the Task.
        learners: how many learners the run has.
        strategy: how learners average: a name of `roundelay.strategies.registry`, or `module:Class`.
        topology: which learners average with each other: a name of `roundelay.topology`, a graph or matrix file, or
            `module:function`. Strategies that average over all learners ignore it.
        group_size: learners per super-learner; 1: none; 0: the learners of one machine.
        max_lead: for adpsgd: after so many own steps without an exchange a learner waits for one.
        wire: for adpsgd: the type in which float32 weights travel between machines.
        min_learners: if fewer learners live, the run is saved and stopped.
        seed: of weights, shuffling, augmentation and random topologies.
        slow: `LEARNER:FACTOR` makes the steps of a learner so many times longer; several are separated by commas.
        settings: those of the task.
    """

    task: str
    learners: int = at_least(1, 4)
    strategy: str = "adpsgd"
    topology: str = "random-ring"
    group_size: int = at_least(0, 1)
    max_lead: int = at_least(1, 16)
    wire: Literal["float32", "float16", "bfloat16"] = "float32"
    min_learners: int = at_least(1, 1)
    seed: int = at_least(0, 0)
    slow: str = ""
    settings: TaskConfig = TaskConfig()
    data: DataConfig = DataConfig()
    budget: BudgetConfig = BudgetConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()

    def slowness(self) -> dict[int, float]:
        """The factor of every slowed learner. Raises ConfigError if `slow` has another form than `LEARNER:FACTOR`.

        >>> Config("m:T", slow="0:10,3:2").slowness()
        {0: 10.0, 3: 2.0}
        """
        factors = {}
        for entry in filter(None, self.slow.split(",")):
            learner, _, factor = entry.partition(":")
            try:
                factors[int(learner)] = float(factor)
            except ValueError:
                factors[-1] = 0.0
            if not (
                min(factors) >= 0 and max(factors) < self.learners and all(1 <= f < math.inf for f in factors.values())
            ):
                raise ConfigError(
                    f"slow needs LEARNER:FACTOR with a learner below {self.learners} and a factor of at least 1, "
                    f"such as 0:10, got '{entry}'"
                )
        return factors


def read(kind: type[T], table: Mapping[str, Any], path: str = "") -> T:
    """An instance of the dataclass `kind` from a table of plain values, such as TOML has.

    Raises ConfigError for an unknown key, a missing one, or a value of the wrong type or size; it names the key.

    >>> read(BudgetConfig, {"epochs": 3})
    BudgetConfig(epochs=3.0)
    >>> read(BudgetConfig, {"epoch": 3})
    Traceback (most recent call last):
    roundelay.errors.ConfigError: unknown key 'epoch'; did you mean 'epochs'? Known: epochs
    """
    hints = typing.get_type_hints(kind)
    fields = {each.name: each for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            raise ConfigError(unknown("key", path + key, [path + name for name in fields]))
    for name, each in fields.items():
        if name not in table and each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            raise ConfigError(f"the key '{path}{name}' is missing; it has no default")
    values = {key: _checked(hints[key], fields[key], value, path + key) for key, value in table.items()}
    return kind(**values)


def _checked(hint: Any, each: dataclasses.Field[Any], value: Any, key: str) -> Any:  # noqa: ANN401
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} is a table of settings, got {_shown(value)}")
        return read(typing.cast(type[Any], hint), value, key + ".")
    converted = _converted(hint, value)
    if converted is None:
        raise ConfigError(f"{key} must be {_described(hint)}, got {_shown(value)}")
    least, below = each.metadata.get("least"), each.metadata.get("below", math.inf)
    if least is not None and not least <= converted < below:
        limit = "" if below == math.inf else f" and below {below:g}"
        raise ConfigError(f"{key} must be at least {least:g}{limit}, got {value!r}")
    return converted


def _converted(hint: Any, value: Any) -> Any:  # noqa: ANN401
    """`value` as that type, or None."""
    if typing.get_origin(hint) is Literal:
        return value if value in typing.get_args(hint) else None
    if type(value) is int and abs(value) >= 2**63:  # more than TOML has
        return None
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
        kind = typing.get_args(hint)[0]
        converted = tuple(_converted(kind, each) for each in value)
        return None if None in converted else converted
    return value if type(value) is hint else None


def _shown(value: Any) -> str:  # noqa: ANN401
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number with thousands of digits"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _described(hint: Any) -> str:  # noqa: ANN401
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return f"a list, each of it {_described(typing.get_args(hint)[0])}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(hint, str(hint))


def assigned(kind: type, table: dict[str, Any], key: str, text: str, path: str = "") -> dict[str, Any]:
    """The table with `key` (dotted) set to what `text` means for that field.

    >>> assigned(Config, {}, "data.batch", "64")
    {'data': {'batch': 64}}
    """
    name, _, rest = key.partition(".")
    hints = typing.get_type_hints(kind)
    if name not in hints or (rest and not dataclasses.is_dataclass(hints[name])):
        raise ConfigError(unknown("key", path + key, all_keys(kind, path)))
    if rest:
        inner = assigned(typing.cast(type, hints[name]), dict(table.get(name, {})), rest, text, f"{path}{name}.")
        return table | {name: inner}
    if dataclasses.is_dataclass(hints[name]):
        raise ConfigError(
            f"{key} is a table; set one of {', '.join(all_keys(typing.cast(type, hints[name]), key + '.'))}"
        )
    return table | {name: _parsed(hints[name], text)}


def _parsed(hint: Any, text: str) -> Any:  # noqa: ANN401
    """Text of the command line as a value; what cannot be one stays text and is refused by `read`."""
    if typing.get_origin(hint) is tuple:
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text  # as in TOML, or without brackets
        return [_parsed(typing.get_args(hint)[0], each.strip()) for each in inner.split(",") if each.strip()]
    if hint is bool:
        return {"true": True, "false": False}.get(text, text)
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            return text
    return text


def all_keys(kind: type, path: str = "") -> list[str]:
    """Every key of a configuration, dotted."""
    keys = []
    for name, hint in typing.get_type_hints(kind).items():
        inner = typing.cast(type, hint)
        keys += all_keys(inner, f"{path}{name}.") if dataclasses.is_dataclass(hint) else [path + name]
    return keys


def to_toml(table: Mapping[str, Any]) -> str:
    """TOML of nested plain values: what we write, we can read."""
    return "\n".join(_toml_lines(table, "")) + "\n"


def _toml_lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{key} = {_toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield f"\n[{path}{key}]"
            yield from _toml_lines(value, f"{path}{key}.")


def _toml_value(value: Any) -> str:  # noqa: ANN401
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'


def with_settings(kind: type[TaskConfig]) -> type[Config]:
    """`Config` whose `settings` are those of one task."""
    settings = ("settings", kind, field(default_factory=kind))
    return typing.cast("type[Config]", dataclasses.make_dataclass("Config", [settings], bases=(Config,), frozen=True))
