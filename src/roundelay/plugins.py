"""A user's own class or function by its path `module:name`: as good as a built-in one wherever names are taken."""

from __future__ import annotations

import importlib
import re
import sys

from roundelay.errors import RoundelayError


def is_path(text: str) -> bool:
    """Whether `text` has the form `module:name`.

    >>> is_path("my_package.graphs:star_of_rings"), is_path("random-ring")
    (True, False)
    """
    return re.fullmatch(r"\w+(\.\w+)*:\w+", text) is not None


def load(path: str, what: str, error: type[RoundelayError]) -> object:
    """What `module:name` names. The working directory is searched first, as `python -m` does.

    Raises `error` if the module cannot be imported or has no such name; `what` is the noun used in that message.
    """
    module_name, _, name = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module_name), name)
    except ImportError as reason:
        raise error(f"cannot import the {what} '{path}': {reason}") from reason
    except AttributeError:
        raise error(f"the module '{module_name}' has no '{name}'") from None
