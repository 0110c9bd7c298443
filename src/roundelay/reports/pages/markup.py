"""HTML from values: text is escaped unless it is `Html` already, so that nothing in a run's files can become markup."""

from __future__ import annotations

import html
from collections.abc import Iterable

_VOID = {"br", "img", "input", "meta"}


class Html(str):
    """Text that is markup."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | int | bool | None) -> Html:
    """One element. An attribute that is None or False is left out; `class_` and `data_x` are `class` and `data-x`.

    >>> tag("p", "1 < 2", tag("b", "so"), class_="sum")
    '<p class="sum">1 &lt; 2<b>so</b></p>'
    """
    said = "".join(
        _attribute(key, value) for key, value in attributes.items() if value is not None and value is not False
    )
    if name in _VOID:
        return Html(f"<{name}{said}>")
    return Html(f"<{name}{said}>{join(children)}</{name}>")


def _attribute(key: str, value: str | int) -> str:
    key = key.rstrip("_").replace("_", "-")
    return f" {key}" if value is True else f' {key}="{html.escape(str(value))}"'


def join(parts: Iterable[str], between: str = "") -> Html:
    """Parts one after the other, each escaped unless it is Html.

    >>> join(["a", Html("<br>"), "<"])
    'a<br>&lt;'
    """
    return Html(escape(between).join(escape(part) for part in parts))


def escape(text: str) -> Html:
    """Text as markup."""
    return text if isinstance(text, Html) else Html(html.escape(text))
