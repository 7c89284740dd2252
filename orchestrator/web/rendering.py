"""Templates and static files, read once. Every value in a template is escaped."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from orchestrator import units
from orchestrator.web import words

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    made.filters |= {name: getattr(words, name) for name in ("clean", "age", "stamp", "symbol", "level")}
    made.filters["metric"] = lambda value, name: units.metric(name, value)
    made.filters["balance"] = words.balance_text
    made.filters["static"] = lambda name: static_files()[name].path
    made.finalize = _finalized
    made.globals["ui"] = made.get_template("macros.html").module
    return made


def _finalized(value: Any) -> Any:
    """Remove terminal control and bidirectional characters from plain text; return an empty text for None."""
    if value is None:
        return ""
    return words.clean(value) if type(value) is str else value


def render(template: str, **values: Any) -> str:
    """Render the template with these values."""
    return environment().get_template(template).render(**values)


def render_parts(template: str, names: Iterable[str], **values: Any) -> dict[str, str]:
    """Return the named blocks of a template, each as HTML: the parts that a live page replaces."""
    found = environment().get_template(template)
    return {name: "".join(found.blocks[name](found.new_context(values))).strip() for name in names}
