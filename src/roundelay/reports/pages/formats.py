"""Values as the page shows them."""

from __future__ import annotations

MISSING = "–"


def config_value(value: object) -> str:
    """A value of a configuration or of machine.json.

    >>> config_value([1, True]), config_value(None), config_value(0.1 + 0.2)
    ('1, true', '–', '0.3')
    """
    if value is None:
        return MISSING
    if isinstance(value, list):
        return ", ".join(map(config_value, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def figure(value: float) -> str:
    """A number with four digits, or with all digits before the point."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def count(value: float) -> str:
    """A whole number, thousands separated by commas."""
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """A time in seconds, minutes or hours.

    >>> duration(4.21), duration(125), duration(7500)
    ('4.2 s', '2 min 5 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def event_text(event: dict[str, object]) -> str:
    """An event and its learner.

    >>> event_text({"event": "lost", "learner": 3})
    'lost, learner 3'
    """
    learner = event.get("learner")
    return str(event.get("event", "event")) + ("" if learner is None else f", learner {learner}")
