"""A user's own class or function, given as `module:name`."""

from __future__ import annotations

import importlib
import re
import sys
import traceback

from roundelay.errors import RoundelayError, described


def is_path(text: str) -> bool:
    """Whether `text` has the form `module:name`.

    >>> is_path("my_package.graphs:star_of_rings"), is_path("random-ring")
    (True, False)
    """
    return re.fullmatch(r"\w+(\.\w+)*:\w+", text) is not None


def load(path: str, what: str, error: type[RoundelayError]) -> object:
    """Import the module of `module:name` and return the object of that name.

    The working directory is searched first, as with `python -m`. Raises `error` if the module cannot be imported or has
    no such name; `what` is the noun that the message uses for the object.
    """
    module_name, _, name = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ImportError as reason:
        raise error(
            f"cannot import the {what} '{path}': {reason}; modules are looked for in the working directory and among "
            "installed packages"
        ) from reason
    except Exception as reason:  # an error in the user's own module
        raise error(f"cannot import the {what} '{path}': {located(reason)}") from reason
    if not hasattr(module, name):
        raise error(f"the module '{module_name}' has no '{name}'")
    return getattr(module, name)


def located(error: BaseException) -> str:
    """The kind and the message of an error in a user's code, with the file and the line that raised it."""
    if isinstance(error, SyntaxError):  # its message has both
        return described(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{described(error)} ({last.filename}, line {last.lineno})"
