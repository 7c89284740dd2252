"""The store's queries about matrices, on one connection and in one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.store.errors import AmbiguousJobError
from orchestrator.store.sql.queries import Reader, id_range
from orchestrator.store.sql.statements import STATEMENTS

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job


class MatrixReader(Reader):
    """The reader with queries about matrices."""

    def matrix_jobs(self, matrix_id: str) -> list[Job]:
        """Return the jobs of a matrix, reruns included, in order of arrival."""
        return self._readable(self._connection.execute(STATEMENTS["jobs_of_matrix"], (matrix_id,)))

    def find_matrix(self, reference: str, uid: int) -> str | None:
        """Return the id of the matrix that a reference of this user means; see ``port.Store.find_matrix``."""
        if self._connection.execute(STATEMENTS["jobs_of_matrix"], (reference,)).fetchone() is not None:
            return reference
        if self._connection.execute(STATEMENTS["job_by_id"], (reference,)).fetchone() is not None:
            return None
        whose = self._named(reference, uid)
        named = self._connection.execute(STATEMENTS["newest_of_matrix_name"], whose).fetchone()
        job = self._connection.execute(STATEMENTS["newest_place_by_name"], whose).fetchone()
        if named is not None or job is not None:
            newer = named is not None and (job is None or named[0] >= job[0])
            return str(named[1]) if newer else None
        self._refuse_names_of_others(reference, uid)
        return self._only_matrix_with(reference)

    def _only_matrix_with(self, prefix: str) -> str | None:
        if not prefix or self._connection.execute(STATEMENTS["ids_by_prefix"], id_range(prefix)).fetchone() is not None:
            return None
        ids: list[str] = [
            row[0] for row in self._connection.execute(STATEMENTS["matrices_by_prefix"], id_range(prefix))
        ]
        if len(ids) > 1:
            raise AmbiguousJobError(prefix, ids)
        return ids[0] if ids else None
