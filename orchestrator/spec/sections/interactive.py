"""An interactive job's terminal."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, ClassVar

from orchestrator.spec.fields.kinds import Doc, Duration
from orchestrator.spec.fields.records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class InteractiveSpec(Record):
    """Terminal of each rank, which `orch attach` reaches; the job is ended when it is idle."""

    shorthand: ClassVar[str] = "write interactive: {idle_limit: 1h}"

    idle_limit: Annotated[
        timedelta,
        Duration(minimum=timedelta(seconds=1)),
        Doc("cancelled after this time without input, output, traffic of sessions and processor time, attached or not"),
    ] = timedelta(hours=1)
