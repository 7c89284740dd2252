"""Facts against a node: failures that began there, and results of its health check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from orchestrator.core.facts.fact import Fact
from orchestrator.core.facts.words import CUT


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedFailures(Fact):
    """Several failures began at one node or GPU within a few hours; ``cause`` is that of the last, in job ``job_id``."""

    kind: ClassVar[str] = "repeated_failures"
    failures: int
    job_id: str
    cause: Fact

    def sentence(self) -> str:
        return f"{self.failures} failures began here, the last: {self.job_id}, {self.cause.sentence()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheckFailed(Fact):
    """A node's health check found problems."""

    kind: ClassVar[str] = "health_check_failed"
    problems: tuple[Fact, ...]

    def sentence(self) -> str:
        return f"its health check failed: {'; '.join(each.sentence() for each in self.problems)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskDamaged(Fact):
    """The disk under ``path`` returned other bytes than were written."""

    kind: ClassVar[str] = "disk_damaged"
    path: str

    def sentence(self) -> str:
        return f"the disk under {self.path} does not keep what is written"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUnwritable(Fact):
    """Nothing can be written under ``path``; ``said`` is the system's error."""

    kind: ClassVar[str] = "disk_unwritable"
    path: str
    said: str = ""

    def sentence(self) -> str:
        return f"nothing can be written to {self.path}" + (f": {self.said}" if self.said else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWrong(Fact):
    """A device computes a wrong result: ``operation`` is multiply or reduce, ``off`` is the error."""

    kind: ClassVar[str] = "device_wrong"
    device: str
    operation: str
    off: float | None = None

    def sentence(self) -> str:
        off = f" (off by {self.off:g})" if self.off is not None else ""
        return f"{self.device} {'reduces' if self.operation == 'reduce' else 'multiplies'} wrongly{off}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesSilent(Fact):
    """The devices did not compute within ``seconds``."""

    kind: ClassVar[str] = "devices_silent"
    seconds: float

    def sentence(self) -> str:
        return f"its devices did not compute within {self.seconds:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesFailed(Fact):
    """The computation on the devices failed; ``said`` is the last line of its error."""

    kind: ClassVar[str] = "devices_failed"
    said: str

    def sentence(self) -> str:
        return f"its devices do not compute: {self.said[:CUT]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverProblem(Fact):
    """A GPU's driver answers with the error ``said``."""

    kind: ClassVar[str] = "driver_problem"
    said: str

    def sentence(self) -> str:
        return self.said


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFailed(Fact):
    """The node could not be checked: its agent does not answer within ``seconds``, or at all; ``said`` is its error."""

    kind: ClassVar[str] = "check_failed"
    seconds: float | None = None
    said: str = ""

    def sentence(self) -> str:
        if self.seconds is not None:
            return f"its check took longer than {self.seconds:g} s"
        return f"its check did not end: {self.said}" if self.said else "its agent does not answer"


class Closure(StrEnum):
    """Reasons why nothing new is placed on a node."""

    CORDONED = "cordoned"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    UNREACHABLE = "unreachable"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeClosed(Fact):
    """The node would suit a waiting job, but nothing new is placed on it."""

    kind: ClassVar[str] = "node_closed"
    node: str
    state: Closure

    def sentence(self) -> str:
        return f"node {self.node} is {self.state.value}"
