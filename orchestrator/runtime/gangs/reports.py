"""Validates the reports of a rank's actor again: an invalid part is skipped, and that is reported once."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator import clock
from orchestrator.core import codec
from orchestrator.core import events as ev
from orchestrator.core.conformance import repaired
from orchestrator.core.facts.notes import ReportLeftOut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.ids import JobId
    from orchestrator.runtime.ranks.rank_events import RankEvent
    from orchestrator.train.script.progress_facts import ProgressSnapshot


def usable(snapshot: ProgressSnapshot) -> ProgressSnapshot:
    """Return the progress with defaults for invalid values."""
    checked, names = repaired(snapshot)
    return replace(checked, unusable=(*checked.unusable, *names)) if names else checked


def usable_event(event: RankEvent) -> RankEvent:
    """Return the event with defaults for invalid values in it and in its end."""
    end = event.exit
    return repaired(replace(event, exit=codec.repaired(end)) if isinstance(end, ev.Exit) else event)[0]


class LeftOut:
    """The parts of one gang's reports that were skipped; each is reported once."""

    def __init__(self) -> None:
        self._reported: set[ReportLeftOut] = set()

    @contextmanager
    def of(
        self,
        job_id: JobId,
        rank: int,
        what: str,
        *,
        post: Callable[[Sequence[ev.Event]], None],
        log: FilteringBoundLogger,
    ) -> Iterator[None]:
        """Continue after an error in the block: log it, and add a note to the job."""
        try:
            yield
        except Exception as error:
            note = ReportLeftOut(rank=rank, part=what, error_type=type(error).__name__)
            if note in self._reported:
                return
            self._reported.add(note)
            log.exception("gang.report_left_out", job=job_id, rank=rank, what=what)
            post([ev.JobNoted(job_id=job_id, at=clock.now(), note=note)])
