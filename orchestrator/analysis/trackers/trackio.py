"""Trackio: its local store, in ``FOLDER/trackio`` or TRACKIO_DIR. Each point has an id, which is stored once."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from orchestrator.analysis.trackers.names import PROJECT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.analysis.trackers.journal import Point
    from orchestrator.analysis.trackers.process import RunFacts


class TrackioRun:
    """Writes to the store itself: ``trackio.log`` accepts no times, and does not report what was kept."""

    def __init__(self, facts: RunFacts) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(facts.folder / "trackio"))
        from trackio.sqlite_storage import SQLiteStorage

        self._store = SQLiteStorage
        self._facts = facts
        self._project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        SQLiteStorage.validate_project_name(self._project)
        SQLiteStorage.init_db(self._project)
        self.facts = {"project": self._project, "folder": os.environ["TRACKIO_DIR"]}
        self.where = f"orch trackio {facts.job_id} (project {self._project} in {os.environ['TRACKIO_DIR']})"

    def missing(self, points: Sequence[Point]) -> Sequence[Point]:
        """Return all of them: the store skips ids that it has."""
        return points

    def write(self, points: Sequence[Point]) -> None:
        """Store the points in one transaction."""
        job_id = self._facts.job_id
        self._store.bulk_log(
            self._project,
            job_id,
            [dict(point.values) for point in points],
            steps=[point.step for point in points],
            timestamps=[datetime.fromtimestamp(point.at, UTC).isoformat() for point in points],
            config={**self._facts.config, "_Group": self._facts.group or None},
            log_ids=[f"{job_id}:{point.number}" for point in points],
            run_id=job_id,
        )

    def kept(self) -> int | None:
        """Return None: every written point is kept."""
        return None

    def close(self, outcome: str) -> None:
        """Do nothing: Trackio has no end of a run."""
        del outcome
