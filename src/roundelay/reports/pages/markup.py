"""HTML elements from values. Text is escaped unless it is `Html`, so nothing in a run's files can become markup."""

from __future__ import annotations

import html
from collections.abc import Iterable

_VOID = {"br", "img", "input", "meta"}


class Html(str):
    """Text that is markup already, and is not escaped again."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | int | bool | None) -> Html:
    """One element. An attribute that is None or False is left out; `class_` and `data_x` become `class` and `data-x`.

    >>> tag("p", "1 < 2", tag("b", "so"), class_="sum")
    '<p class="sum">1 &lt; 2<b>so</b></p>'
    """
    written = "".join(
        _attribute(key, value) for key, value in attributes.items() if value is not None and value is not False
    )
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def _attribute(key: str, value: str | int) -> str:
    key = key.rstrip("_").replace("_", "-")
    return f" {key}" if value is True else f' {key}="{html.escape(str(value))}"'


def join(parts: Iterable[str]) -> Html:
    """Parts one after the other; a part that is not Html is escaped.

    >>> join(["a", Html("<br>"), "<"])
    'a<br>&lt;'
    """
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))
