"""Which gangs may be taken over by another job, and under which name Ray knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from orchestrator.core.scheduler.placement import rank_size
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
        """Its name, also a file name."""
        return gang_name(self.job_id, self.gang)

    @classmethod
    def parse(cls, text: str) -> Origin:
        """Return the origin of this name. Raises ValueError."""
        job_id, _, gang = text.rpartition("-g")
        return cls(job_id, int(gang))


class Shape(NamedTuple):
    """What a gang's placement group reserves, where, and for which user. A gang can take the place of another of the same shape."""

    uid: int
    nodes: tuple[str, ...]
    cpus: float
    memory: int


def origin_of(job: Job) -> Origin:
    """Return the origin of the gang that is created for this job."""
    return Origin(job.id, job.gang)


def shape_of(job: Job) -> Shape | None:
    """Return the shape of the job's gang; None where its actors serve this job alone.

    An actor may keep something of a job in its memory: secrets, access to a storage behind a URL, a terminal. What Ray installed for
    one job is not for another. A GPU that ended one job may be quarantined before the next, which a reservation would prevent.
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
    """Whether nothing unusual happened to the gang: one attempt, whose ranks all ended with 0 on nodes that answered."""
    return job.succeeded and job.attempt_number == 1 and not (job.degraded or job.gang_lost)
