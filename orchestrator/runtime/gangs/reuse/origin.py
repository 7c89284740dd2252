"""Determines which gangs may serve another job, and which names they have in Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from orchestrator.core.scheduler.resources import rank_size
from orchestrator.runtime.names import gang_name
from orchestrator.runtime.ranks.runtime_env import parts_of

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job


class Origin(NamedTuple):
    """The job and gang that a gang's actors and placement group were created for: Ray's names for them never change."""

    job_id: str
    gang: int

    @property
    def text(self) -> str:
        """Name of the gang, also used as a file name."""
        return gang_name(self.job_id, self.gang)

    @classmethod
    def parse(cls, text: str) -> Origin:
        """Return the origin of this name. Raises ValueError."""
        job_id, _, gang = text.rpartition("-g")
        return cls(job_id, int(gang))


class Shape(NamedTuple):
    """User, nodes and resources of a gang's placement group. A gang can replace another of the same shape."""

    uid: int
    nodes: tuple[str, ...]
    cpus: float
    memory: int


def origin_of(job: Job) -> Origin:
    """Return the origin of the gang that is created for this job."""
    return Origin(job.id, job.gang)


def shape_of(job: Job) -> Shape | None:
    """Return the shape of the job's gang; None where its actors serve this job alone.

    An actor may keep data of a job in its memory: secrets, access to a storage behind a URL, a terminal. A runtime
    environment is installed for one job. A used GPU may be quarantined before the next job, which a parked gang's
    reservation would prevent.
    """
    spec = job.spec
    cpus, gpus, memory = rank_size(job)
    alone = (
        gpus
        or spec.secrets
        or spec.interactive
        or parts_of(spec.runtime_env)
        or "://" in (spec.checkpoint.storage_path or "")
    )
    return None if alone else Shape(job.submission.uid, job.nodes, cpus, memory)


def is_spotless(job: Job) -> bool:
    """Whether nothing unusual happened to the gang: one attempt, all ranks ended with 0, all nodes answered."""
    return job.succeeded and job.attempt_number == 1 and not (job.degraded or job.gang_lost)
