# ruff: noqa: D102 - the base class documents the three methods
"""The kind of value for a moment in time in job.yaml. Must not name any key of job.yaml."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from orchestrator.spec.fields.kinds import Kind, Schema, written
from orchestrator.spec.problems import BadValueError, quoted

if TYPE_CHECKING:
    from orchestrator.spec.fields.nodes import Node

_LAST_YEAR = 2999
_REMEDY = "write 2026-11-25T08:00, or with its zone 2026-11-25T08:00+01:00"


class Moment(Kind):
    """A date and a time of day in ISO 8601; without a zone, in the zone of the machine that reads it."""

    def read(self, node: Node) -> datetime:
        text = written(node, "a date and time")
        try:
            found = datetime.fromisoformat(text)
            moment = (found if found.tzinfo else found.astimezone()).astimezone(UTC)
        except (ValueError, OverflowError, OSError) as error:
            raise BadValueError(f"expected a date and time, got {quoted(text)}", _REMEDY) from error
        if not 1970 < moment.year <= _LAST_YEAR or len(text) < len("2026-11-25T08"):
            raise BadValueError(f"expected a date and time, got {quoted(text)}", _REMEDY)
        return moment

    def write(self, value: datetime) -> str:
        return value.astimezone(UTC).isoformat()

    def describe(self) -> Schema:
        return {"type": "string", "minLength": 13, "maxLength": 64}
