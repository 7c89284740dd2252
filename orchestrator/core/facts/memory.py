"""Facts about memory that ran out on a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from orchestrator.core.facts.rank_ends import RankEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit(RankEnd):
    """The kernel killed the rank because its control group reached its limit."""

    kind: ClassVar[str] = "memory_limit"
    used_bytes: int
    limit_bytes: int
    asked_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKill(RankEnd):
    """The kernel killed the rank, or a process of it, because the machine's memory ran out.

    ``used_bytes`` is what the rank used, ``asked_bytes`` what the job requested; ``pid`` and ``process`` are from the
    kernel's log. ``said`` is the line of a program that reports it.
    """

    kind: ClassVar[str] = "oom_kill"
    failure_code: ClassVar[str] = "host_oom_kill"
    used_bytes: int | None = None
    asked_bytes: int | None = None
    pid: int | None = None
    process: str = ""
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomCount(RankEnd):
    """The count of memory kills in the rank's control group, read from ``path``, rose."""

    kind: ClassVar[str] = "oom_count"
    failure_code: ClassVar[str] = "host_oom_kill"
    path: str
    before: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelMessage(RankEnd):
    """A line of the kernel's log that names the rank's process and has no known meaning."""

    kind: ClassVar[str] = "kernel_message"
    said: str
