"""Informs the daemon's parts of changes of jobs, once they are written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from orchestrator.core.events import Event
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.changes import Changes
    from orchestrator.daemon.job_reports import JobReports
    from orchestrator.daemon.job_trackers import JobTrackers
    from orchestrator.daemon.jobs.progress_intake import ProgressIntake
    from orchestrator.daemon.jobs.tidying import Tidying
    from orchestrator.daemon.nodes.warming import IdleWorkers
    from orchestrator.daemon.search.searches import Searches
    from orchestrator.daemon.web_hooks import Notifier


class JobObservers:
    """The loop's listeners. ``watchers`` see each event with the record after it; ``spawn`` runs a background task."""

    def __init__(
        self,
        *,
        changes: Changes,
        notifier: Notifier,
        idle_workers: IdleWorkers,
        intake: ProgressIntake,
        tidying: Tidying,
        reports: JobReports,
        trackers: JobTrackers,
        searches: Searches,
        watchers: Sequence[Callable[[Job, Event], None]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._changes = changes
        self._notifier = notifier
        self._idle_workers = idle_workers
        self._intake = intake
        self._tidying = tidying
        self.reports = reports
        self.trackers = trackers
        self.searches = searches
        self._watchers = watchers
        self._spawn = spawn

    def observed(self, job: Job, event: Event) -> None:
        """Handle a written event."""
        for watch in self._watchers:
            watch(job, event)

    def changed(self, job: Job) -> None:
        """Handle a changed record."""
        if job.spec.notify:
            self._notifier.wake()
        self._changes.touch(job.id)
        self._idle_workers.changed(job)
        self.trackers.changed(job)
        self.searches.changed(job)

    def ended(self, job: Job) -> None:
        """Handle a job's end."""
        self._idle_workers.ended(job.id)
        self._intake.ended(job.id)
        self.trackers.ended(job)  # before its secrets go
        self._tidying.drop_secrets(job.id)
        self._spawn(self._tidying.after([job.id]))
        self.reports.ended(job)
        self.searches.changed(job)
