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
        raise error(f"cannot import the {what} '{path}': {described(reason)} ({place(reason)})") from reason
    if not hasattr(module, name):
        raise error(f"the module '{module_name}' has no '{name}'")
    return getattr(module, name)


def place(error: BaseException) -> str:
    """The file and the line of a user's code that raised `error`."""
    if isinstance(error, SyntaxError):  # raised by the import, and names the place itself
        return f"{error.filename}, line {error.lineno}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}, line {last.lineno}"
