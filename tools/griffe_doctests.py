"""Shows the doctests of our docstrings as code; without this, Markdown would take `>>>` for a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fences every paragraph that begins with `>>>`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:  # noqa: ANN401 - griffe passes its loader too
        """Change the docstring before it is rendered."""
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(r"```python\n\g<0>\n```", obj.docstring.value)
