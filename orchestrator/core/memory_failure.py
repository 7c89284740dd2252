"""The failure of a rank that the kernel killed because memory ran out: its own limit's, or the machine's. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from orchestrator.core.events import Failure
from orchestrator.core.states import FailureClass, OutOf

if TYPE_CHECKING:
    from orchestrator.core.attempt import Exit
    from orchestrator.core.events import MemoryUse
    from orchestrator.core.job import Job

_SIGKILL = 9
_CHILD_KILLED = re.compile(r"killed by signal: Killed")
"""What torch's DataLoader raises in the rank when one of its own processes was killed."""


def memory_failure(job: Job, ended: Exit) -> Failure | None:
    """The failure, when memory explains the end; None when it does not.

    A process of the rank may have been killed for memory long before the rank ended of something else.
    """
    memory = ended.memory
    if memory is None or memory.killed is None:
        return None
    if ended.signal != _SIGKILL and not _CHILD_KILLED.search(ended.error_message):
        return None
    asked = job.spec.resources.resources_per_worker.memory_bytes
    return Failure(
        failure_class=FailureClass.INFRA,
        code="memory_limit" if memory.killed is OutOf.LIMIT else "host_oom_kill",
        sentence=f"rank {ended.rank}: {_sentence(memory, asked)}",
        rank=ended.rank,
        exit_code=ended.exit_code,
        signal=ended.signal,
        log_tail=ended.log_tail,
        advice=_ADVICE[memory.killed],
    )


def _sentence(memory: MemoryUse, asked: int | None) -> str:
    wanted = f"it asked for {_size(asked)}" if asked else "it asked for none"
    used = f"it used {_size(memory.used_bytes)}, {wanted}"
    if memory.killed is OutOf.LIMIT and memory.limit_bytes is not None:
        return f"the kernel killed it because it reached its memory limit of {_size(memory.limit_bytes)} ({used})"
    return f"the kernel killed it because the machine's memory ran out ({used})"


_ADVICE = {
    OutOf.LIMIT: (
        "raise resources_per_worker.memory, or use a smaller batch, fewer data loader workers or less prefetching; snapshots"
        " in shared memory count too"
    ),
    OutOf.MACHINE: (
        "set resources_per_worker.memory to what each rank needs, so that no more ranks are placed on a machine than fit, or"
        " use a smaller batch, fewer data loader workers or less prefetching"
    ),
}


def _size(number: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 1024:.0f} KiB"
