"""Facts about why a rank's process ended.

``said`` is text of a program other than orch: the first line of an exception, a line of the kernel's log.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final

from orchestrator.core.facts.fact import Fact
from orchestrator.core.states import StopScope  # noqa: TC001  # conformance.py reads the annotations when it runs


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd(Fact):
    """Base of the causes of a rank's end; ``rank`` is None in evidence that is not yet assigned to one."""

    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonException(RankEnd):
    """The script raised ``error_type``; ``said`` is the first line of its message."""

    kind: ClassVar[str] = "exception"
    error_type: str
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCode(RankEnd):
    """The process ended by itself with a code other than 0."""

    kind: ClassVar[str] = "exit_code"
    exit_code: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryExitCode(RankEnd):
    """The process ended with a code that the job file lists in retry.exit_codes."""

    kind: ClassVar[str] = "retry_exit_code"
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSignal(RankEnd):
    """A signal ended the process, or a child of it; then ``exit_code`` is the process's exit code for that end."""

    kind: ClassVar[str] = "signal"
    signal: int
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminatedFromOutside(ProcessSignal):
    """SIGTERM that orch did not send ended the process."""

    kind: ClassVar[str] = "terminated"
    failure_code: ClassVar[str] = "stopped_from_outside"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedCrash(RankEnd):
    """The rank ended with the same ``crash`` at the same step in two attempts in a row; ``step`` None: before its first."""

    kind: ClassVar[str] = "repeated_crash"
    crash: Fact
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftEarly(RankEnd):
    """The rank ended, in any way, after a request to stop that orch had not sent."""

    kind: ClassVar[str] = "left_early"
    failure_code: ClassVar[str] = "stopped_from_outside"
    scope: StopScope
    step: int | None = None
    total_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoExitStatus(RankEnd):
    """The process ended and left no exit status; without a rank: all of them did."""

    kind: ClassVar[str] = "no_exit_status"
    failure_code: ClassVar[str] = "gang_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLeftOut(RankEnd):
    """The script misses a file that an ignore file kept out of the job's copy of its working directory."""

    kind: ClassVar[str] = "file_left_out"
    path: str
    ignore_file: str


class Backend(StrEnum):
    """The library of a collective."""

    NCCL = "nccl"
    GLOO = "gloo"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTimeout(RankEnd):
    """Another rank did not reach a collective in time."""

    kind: ClassVar[str] = "collective_timeout"
    backend: Backend
    said: str = ""

    @property
    def code(self) -> str:
        """Return the code, by the library."""
        return f"{self.backend}_timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFull(RankEnd):
    """A write failed because the disk is full."""

    kind: ClassVar[str] = "disk_full"
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaOutOfMemory(RankEnd):
    """The rank's GPU had no free memory for an allocation."""

    kind: ClassVar[str] = "cuda_oom"
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteLoss(RankEnd):
    """The loss, a gradient or a parameter became NaN or infinite."""

    kind: ClassVar[str] = "nonfinite_loss"
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost(RankEnd):
    """Another rank ended in the middle of a collective."""

    kind: ClassVar[str] = "peer_lost"
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousTimeout(RankEnd):
    """The ranks did not find each other in time."""

    kind: ClassVar[str] = "rendezvous_timeout"
    said: str = ""


DERIVED_PORTS: Final = 100
"""A script that needs more ports counts on from MASTER_PORT, by less than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortTaken(RankEnd):
    """The rank could not bind ``port``. ``rendezvous_port`` is its MASTER_PORT, which is another one in every attempt.

    ``listening``: a socket waits at the port after the rank has ended. ``pid`` and ``program`` are its process, where it can be seen.
    """

    kind: ClassVar[str] = "port_taken"
    failure_code: ClassVar[str] = "port_in_use"
    port: int
    rendezvous_port: int | None = None
    listening: bool = False
    pid: int | None = None
    program: str = ""
    said: str = ""

    @property
    def chosen_by_orch(self) -> bool:
        """Whether the port is MASTER_PORT, or one of those after it."""
        return self.rendezvous_port is not None and 0 <= self.port - self.rendezvous_port < DERIVED_PORTS


class Problem(StrEnum):
    """Mistakes and shortages that only the text of an exception identifies."""

    SHARED_MEMORY = "shared_memory"
    HOST_MEMORY = "host_memory"
    RESUME_MISMATCH = "resume_mismatch"
    CHECKPOINT_MISMATCH = "checkpoint_mismatch"
    CHECKPOINT_BROKEN = "checkpoint_broken"
    SHAPE_MISMATCH = "shape_mismatch"
    DEVICE_ASSERT = "device_assert"
    IMPORT_ERROR = "import_error"
    PERMISSION = "permission"
    MISSING_FILE = "missing_file"
    PORT_IN_USE = "port_in_use"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptProblem(RankEnd):
    """The rank's output names a known problem."""

    kind: ClassVar[str] = "script_problem"
    problem: Problem
    said: str = ""

    @property
    def code(self) -> str:
        """Return the code, by the problem."""
        return self.problem.value
