"""The part of the store in memory that accepts single jobs and finds matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from orchestrator.store.errors import AmbiguousJobError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core import events as ev
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job


class MemoryMatrices(ABC):
    """Accepts single jobs and finds matrices; its abstract methods are those of the store's other parts."""

    _jobs: dict[JobId, Job]

    @abstractmethod
    def _check_open(self) -> None:
        """Raise StoreClosedError once the store is closed."""

    @abstractmethod
    async def submit_all(self, events: Sequence[ev.JobSubmitted]) -> tuple[list[Job], bool]:
        """Accept the jobs of one submission, all or none; see ``port.Store.submit_all``."""

    async def submit(self, event: ev.JobSubmitted) -> tuple[Job, bool]:
        """Accept a job; see ``port.Store.submit``."""
        (job,), created = await self.submit_all([event])
        return job, created

    async def matrix_jobs(self, matrix_id: str) -> list[Job]:
        """Return the jobs of a matrix, reruns included, in order of arrival."""
        self._check_open()
        return [job for job in self._jobs.values() if (cell := job.submission.matrix) and cell.matrix_id == matrix_id]

    async def find_matrix(self, reference: str) -> str | None:
        """Return the id of the matrix that a reference means; see ``port.Store.find_matrix``."""
        self._check_open()
        cells = [(job.submission.sequence, cell) for job in self._jobs.values() if (cell := job.submission.matrix)]
        ids = {cell.matrix_id for _, cell in cells}
        if reference in ids or reference in self._jobs:
            return reference if reference in ids else None
        named = max(((place, cell.matrix_id) for place, cell in cells if cell.name == reference), default=None)
        job = max((job.submission.sequence for job in self._jobs.values() if job.name == reference), default=0)
        if named is not None or job:
            return named[1] if named is not None and named[0] >= job else None
        found = sorted(i for i in ids if reference and i.startswith(reference))
        if not found or any(i.startswith(reference) for i in self._jobs):
            return None
        if len(found) > 1:
            raise AmbiguousJobError(reference, found)
        return found[0]
