"""HTML as a test reads it: elements with their attributes, text, and tables."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

VOID = {"br", "img", "input", "link", "meta"}


class HtmlPage(HTMLParser):
    """A parsed page; an element that is left open, or closed without being open, is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.tables: list[list[list[str]]] = []
        self.scripts: list[tuple[dict[str, str], str]] = []
        self.titles: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    @property
    def addresses(self) -> list[str]:
        """Whatever an element loads or links to."""
        return [
            said[key] for _, said in self.elements for key in ("src", "href", "srcset", "action", "data") if key in said
        ]

    @property
    def report(self) -> dict[str, Any]:
        """The data of the charts."""
        (found,) = [text for said, text in self.scripts if said.get("id") == "report"]
        return dict(json.loads(found))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {key: value or "" for key, value in attrs}
        self.elements.append((tag, said))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "script":
            self.scripts.append((said, ""))
        elif tag == "h2":
            self.titles.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["script"]:
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif "style" not in self._open:
            self.text += data
            if "td" in self._open or "th" in self._open:
                self.tables[-1][-1][-1] += data
            if "h2" in self._open:
                self.titles[-1] += data
