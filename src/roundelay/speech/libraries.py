"""Libraries of the optional extras, imported when a function first needs them."""

from __future__ import annotations

import importlib
from typing import Any

from roundelay.errors import MissingExtraError


def library(name: str, purpose: str, extra: str = "speech") -> Any:  # noqa: ANN401  # a module without types
    """The module of that name. Raises MissingExtraError, which names the extra that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(purpose, extra) from error
