"""Notes on a job, which change no state.

``said`` is text of a program other than orch, or of the checkpoint library in the training process.
"""

from __future__ import annotations

from typing import ClassVar, Final

from orchestrator.core.codec import Integer, Number, Text
from orchestrator.core.facts.fact import Fact, FactRecord
from orchestrator.spec.units import format_memory
from orchestrator.units import duration, plural, size

RAYLET_SILENT: Final = "its raylet does not answer; Ray has not declared it dead yet"


class SaidElsewhere(FactRecord):
    """Base of the notes that another program, or the checkpoint library, has put into words."""

    said: Text

    def sentence(self) -> str:
        return self.said


class RankUnreachable(FactRecord, tag="rank_unreachable"):
    """The actor of a rank does not answer."""

    failure_code: ClassVar[str] = "unreachable"
    rank: Integer
    said: Text = ""

    def sentence(self) -> str:
        return f"rank {self.rank} is out of reach: {self.said}"


class NodeUnreachable(FactRecord, tag="node_unreachable"):
    """The node of a rank does not answer, and Ray has not declared it dead yet."""

    failure_code: ClassVar[str] = "unreachable"
    rank: Integer
    node: Text = ""

    def sentence(self) -> str:
        return f"the node of rank {self.rank}: {RAYLET_SILENT}"


class Reachable(FactRecord, tag="reachable"):
    """A rank, or with None every rank's node, answers again."""

    rank: Integer | None = None

    def sentence(self) -> str:
        return "every rank's node answers again" if self.rank is None else f"rank {self.rank} is within reach again"


class ActorEnded(FactRecord, tag="actor_ended"):
    """The actor of a rank did not answer and was ended."""

    rank: Integer

    def sentence(self) -> str:
        return f"the actor of rank {self.rank} did not answer and was ended"


class OutputsIncomplete(SaidElsewhere, tag="outputs"):
    """Outputs that could not be copied home, and where they are."""


class StartedCold(FactRecord, tag="started_cold"):
    """A rank started in a fresh interpreter, which imports everything again: ``said`` is the fork server's reason for not forking one with the imports."""

    rank: Integer
    said: Text

    def sentence(self) -> str:
        return f"rank {self.rank} began in a fresh interpreter, which takes seconds longer: {self.said}"


class UnusableRecord(FactRecord, tag="unusable_record"):
    """The exit record of a rank is damaged and ignored."""

    rank: Integer
    said: Text = ""

    def sentence(self) -> str:
        return f"the exit record of rank {self.rank} is left out: {self.said}"


class UnusableValues(FactRecord, tag="unusable_values"):
    """A rank reports values of the wrong type or range in these fields."""

    failure_code: ClassVar[str] = "unusable_report"
    rank: Integer
    fields: tuple[Text, ...]

    def sentence(self) -> str:
        fields = ", ".join(self.fields)
        return f"rank {self.rank} reports values that cannot be used (wrong type, not finite, out of range): {fields}"


class ReportLeftOut(FactRecord, tag="report_left_out"):
    """A part of an actor's report could not be processed."""

    failure_code: ClassVar[str] = "unusable_report"
    rank: Integer
    part: Text
    error_type: Text

    def sentence(self) -> str:
        return f"rank {self.rank}: {self.part} is left out: {self.error_type}"


class SaveFailed(SaidElsewhere, tag="save_failed"):
    """A checkpoint could not be saved."""


class CheckpointQuarantined(SaidElsewhere, tag="quarantined"):
    """A checkpoint was found damaged and quarantined."""


class CheckpointFileNote(SaidElsewhere, tag="checkpoint_file"):
    """A note about a script's own checkpoint file; ``note_code`` is its kind."""

    note_code: Text

    @property
    def code(self) -> str:
        """Return the note's code."""
        return self.note_code


class SaveInterval(FactRecord, tag="interval"):
    """The chosen interval between the job's saves: every ``steps`` steps. ``said`` explains the choice."""

    steps: Integer
    said: Text

    def sentence(self) -> str:
        return f"checkpoint.interval auto: saves {self.said}"


class SnapshotMemory(FactRecord, tag="snapshot_memory"):
    """The snapshots of a rank take more memory than the job requests."""

    snapshot_bytes: Integer
    asked_bytes: Integer

    def sentence(self) -> str:
        return (
            f"the snapshots of a rank take {size(self.snapshot_bytes)} of memory beside the script, and the job asks for"
            f" {format_memory(self.asked_bytes)} in all; ask for more with resources_per_worker.memory"
        )


class SnapshotsOff(SaidElsewhere, tag="snapshots_off"):
    """A rank takes no snapshots in memory."""

    failure_code: ClassVar[str] = "snapshot_memory"


class StorageBacklog(FactRecord, tag="storage_backlog"):
    """Training has waited for storage."""

    waited_seconds: Number
    saves: Integer

    def sentence(self) -> str:
        return (
            f"training has waited {duration(self.waited_seconds)} for storage, in {plural(self.saves, 'save')}: each checkpoint that"
            " the job asks for is written before a third one is begun; a longer checkpoint.interval, or interval: auto, waits less"
        )


class CheckpointsLeftOut(FactRecord, tag="checkpoints_left_out"):
    """Checkpoints that are not on storage, the newest of them that of ``step``."""

    checkpoints: Integer
    step: Integer | None

    def sentence(self) -> str:
        count = f"{self.checkpoints} checkpoint{' is' if self.checkpoints == 1 else 's are'}"
        return f"{count} not on storage, which failed while the job trained on; the newest of them is that of step {self.step}"


class DroppedFact(FactRecord, tag="dropped_fact"):
    """An event was left out: it held invalid ``fields``, or could not be folded because of an ``error_type``."""

    event: Text
    fields: tuple[Text, ...] = ()
    error_type: Text = ""

    def sentence(self) -> str:
        why = f"unusable {', '.join(self.fields)}" if self.fields else self.error_type
        return f"a fact was left out: {self.event} ({why})"


class LastOfItsKind(FactRecord, tag="last_of_its_kind"):
    """The last note of its kind that is kept: after ``most``, more are left out."""

    note: Fact
    most: Integer

    @property
    def code(self) -> str:
        """Return the note's code."""
        return self.note.code

    def sentence(self) -> str:
        return f"{self.note.sentence()} (the last of {self.most} notes of this kind; more are left out)"


class PoliciesLeftOut(FactRecord, tag="policies_left_out"):
    """The job's log policies were not applied: ``pattern`` took longer than ``seconds``, or ``said`` is the error.

    Without ``pattern``, no processor was free for the search within ``seconds``.
    """

    pattern: Text = ""
    seconds: Number | None = None
    said: Text = ""

    def sentence(self) -> str:
        if self.seconds is not None and not self.pattern:
            return f"the log policies were not searched for: no processor was free for that within {duration(self.seconds)}"
        if self.seconds is not None:
            took = f"took longer than {duration(self.seconds)} to search for and was left out: simplify it"
            return f"the log policy {self.pattern!r} {took}"
        return "the log policies could not be searched for" + (f": {self.said}" if self.said else "")
