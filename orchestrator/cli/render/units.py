"""Formats numbers and times for people, and parses times that people type."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

from orchestrator.api.errors import BadRequestError
from orchestrator.figures import figure

if TYPE_CHECKING:
    from orchestrator.cli.console import Glyphs


BYTES: Final = "_bytes"


def age(seconds: float) -> str:
    """Format a rough duration in one unit, as in ``5m``: 0s to 99s, then minutes, hours, days."""
    seconds = max(0.0, seconds)
    for limit, size, unit in ((100, 1, "s"), (5940, 60, "m"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds // 86400)}d"


def span(seconds: float) -> str:
    """Format a duration in two units, as in ``1m20s``; below ten seconds with one decimal, below one with three."""
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{seconds:.3f}s"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 172800:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def size(count: float) -> str:
    """Format a size in powers of 1024, as in ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def number(value: float) -> str:
    """Format a count that is usually whole, as in ``2`` or ``0.5``."""
    return f"{value:g}"


def metric(name: str, value: float | None) -> str:
    """Format a metric that a script reports: a size if its name ends with ``_bytes``, else four significant digits."""
    if value is None or not math.isfinite(value):
        return "nan" if value is None or math.isnan(value) else str(value)
    return size(value) if name.lower().endswith(BYTES) else figure(value)


def clock(at: float | None, *, seconds: bool = True) -> str:
    """Format a time of day on this machine, with the date unless it is today; empty for None."""
    if at is None:
        return ""
    then = time.localtime(at)
    day = "" if then[:3] == time.localtime()[:3] else time.strftime("%Y-%m-%d ", then)
    return day + time.strftime("%H:%M:%S" if seconds else "%H:%M", then)


def bar(fraction: float, width: int, glyphs: Glyphs) -> str:
    """Return a progress bar of ``width`` columns."""
    filled = min(max(fraction, 0.0), 1.0) * width
    text = glyphs.full * int(filled)
    steps = len(glyphs.parts) + 1
    if glyphs.parts and (part := int((filled - int(filled)) * steps)):
        text += glyphs.parts[part - 1]
    return text + glyphs.empty * (width - len(text))


def parse_span(text: str, what: str) -> float:
    """Return the seconds in ``90s``, ``5m``, ``1h30m``, ``2d``. Raises BadRequestError, also for a missing unit."""
    from orchestrator.spec.problems import BadValueError
    from orchestrator.spec.units import parse_duration

    try:
        return parse_duration(text.strip()).total_seconds()
    except BadValueError as error:
        hint = error.hint if error.message.endswith("has no unit") else "write one like 30s, 5m, 1h30m or 2d"
        raise BadRequestError(f"{what}: {error.message}", hint=hint) from error


def parse_span_within(text: str, what: str, *, least: float, most: float) -> float:
    """Parse as ``parse_span`` does; raise BadRequestError as well for a duration outside the bounds."""
    seconds = parse_span(text, what)
    if not least <= seconds <= most:
        raise BadRequestError(f"{what} {text!r} is out of range", hint=f"write {span(least)} to {span(most)}")
    return seconds


def parse_start(text: str, what: str, now: float) -> str:
    """Return a time in ISO 8601, in UTC: ``now`` plus a span (``2h``), the next ``20:00``, or a local date and time.

    Raises BadRequestError.
    """
    from datetime import UTC, datetime, timedelta

    here = datetime.fromtimestamp(now, UTC).astimezone()
    try:
        if len(text) == len("20:00") and ":" in text:
            clock = datetime.strptime(text, "%H:%M")  # noqa: DTZ007 - only its hour and minute
            found = here.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
            found = found if found > here else found + timedelta(days=1)
        elif "T" in text or "-" in text:
            found = datetime.fromisoformat(text).astimezone()
        else:
            found = here + timedelta(seconds=parse_span(text, what))
    except (ValueError, OverflowError, BadRequestError) as error:
        hint = "write a span like 2h (from now), 20:00, or 2026-11-20T14:30"
        raise BadRequestError(f"{what} {text!r} is not a time", hint=hint) from error
    return found.astimezone(UTC).isoformat(timespec="seconds")


def parse_time(text: str, what: str, now: float) -> float:
    """Return seconds since the epoch from a span before ``now`` (``2h``) or a local date, as in ``2026-11-20T14:30``.

    Raises BadRequestError.
    """
    for form in ("%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M"):
        try:
            return time.mktime(time.strptime(text, form))
        except ValueError:
            continue
    try:
        return now - parse_span(text, what)
    except BadRequestError as error:
        raise BadRequestError(
            f"{what} {text!r} is not a time", hint="write a span like 2h (before now), or 2026-11-20T14:30"
        ) from error


def value_text(value: object) -> str:
    """Return a value as YAML writes it."""
    return ("true" if value else "false") if isinstance(value, bool) else str(value)
