"""The part of the SQLite store that accepts single jobs and finds matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.core import events as ev
    from orchestrator.core.job.record import Job
    from orchestrator.store.sql.matrix_queries import MatrixReader

T = TypeVar("T")


class MatrixReads(ABC):
    """Accepts single jobs and finds matrices; its abstract methods are those of the store's other parts."""

    _reader: MatrixReader

    @abstractmethod
    async def _read(self, question: Callable[[], T]) -> T:
        """Run a query in the reading thread."""

    @abstractmethod
    async def submit_all(self, events: Sequence[ev.JobSubmitted]) -> tuple[list[Job], bool]:
        """Accept the jobs of one submission, all or none; see ``port.Store.submit_all``."""

    async def submit(self, event: ev.JobSubmitted) -> tuple[Job, bool]:
        """Accept a job; see ``port.Store.submit``."""
        (job,), created = await self.submit_all([event])
        return job, created

    async def matrix_jobs(self, matrix_id: str) -> list[Job]:
        """Return the jobs of a matrix, reruns included, in order of arrival."""
        return await self._read(lambda: self._reader.matrix_jobs(matrix_id))

    async def find_matrix(self, reference: str, uid: int) -> str | None:
        """Return the id of the matrix that a reference of this user means; see ``port.Store.find_matrix``."""
        return await self._read(lambda: self._reader.find_matrix(reference, uid))
