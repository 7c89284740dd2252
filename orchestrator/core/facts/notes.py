"""Notes on a job, which change no state.

``said`` is text of a program other than orch, or of the checkpoint library in the training process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from orchestrator.core.facts.fact import Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUnreachable(Fact):
    """The actor of a rank does not answer."""

    kind: ClassVar[str] = "rank_unreachable"
    failure_code: ClassVar[str] = "unreachable"
    rank: int
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnreachable(Fact):
    """The node of a rank does not answer, and Ray has not declared it dead yet."""

    kind: ClassVar[str] = "node_unreachable"
    failure_code: ClassVar[str] = "unreachable"
    rank: int
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachable(Fact):
    """A rank, or with None every rank's node, answers again."""

    kind: ClassVar[str] = "reachable"
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorEnded(Fact):
    """The actor of a rank did not answer and was ended."""

    kind: ClassVar[str] = "actor_ended"
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputsIncomplete(Fact):
    """Outputs that could not be copied home, and where they are."""

    kind: ClassVar[str] = "outputs"
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedCold(Fact):
    """A rank started in a fresh interpreter, which imports everything again: ``said`` is the fork server's reason for not forking one with the imports."""

    kind: ClassVar[str] = "started_cold"
    rank: int
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusableRecord(Fact):
    """The exit record of a rank is damaged and ignored."""

    kind: ClassVar[str] = "unusable_record"
    rank: int
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusableValues(Fact):
    """A rank reports values of the wrong type or range in these fields."""

    kind: ClassVar[str] = "unusable_values"
    failure_code: ClassVar[str] = "unusable_report"
    rank: int
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusableStatus(Fact):
    """A report on a snapshot holds values of the wrong type or range in these fields."""

    kind: ClassVar[str] = "unusable_status"
    failure_code: ClassVar[str] = "unusable_report"
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportLeftOut(Fact):
    """A part of an actor's report could not be processed."""

    kind: ClassVar[str] = "report_left_out"
    failure_code: ClassVar[str] = "unusable_report"
    rank: int
    part: str
    error_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Fact):
    """A checkpoint could not be saved."""

    kind: ClassVar[str] = "save_failed"
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuarantined(Fact):
    """A checkpoint was found damaged and quarantined."""

    kind: ClassVar[str] = "quarantined"
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFileNote(Fact):
    """A note about a script's own checkpoint file; ``note_code`` is its kind."""

    kind: ClassVar[str] = "checkpoint_file"
    note_code: str
    said: str

    @property
    def code(self) -> str:
        """Return the note's code."""
        return self.note_code


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveInterval(Fact):
    """The chosen interval between the job's saves: every ``steps`` steps. ``said`` explains the choice."""

    kind: ClassVar[str] = "interval"
    steps: int
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotMemory(Fact):
    """The snapshots of a rank take more memory than the job requests."""

    kind: ClassVar[str] = "snapshot_memory"
    snapshot_bytes: int
    asked_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotsOff(Fact):
    """A rank takes no snapshots in memory."""

    kind: ClassVar[str] = "snapshots_off"
    failure_code: ClassVar[str] = "snapshot_memory"
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageBacklog(Fact):
    """Training has waited for storage."""

    kind: ClassVar[str] = "storage_backlog"
    waited_seconds: float
    saves: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsLeftOut(Fact):
    """Checkpoints that are not on storage, the newest of them that of ``step``."""

    kind: ClassVar[str] = "checkpoints_left_out"
    checkpoints: int
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRepaired(Fact):
    """The stored record held invalid values in these fields, which are left out."""

    kind: ClassVar[str] = "record_repaired"
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedFact(Fact):
    """An event was left out: it held invalid ``fields``, or could not be folded because of an ``error_type``."""

    kind: ClassVar[str] = "dropped_fact"
    event: str
    fields: tuple[str, ...] = ()
    error_type: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastOfItsKind(Fact):
    """The last note of its kind that is kept: after ``most``, more are left out."""

    kind: ClassVar[str] = "last_of_its_kind"
    note: Fact
    most: int

    @property
    def code(self) -> str:
        """Return the note's code."""
        return self.note.code


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesLeftOut(Fact):
    """The job's log policies were not applied: ``pattern`` took longer than ``seconds``, or ``said`` is the error.

    Without ``pattern``, no processor was free for the search within ``seconds``.
    """

    kind: ClassVar[str] = "policies_left_out"
    pattern: str = ""
    seconds: float | None = None
    said: str = ""
