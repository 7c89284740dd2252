"""Collects the kernel's evidence about a rank's end: memory kills, and records of the kernel's log about its processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from orchestrator.core.facts.memory import OomCount, OomKill
from orchestrator.runtime.ranks.evidence.kernel_evidence import KernelWatch, MachineWatch, OomWatch
from orchestrator.runtime.ranks.evidence.process_watch import ProcessWatch

if TYPE_CHECKING:
    from orchestrator.core.facts.fact import Fact
    from orchestrator.runtime.spawn.lifeline import Exited

_SIGKILL: Final = 9


class ExitEvidence:
    """Evidence about the current process; older evidence is marked and does not count."""

    def __init__(self) -> None:
        self._machine = MachineWatch()
        self._oom: OomWatch | None = None
        self._kernel: KernelWatch | None = None
        self._pid = 0
        self.processes = ProcessWatch()

    def begin(self) -> None:
        """Prepare for a new process."""
        self.close()
        self._oom, self._pid = None, 0
        self._kernel = KernelWatch()
        self.processes.begin()

    def started(self, pid: int) -> None:
        """Record the number of the started process."""
        self._pid, self._oom = pid, OomWatch(pid)

    def mark(self) -> None:
        """Exclude the evidence up to now from any end."""
        if self._oom is not None:
            self._oom.mark()
        if self._kernel is not None:
            self._kernel.mark()
        self._machine.mark()

    def facts(self) -> tuple[Fact, ...]:
        """Return the kernel's facts about the rank's processes since the last mark."""
        killed = self._oom.killed() if self._oom else None
        found = self._kernel.facts(self._pid) if self._kernel and self._pid else ()
        return found if killed is None else (killed, *found)

    def killed_by_kernel(self, event: Exited, facts: tuple[Fact, ...]) -> bool:
        """Whether the kernel has killed a process of the rank because the machine had no memory left.

        The kernel's log names the process, where it is readable; else the machine's count has risen in the last moments.
        """
        if event.cause is not None:
            return False
        if event.signal == _SIGKILL and self._kernel is not None and self._kernel.readable:
            return any(isinstance(fact, OomKill | OomCount) for fact in facts)
        return self._machine.killed()

    def close(self) -> None:
        """Stop reading the kernel's log."""
        if self._kernel is not None:
            self._kernel.close()
