"""The part of the store in memory that accepts single jobs and finds matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from orchestrator.store.errors import AmbiguousJobError, NamedByOthersError

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

    def _named(self, reference: str, uid: int) -> tuple[str, int]:
        """Return the name in a reference, and the user whose job it is: the one before its slash, or ``uid``."""
        user, slash, name = reference.rpartition("/")
        if slash:
            uid = next((j.submission.uid for j in reversed(self._jobs.values()) if j.submission.user == user), -1)
        return name, uid

    def _refuse_names_of_others(self, name: str, own: int) -> None:
        """Raise NamedByOthersError if only users other than ``own`` have jobs or matrices of this name."""
        newest: dict[int, tuple[str, str]] = {}
        for job in reversed(self._jobs.values()):
            cell = job.submission.matrix
            if name in (job.name, None if cell is None else cell.name):
                found = job.id if cell is None or job.name == name else cell.matrix_id
                newest.setdefault(job.submission.uid, (job.submission.user, found))
        if newest and own not in newest:
            raise NamedByOthersError(name, list(newest.values()))

    async def find_matrix(self, reference: str, uid: int) -> str | None:
        """Return the id of the matrix that a reference of this user means; see ``port.Store.find_matrix``."""
        self._check_open()
        name, owner = self._named(reference, uid)
        cells = [(job, cell) for job in self._jobs.values() if (cell := job.submission.matrix)]
        ids = {cell.matrix_id for _, cell in cells}
        if reference in ids or reference in self._jobs:
            return reference if reference in ids else None
        own = [(job.submission.sequence, cell) for job, cell in cells if job.submission.uid == owner]
        named = max(((place, cell.matrix_id) for place, cell in own if cell.name == name), default=None)
        job = max(
            (j.submission.sequence for j in self._jobs.values() if (j.name, j.submission.uid) == (name, owner)),
            default=0,
        )
        if named is not None or job:
            return named[1] if named is not None and named[0] >= job else None
        self._refuse_names_of_others(reference, uid)
        found = sorted(i for i in ids if reference and i.startswith(reference))
        if not found or any(i.startswith(reference) for i in self._jobs):
            return None
        if len(found) > 1:
            raise AmbiguousJobError(reference, found)
        return found[0]
