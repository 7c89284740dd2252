"""Facts about memory that ran out on a machine."""

from __future__ import annotations

from typing import ClassVar, Final

from orchestrator.core.codec import Integer, Text
from orchestrator.core.facts.rank_ends import RankEnd
from orchestrator.core.facts.words import of_rank, quoted
from orchestrator.spec.units import format_memory
from orchestrator.units import size

PAGE_BYTES: Final = 4096

_OOM: Final = "the kernel killed it because the machine's memory ran out"

_OOM_ADVICE: Final = (
    "ask for more with resources_per_worker.memory, or lower num_workers, prefetching or caching in the data loader"
)


class MemoryLimit(RankEnd, tag="memory_limit"):
    """The kernel killed the rank because its control group reached its limit."""

    used_bytes: Integer
    limit_bytes: Integer
    asked_bytes: Integer | None = None

    def sentence(self) -> str:
        used = _used(self.used_bytes, self.asked_bytes)
        # The kernel rounds a limit down to whole pages.
        as_asked = self.asked_bytes is not None and 0 <= self.asked_bytes - self.limit_bytes < PAGE_BYTES
        limit = format_memory(self.asked_bytes) if as_asked and self.asked_bytes else size(self.limit_bytes)
        return of_rank(self.rank, f"the kernel killed it because it reached its memory limit of {limit} ({used})")

    def advice(self, job_id: str = "JOB") -> str:
        return (
            "raise resources_per_worker.memory, or use a smaller batch, fewer data loader workers or less prefetching; snapshots"
            " in shared memory count too"
        )


class OomKill(RankEnd, tag="oom_kill"):
    """The kernel killed the rank, or a process of it, because the machine's memory ran out.

    ``used_bytes`` is what the rank used, ``asked_bytes`` what the job requested; ``pid`` and ``process`` are from the
    kernel's log. ``said`` is the line of a program that reports it.
    """

    failure_code: ClassVar[str] = "host_oom_kill"
    used_bytes: Integer | None = None
    asked_bytes: Integer | None = None
    pid: Integer | None = None
    process: Text = ""
    said: Text = ""

    def sentence(self) -> str:
        if self.used_bytes is not None:
            return of_rank(self.rank, f"{_OOM} ({_used(self.used_bytes, self.asked_bytes)})")
        named = f"kernel: Out of memory: Killed process {self.pid} ({self.process})" if self.pid is not None else ""
        return of_rank(self.rank, _OOM + quoted(self.said or named))

    def advice(self, job_id: str = "JOB") -> str:
        if self.used_bytes is None:
            return _OOM_ADVICE
        return (
            "set resources_per_worker.memory to what each rank needs, so that no more ranks are placed on a machine than fit, or"
            " use a smaller batch, fewer data loader workers or less prefetching"
        )


class OomCount(RankEnd, tag="oom_count"):
    """The count of memory kills in the rank's control group, read from ``path``, rose."""

    failure_code: ClassVar[str] = "host_oom_kill"
    path: Text
    before: Integer
    count: Integer

    def sentence(self) -> str:
        count = f"cgroup: oom_kill rose from {self.before} to {self.count} in {self.path}"
        return of_rank(self.rank, f"{_OOM} ({count})")

    def advice(self, job_id: str = "JOB") -> str:
        return _OOM_ADVICE


class KernelMessage(RankEnd, tag="kernel_message"):
    """A line of the kernel's log that names the rank's process and has no known meaning."""

    said: Text

    def sentence(self) -> str:
        return of_rank(self.rank, f"kernel: {self.said}")


def _used(used_bytes: int, asked_bytes: int | None) -> str:
    wanted = f"it asked for {format_memory(asked_bytes)}" if asked_bytes else "it asked for none"
    return f"it used {size(used_bytes)}, {wanted}"
