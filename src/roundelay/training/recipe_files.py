"""The files of the built-in recipes. Without torch, because the command line lists recipes in its help."""

from __future__ import annotations

import itertools
from pathlib import Path

_PACKAGED = Path(__file__).parents[1] / "recipes"  # in a wheel
_SOURCE = Path(__file__).parents[3] / "recipes"  # in a clone


def built_in() -> dict[str, Path]:
    """The files of the built-in recipes by name: `an4` is an4/config.toml, `an4/best` is an4/best.toml."""
    folder = _PACKAGED if _PACKAGED.is_dir() else _SOURCE
    found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.glob("*/*.toml"))}
    return {name.removesuffix("/config"): path for name, path in found.items()}


def summary(recipe: Path) -> str:
    """The comment at the beginning of the file of a recipe."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), recipe.read_text(encoding="utf-8").splitlines())
    return " ".join(line.removeprefix("#").strip() for line in lines)
