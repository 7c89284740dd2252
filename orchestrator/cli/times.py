"""Parses the durations and times that a user types on the command line."""

from __future__ import annotations

import time

from orchestrator.api.errors import BadRequestError
from orchestrator.units import duration


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
        raise BadRequestError(f"{what} {text!r} is out of range", hint=f"write {duration(least)} to {duration(most)}")
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
