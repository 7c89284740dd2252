"""TensorBoard: one event file for each job, which later attempts and daemons continue.

The last points of a killed process are cut off before they are written again, so that none is in the file twice.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.analysis.trackers.journal import Point
    from orchestrator.analysis.trackers.process import RunFacts

EVENTS: Final = "events.out.tfevents.0.orch"
LENGTH: Final = "length.json"


class EventFileRun:
    """Appends to ``FOLDER/tensorboard/JOB``."""

    def __init__(self, facts: RunFacts) -> None:
        self._folder = facts.folder / "tensorboard" / facts.job_id
        self._folder.mkdir(parents=True, exist_ok=True)
        self.where = f"tensorboard --logdir {self._folder}"
        self.facts = {"folder": str(self._folder)}
        self._path = self._folder / EVENTS
        self._written = -1
        self._file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b")
        self._cut(*self._known())
        self._records = RecordWriter(self._file)
        if self._file.tell() == 0:
            self._records.write(Event(wall_time=0.0, file_version="brain.Event:2").SerializeToString())

    def _known(self) -> tuple[int, int]:
        """Return the length up to which the file is complete, and the number of the newest point in it."""
        try:
            body = json.loads((self._folder / LENGTH).read_bytes())
            return int(body["bytes"]), int(body["number"])
        except (OSError, ValueError, TypeError, KeyError):
            return 0, -1

    def _cut(self, length: int, number: int) -> None:
        # A file that was removed is empty now: the points that follow are written all the same.
        length = min(length, os.fstat(self._file.fileno()).st_size)
        self._file.truncate(length)
        self._file.seek(length)
        self._written = number

    def missing(self, points: Sequence[Point]) -> Sequence[Point]:
        """Return the points after the newest one in the file."""
        return [point for point in points if point.number > self._written]

    def write(self, points: Sequence[Point]) -> None:
        """Append the points; the file has them when this returns."""
        for point in points:
            summary = Summary(value=[Summary.Value(tag=k, simple_value=v) for k, v in point.values.items()])
            self._records.write(Event(wall_time=point.at, step=point.step, summary=summary).SerializeToString())
            self._written = point.number
        self._file.flush()
        os.fsync(self._file.fileno())
        draft = self._folder / f".{LENGTH}.draft"
        draft.write_text(json.dumps({"bytes": self._file.tell(), "number": self._written}))
        draft.replace(self._folder / LENGTH)

    def kept(self) -> int | None:
        """Return None: every written point is kept."""
        return None

    def close(self, outcome: str) -> None:
        """Close the file; TensorBoard has no end of a run."""
        del outcome
        self._file.close()
