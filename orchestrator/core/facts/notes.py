"""Notes on a job, which change no state.

``said`` is text of a program other than orch, or of the checkpoint library in the training process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from orchestrator.core.facts.fact import Fact
from orchestrator.units import plural

RAYLET_SILENT: Final = "its raylet does not answer; Ray has not declared it dead yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidElsewhere(Fact):
    """Base of the notes that another program, or the checkpoint library, has put into words."""

    said: str

    def sentence(self) -> str:
        return self.said


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUnreachable(Fact):
    """The actor of a rank does not answer."""

    kind: ClassVar[str] = "rank_unreachable"
    failure_code: ClassVar[str] = "unreachable"
    rank: int
    said: str = ""

    def sentence(self) -> str:
        return f"rank {self.rank} is out of reach: {self.said}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnreachable(Fact):
    """The node of a rank does not answer, and Ray has not declared it dead yet."""

    kind: ClassVar[str] = "node_unreachable"
    failure_code: ClassVar[str] = "unreachable"
    rank: int
    node: str = ""

    def sentence(self) -> str:
        return f"the node of rank {self.rank}: {RAYLET_SILENT}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachable(Fact):
    """A rank, or with None every rank's node, answers again."""

    kind: ClassVar[str] = "reachable"
    rank: int | None = None

    def sentence(self) -> str:
        return "every rank's node answers again" if self.rank is None else f"rank {self.rank} is within reach again"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorEnded(Fact):
    """The actor of a rank did not answer and was ended."""

    kind: ClassVar[str] = "actor_ended"
    rank: int

    def sentence(self) -> str:
        return f"the actor of rank {self.rank} did not answer and was ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputsIncomplete(SaidElsewhere):
    """Outputs that could not be copied home, and where they are."""

    kind: ClassVar[str] = "outputs"
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedCold(Fact):
    """A rank started in a fresh interpreter, which imports everything again: ``said`` is the fork server's reason for not forking one with the imports."""

    kind: ClassVar[str] = "started_cold"
    rank: int
    said: str

    def sentence(self) -> str:
        return f"rank {self.rank} began in a fresh interpreter, which takes seconds longer: {self.said}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusableRecord(Fact):
    """The exit record of a rank is damaged and ignored."""

    kind: ClassVar[str] = "unusable_record"
    rank: int
    said: str = ""

    def sentence(self) -> str:
        return f"the exit record of rank {self.rank} is left out: {self.said}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusableValues(Fact):
    """A rank reports values of the wrong type or range in these fields."""

    kind: ClassVar[str] = "unusable_values"
    failure_code: ClassVar[str] = "unusable_report"
    rank: int
    fields: tuple[str, ...]

    def sentence(self) -> str:
        fields = ", ".join(self.fields)
        return f"rank {self.rank} reports values that cannot be used (wrong type, not finite, out of range): {fields}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusableStatus(Fact):
    """A report on a snapshot holds values of the wrong type or range in these fields."""

    kind: ClassVar[str] = "unusable_status"
    failure_code: ClassVar[str] = "unusable_report"
    fields: tuple[str, ...]

    def sentence(self) -> str:
        return f"the status of a snapshot is left out: unusable {', '.join(self.fields)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportLeftOut(Fact):
    """A part of an actor's report could not be processed."""

    kind: ClassVar[str] = "report_left_out"
    failure_code: ClassVar[str] = "unusable_report"
    rank: int
    part: str
    error_type: str

    def sentence(self) -> str:
        return f"rank {self.rank}: {self.part} is left out: {self.error_type}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(SaidElsewhere):
    """A checkpoint could not be saved."""

    kind: ClassVar[str] = "save_failed"
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuarantined(SaidElsewhere):
    """A checkpoint was found damaged and quarantined."""

    kind: ClassVar[str] = "quarantined"
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFileNote(SaidElsewhere):
    """A note about a script's own checkpoint file; ``note_code`` is its kind."""

    kind: ClassVar[str] = "checkpoint_file"
    note_code: str

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

    def sentence(self) -> str:
        return f"checkpoint.interval auto: saves {self.said}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotMemory(Fact):
    """The snapshots of a rank take more memory than the job requests."""

    kind: ClassVar[str] = "snapshot_memory"
    snapshot_bytes: int
    asked_bytes: int

    def sentence(self) -> str:
        return (
            f"the snapshots of a rank take {self.snapshot_bytes / 1e9:.1f} GB of memory beside the script, and the job asks for"
            f" {self.asked_bytes / 1e9:.1f} GB in all; ask for more with resources_per_worker.memory"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotsOff(SaidElsewhere):
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

    def sentence(self) -> str:
        return (
            f"training has waited {self.waited_seconds:.1f} s for storage, in {plural(self.saves, 'save')}: each checkpoint that"
            " the job asks for is written before a third one is begun; a longer checkpoint.interval, or interval: auto, waits less"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsLeftOut(Fact):
    """Checkpoints that are not on storage, the newest of them that of ``step``."""

    kind: ClassVar[str] = "checkpoints_left_out"
    checkpoints: int
    step: int | None

    def sentence(self) -> str:
        count = f"{self.checkpoints} checkpoint{' is' if self.checkpoints == 1 else 's are'}"
        return f"{count} not on storage, which failed while the job trained on; the newest of them is that of step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRepaired(Fact):
    """The stored record held invalid values in these fields, which are left out."""

    kind: ClassVar[str] = "record_repaired"
    fields: tuple[str, ...]

    def sentence(self) -> str:
        return f"its stored record held unusable values, which are left out: {', '.join(self.fields)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedFact(Fact):
    """An event was left out: it held invalid ``fields``, or could not be folded because of an ``error_type``."""

    kind: ClassVar[str] = "dropped_fact"
    event: str
    fields: tuple[str, ...] = ()
    error_type: str = ""

    def sentence(self) -> str:
        why = f"unusable {', '.join(self.fields)}" if self.fields else self.error_type
        return f"a fact was left out: {self.event} ({why})"


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

    def sentence(self) -> str:
        return f"{self.note.sentence()} (the last of {self.most} notes of this kind; more are left out)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesLeftOut(Fact):
    """The job's log policies were not applied: ``pattern`` took longer than ``seconds``, or ``said`` is the error.

    Without ``pattern``, no processor was free for the search within ``seconds``.
    """

    kind: ClassVar[str] = "policies_left_out"
    pattern: str = ""
    seconds: float | None = None
    said: str = ""

    def sentence(self) -> str:
        if self.seconds is not None and not self.pattern:
            return f"the log policies were not searched for: no processor was free for that within {self.seconds:g} s"
        if self.seconds is not None:
            took = f"took longer than {self.seconds:g} s to search for and was left out: simplify it"
            return f"the log policy {self.pattern!r} {took}"
        return "the log policies could not be searched for" + (f": {self.said}" if self.said else "")
