"""Facts against a node: failures that began there, and results of its health check."""

from __future__ import annotations

from enum import StrEnum

from orchestrator.core.codec import Integer, Number, Text
from orchestrator.core.facts.fact import Fact, FactRecord
from orchestrator.core.facts.words import CUT


class RepeatedFailures(FactRecord, tag="repeated_failures"):
    """Several failures began at one node or GPU within a few hours; ``cause`` is that of the last, in job ``job_id``."""

    failures: Integer
    job_id: Text
    cause: Fact

    def sentence(self) -> str:
        return f"{self.failures} failures began here, the last: {self.job_id}, {self.cause.sentence()}"


class HealthCheckFailed(FactRecord, tag="health_check_failed"):
    """A node's health check found problems."""

    problems: tuple[Fact, ...]

    def sentence(self) -> str:
        return f"its health check failed: {'; '.join(each.sentence() for each in self.problems)}"


class DiskDamaged(FactRecord, tag="disk_damaged"):
    """The disk under ``path`` returned other bytes than were written."""

    path: Text

    def sentence(self) -> str:
        return f"the disk under {self.path} does not keep what is written"


class DiskUnwritable(FactRecord, tag="disk_unwritable"):
    """Nothing can be written under ``path``; ``said`` is the system's error."""

    path: Text
    said: Text = ""

    def sentence(self) -> str:
        return f"nothing can be written to {self.path}" + (f": {self.said}" if self.said else "")


class DeviceWrong(FactRecord, tag="device_wrong"):
    """A device computes a wrong result: ``operation`` is multiply or reduce, ``off`` is the error."""

    device: Text
    operation: Text
    off: Number | None = None

    def sentence(self) -> str:
        off = f" (off by {self.off:g})" if self.off is not None else ""
        return f"{self.device} {'reduces' if self.operation == 'reduce' else 'multiplies'} wrongly{off}"


class DevicesSilent(FactRecord, tag="devices_silent"):
    """The devices did not compute within ``seconds``."""

    seconds: Number

    def sentence(self) -> str:
        return f"its devices did not compute within {self.seconds:g} s"


class DevicesFailed(FactRecord, tag="devices_failed"):
    """The computation on the devices failed; ``said`` is the last line of its error."""

    said: Text

    def sentence(self) -> str:
        return f"its devices do not compute: {self.said[:CUT]}"


class DriverProblem(FactRecord, tag="driver_problem"):
    """A GPU's driver answers with the error ``said``."""

    said: Text

    def sentence(self) -> str:
        return self.said


class CheckFailed(FactRecord, tag="check_failed"):
    """The node could not be checked: its agent does not answer within ``seconds``, or at all; ``said`` is its error."""

    seconds: Number | None = None
    said: Text = ""

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


class NodeClosed(FactRecord, tag="node_closed"):
    """The node would suit a waiting job, but nothing new is placed on it."""

    node: Text
    state: Closure

    def sentence(self) -> str:
        return f"node {self.node} is {self.state.value}"
