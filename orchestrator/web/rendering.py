"""Templates and static files, read once; and how untrusted texts, states and colours look in them.

Every value in a template is escaped; it may be anything that a job wrote.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from orchestrator import units

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

STATE_SYMBOLS: Final = {
    "PENDING": "◷",
    "STARTING": "◔",
    "RUNNING": "▶",
    "DRAINING": "◕",
    "RECOVERING": "↻",
    "SUSPENDED": "‖",
    "SUCCEEDED": "✓",
    "FAILED": "✕",
    "CANCELLED": "⊘",
    "LOST": "✕",
    "PREEMPTED": "‖",
    "ABORTED": "⊘",
    "READY": "✓",
    "ok": "✓",
    "CORDONED": "⊘",
    "RESERVED": "⊘",
    "QUARANTINED": "✕",
    "UNREACHABLE": "✕",
}
"""Shapes shown beside the word, never instead of it, so that a state is not identified by colour alone."""

LOAD_LEVELS: Final = 8


def clean(value: object) -> str:
    """Return one line without control characters and without characters that change the direction of text."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c in "\n\t\r" else "\N{REPLACEMENT CHARACTER}" for c in text)


class Verbatim(str):
    """A text of several lines that the page shows as it is: escaped, but with its line breaks and tabs."""

    __slots__ = ()


def age(seconds: float) -> str:
    """Format a rough duration; below 100 seconds in steps of five, so that little is sent to browsers."""
    return units.age(seconds if seconds >= 100 else seconds // 5 * 5)


def stamp(at: float) -> str:
    """Format a time for the ``datetime`` attribute of ``<time>``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def symbol(state: str) -> str:
    """Return the shape beside a state's name."""
    return STATE_SYMBOLS.get(state, "·")


def level(ratio: float | None) -> int | None:
    """Return the step of a ratio on the scale of colours, from 0 to ``LOAD_LEVELS``; None for None."""
    return None if ratio is None else round(min(max(ratio, 0.0), 1.0) * LOAD_LEVELS)


def balance_text(balance: Mapping[str, Any] | None) -> str:
    """Return the balance of a job's GPUs: the band, and the worse of utilization and power; empty without figures."""
    if not balance:
        return ""
    known = balance.get("quantities") or {}
    spreads = {name: known[name]["cv"] for name in ("utilization", "power") if name in known}
    if not spreads:
        return ""
    worst = max(spreads, key=lambda name: float(spreads[name]))
    silent = len(balance.get("silent") or ())
    text = f"{balance.get('band') or ''} ({worst} CV {100 * spreads[worst]:.0f}%)".strip()
    return f"{text}, {silent} silent" if silent else text


MEDIA_TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
STATIC: Final = ("page.css", "page.js", "icon.svg")


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file of the page: its bytes, its media type, and its address, which changes with its content."""

    body: bytes
    media_type: str
    path: str


@lru_cache(maxsize=1)
def static_files() -> dict[str, StaticFile]:
    """Return the static files by name."""
    found = {}
    for name in STATIC:
        body = files("orchestrator.web").joinpath("static", name).read_bytes()
        path = f"/static/{sha256(body).hexdigest()[:12]}/{name}"
        found[name] = StaticFile(body, MEDIA_TYPES[name.rpartition(".")[2]], path)
    return found


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Return the templates' environment."""
    made = Environment(
        loader=PackageLoader("orchestrator.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {name: getattr(units, name) for name in ("size", "number", "percent", "duration", "clock")}
    made.filters |= {"clean": clean, "age": age, "stamp": stamp, "symbol": symbol, "level": level}
    made.filters["metric"] = lambda value, name: units.metric(name, value)
    made.filters["balance"] = balance_text
    made.filters["static"] = lambda name: static_files()[name].path
    made.finalize = _finalized
    made.globals["ui"] = made.get_template("macros.html").module
    return made


def _finalized(value: Any) -> Any:
    """Remove terminal control and bidirectional characters from plain text; return an empty text for None."""
    if value is None:
        return ""
    return clean(value) if type(value) is str else value


def render(template: str, **values: Any) -> str:
    """Render the template with these values."""
    return environment().get_template(template).render(**values)


def render_parts(template: str, names: Iterable[str], **values: Any) -> dict[str, str]:
    """Return the named blocks of a template, each as HTML: the parts that a live page replaces."""
    found = environment().get_template(template)
    return {name: "".join(found.blocks[name](found.new_context(values))).strip() for name in names}
