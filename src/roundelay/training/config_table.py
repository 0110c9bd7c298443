"""Reads dataclasses from tables of plain values, checks every key and value, and writes such tables as TOML."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

from roundelay.errors import ConfigError, unknown

T = TypeVar("T")

_SHOWN = 200  # characters of a wrong value in a message


def read(kind: type[T], table: Mapping[str, Any], path: str = "") -> T:
    """An instance of the dataclass `kind` with the values of a table.

    Raises ConfigError, with the key, for an unknown or missing key, and for a value of the wrong type or size.

    >>> from roundelay.training.config import BudgetConfig
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
        large = " below 2^63" if type(value) is int and hint is int else ""
        raise ConfigError(f"{key} must be {_described(hint)}{large}, got {_shown(value)}")
    least, below = each.metadata.get("least"), each.metadata.get("below", math.inf)
    if least is not None and not least <= converted < below:
        limit = f" and below {below:g}" if below < math.inf else "" if math.isfinite(converted) else " and finite"
        raise ConfigError(f"{key} must be at least {least:g}{limit}, got {value!r}")
    return converted


def _converted(hint: Any, value: Any) -> Any:  # noqa: ANN401
    """`value` as the type `hint`; None if it is of another type."""
    if typing.get_origin(hint) is Literal:
        return value if value in typing.get_args(hint) else None
    if type(value) is int and abs(value) >= 2**63:  # beyond the integers of TOML
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
        return f"a list of values, each {_described(typing.get_args(hint)[0])}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(hint, str(hint))


def assigned(kind: type, table: dict[str, Any], key: str, text: str, path: str = "") -> dict[str, Any]:
    """A copy of the table in which the dotted `key` has the value that `text` stands for.

    Raises ConfigError for a key that `kind` does not have.

    >>> from roundelay.training.config import Config
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
    """Text of the command line as a value. Text that is no value of that type stays text, and `read` refuses it."""
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
    """All keys of a dataclass and of the dataclasses in it, dotted."""
    keys = []
    for name, hint in typing.get_type_hints(kind).items():
        inner = typing.cast(type, hint)
        keys += all_keys(inner, f"{path}{name}.") if dataclasses.is_dataclass(hint) else [path + name]
    return keys


def to_toml(table: Mapping[str, Any]) -> str:
    """The table as TOML."""
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
