"""Finds why the kernel killed a rank for memory: its own limit, or the machine's. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from orchestrator.core.facts.memory import MemoryLimit, OomKill
from orchestrator.core.states import OutOf

if TYPE_CHECKING:
    from orchestrator.core.events import Exit
    from orchestrator.core.job.record import Job

_SIGKILL = 9
_CHILD_KILLED = re.compile(r"killed by signal: Killed")
"""The error of torch's DataLoader in the rank when one of its own processes was killed."""


def memory_cause(job: Job, ended: Exit) -> MemoryLimit | OomKill | None:
    """Return the cause, when memory explains the end; None when it does not.

    A process of the rank may have been killed for memory long before the rank ended for another reason.
    """
    memory = ended.memory
    if memory is None or memory.killed is None:
        return None
    if ended.signal != _SIGKILL and not _CHILD_KILLED.search(ended.error_message):
        return None
    asked = job.spec.resources.resources_per_worker.memory_bytes
    if memory.killed is OutOf.LIMIT:
        limit = memory.used_bytes if memory.limit_bytes is None else memory.limit_bytes
        return MemoryLimit(rank=ended.rank, used_bytes=memory.used_bytes, limit_bytes=limit, asked_bytes=asked)
    return OomKill(rank=ended.rank, used_bytes=memory.used_bytes, asked_bytes=asked)
