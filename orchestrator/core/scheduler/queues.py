"""The queues between which an installation shares its GPUs, in the form that the scheduler needs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.spec.queues import DEFAULT_QUEUE, QueueSpec, guarantee

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job

HALF_LIFE_SECONDS: Final = 7 * 86400.0
AGEING_SECONDS: Final = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Settings for sharing GPUs: queues (none: all jobs are in one), how fast use is forgotten, ageing, user limits.

    ``user_jobs`` and ``user_gpus`` limit what a user runs at once; None is no limit. ``reclaim_idle`` is how many
    seconds all GPUs of a running job may be idle while others wait; None: forever.
    """

    queues: tuple[QueueSpec, ...] = ()
    half_life: float = HALF_LIFE_SECONDS
    ageing: float = AGEING_SECONDS
    user_jobs: int | None = None
    user_gpus: int | None = None
    reclaim_idle: float | None = None


class QueueTree:
    """The queues of a ``Sharing`` by name, with what follows from their parents.

    A job's queue that is not configured (it was accepted before there were queues) counts as an uppermost one of weight 1.
    """

    def __init__(self, queues: tuple[QueueSpec, ...]) -> None:
        self._specs = {queue.name: queue for queue in queues}
        self.configured = bool(queues)
        self.guaranteed = {queue.name: guarantee(queue, queues) for queue in queues}
        self.bounded = any(queue.maximum is not None for queue in queues)
        self._paths: dict[str, tuple[QueueSpec, ...]] = {}

    def queue_of(self, job: Job) -> str:
        """Return the queue in which the job counts; "" when none is configured."""
        return job.spec.queue if self.configured else ""

    def are_equals(self, one: Job, other: Job) -> bool:
        """Whether two jobs are of one queue and priority."""
        return one.priority == other.priority and self.queue_of(one) == self.queue_of(other)

    def path(self, name: str) -> tuple[QueueSpec, ...]:
        """Return a queue and those above it, the uppermost first; nothing when none is configured."""
        if not self.configured:
            return ()
        if name not in self._paths:
            found = [self._specs.get(name) or QueueSpec(name=name)]
            while found[0].parent:
                found.insert(0, self._specs[found[0].parent])
            self._paths[name] = tuple(found)
        return self._paths[name]

    def below(self, parent: str) -> list[QueueSpec]:
        """Return the configured queues under one; under "" the uppermost ones."""
        return [queue for queue in self._specs.values() if queue.parent == parent]

    def refusal(self, name: str) -> str | None:
        """Return why no job can be submitted to this queue; None when one can."""
        if not self.configured or name == DEFAULT_QUEUE:
            return None
        inner = sorted(queue.name for queue in self.below(name))
        if inner:
            return f"queue {name!r} has queues below it: name one of {', '.join(inner)}"
        if name not in self._specs:
            leaves = sorted({n for n in self._specs if not self.below(n)} | {DEFAULT_QUEUE})
            return f"there is no queue {name!r}; the queues are {', '.join(leaves)}"
        return None
