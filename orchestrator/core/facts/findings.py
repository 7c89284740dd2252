"""Findings of the diagnosis about a running job: one class for each kind, with its figures.

A finding is about a rank, a GPU, both, a node, or (with none of them) the whole job. ``core/diagnosis`` makes findings, events open and
close them, and ``docs/diagnosis.md`` has a section for each ``kind``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from orchestrator.core.facts.fact import Fact
from orchestrator.core.facts.hangs import Lateness, Stillness  # noqa: TC001  # conformance.py reads the annotations


class Confidence(StrEnum):
    """Certainty of the figures."""

    CERTAIN = "certain"  # measured directly
    LIKELY = "likely"  # nothing else that is measured explains the figures
    POSSIBLE = "possible"  # other causes show the same figures; the advice says what tells them apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Fact):
    """Base of all findings. ``since`` is when the figures began to show it, in seconds since the epoch."""

    rank: int | None = None
    gpu_uuid: str = ""
    node: str = ""
    since: float = 0.0
    confidence: Confidence = Confidence.LIKELY


FindingKey = tuple[str, int | None, str]


def key_of(finding: Finding) -> FindingKey:
    """Return the identity of a finding: kind and subject, which is a GPU, a rank, a node or the job."""
    node = finding.node if finding.rank is None else ""
    return finding.kind, finding.rank, finding.gpu_uuid or node


# -- GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuIdle(Finding):
    """The GPU is idle while the job's others are busy (ratios of time)."""

    kind: ClassVar[str] = "gpu_idle"
    utilization: float
    usual_utilization: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSlow(Finding):
    """The GPU's clock is below that of the job's others of the same model, for no reason that its driver reports."""

    kind: ClassVar[str] = "gpu_slow"
    hertz: float
    usual_hertz: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuThrottled(Finding):
    """The driver limits the GPU's clocks for ``reasons``, for this share of the time."""

    kind: ClassVar[str] = "gpu_throttled"
    reasons: tuple[str, ...]
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShared(Finding):
    """Processes that belong to no job on the GPU use it."""

    kind: ClassVar[str] = "gpu_shared"
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemoryTaken(Finding):
    """Memory of the GPU is used by no process of a job on it, and by none that can be seen."""

    kind: ClassVar[str] = "gpu_memory_taken"
    used_bytes: float
    own_bytes: float
    total_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemoryErrors(Finding):
    """The GPU has corrected errors of its memory in the newest ten minutes, or has replaced rows of it since the attempt began."""

    kind: ClassVar[str] = "gpu_memory_errors"
    corrected: int
    remapped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFaulty(Finding):
    """The GPU or its driver reports an error."""

    kind: ClassVar[str] = "gpu_fault"
    fault: Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterSilent(Finding):
    """The GPU's exporter does not answer: the GPU's state is unknown."""

    kind: ClassVar[str] = "exporter_silent"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemoryGrowing(Finding):
    """The memory used on the GPU grows steadily, and reaches ``total_bytes`` in ``seconds_left``."""

    kind: ClassVar[str] = "gpu_memory_growing"
    used_bytes: float
    total_bytes: float
    bytes_per_second: float
    seconds_left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadUneven(Finding):
    """Utilization or power differs between the job's GPUs, and no other figure explains it."""

    kind: ClassVar[str] = "load_uneven"
    cv: float


# -- ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlow(Finding):
    """The rank takes ``factor`` times as long for its own part of a step as the others usually do.

    ``awaited``: the others wait for it at every step; else their steps take less time than its own.
    """

    kind: ClassVar[str] = "rank_slow"
    factor: float
    seconds: float
    usual_seconds: float
    awaited: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAwaited(Finding):
    """All GPUs are busy, and this rank's draws more power than the others, which probably spin in a collective.

    Without GPUs: its processes use ``busy`` processors, and the others', which wait in locks, ``usual_busy``; or the others wait in
    locks for ``usual_locked`` of the time, and it for ``locked``.
    """

    kind: ClassVar[str] = "rank_awaited"
    watts: float = 0.0
    usual_watts: float = 0.0
    busy: float | None = None
    usual_busy: float | None = None
    locked: float | None = None
    usual_locked: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStarved(Finding):
    """The rank, or with None every rank, waits for its next batch for this share of a step.

    ``reported`` is False where the script does not report it: its training thread waits for a file, a pipe or the network for this share of the time.
    """

    kind: ClassVar[str] = "input_starved"
    share: float
    reported: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemoryGrowing(Finding):
    """The memory of the rank's processes, or with None of every rank's, grows steadily, and reaches ``limit_bytes`` in ``seconds_left``."""

    kind: ClassVar[str] = "host_memory_growing"
    used_bytes: float
    limit_bytes: float
    bytes_per_second: float
    seconds_left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStopped(Finding):
    """A process of the rank is stopped or held by a debugger."""

    kind: ClassVar[str] = "rank_stopped"
    seen: Stillness
    late: Lateness


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAtBreakpoint(Finding):
    """The rank waits at a prompt of its debugger."""

    kind: ClassVar[str] = "rank_at_breakpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoStep(Finding):
    """The job has made no step for long."""

    kind: ClassVar[str] = "no_step"
    seen: Stillness
    late: Lateness


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongWorldSize(Finding):
    """The rank, or with None every rank, waits for a process group of another size than the job has ranks."""

    kind: ClassVar[str] = "wrong_world_size"
    seen: Stillness
    late: Lateness


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousIncomplete(Finding):
    """Ranks wait for their process group, which this rank does not enter; None: all have entered, and it does not form."""

    kind: ClassVar[str] = "rendezvous_incomplete"
    seen: Stillness
    late: Lateness


# -- the whole job


@dataclass(frozen=True, slots=True, kw_only=True)
class LossNotFinite(Finding):
    """A metric that the script reports is NaN or infinite; ``value`` says which."""

    kind: ClassVar[str] = "loss_not_finite"
    metric: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFlat(Finding):
    """The loss that the script reports has been bit-identical for this many steps."""

    kind: ClassVar[str] = "loss_flat"
    metric: str
    value: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossJumped(Finding):
    """The loss that the script reports is far above what it was, and stays there."""

    kind: ClassVar[str] = "loss_jumped"
    metric: str
    value: float
    usual: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFull(Finding):
    """The storage of the checkpoints has no room for the next one; ``said`` is the error of a save that failed."""

    kind: ClassVar[str] = "storage_full"
    free_bytes: int | None = None
    needed_bytes: int = 0
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSlow(Finding):
    """Storage takes too long for checkpoints: a write takes ``seconds``, or training waits for it for ``share`` of the time.

    ``usual_seconds`` is what a write has taken before, where that is known. ``busy``: the write is not over.
    """

    kind: ClassVar[str] = "storage_slow"
    seconds: float
    usual_seconds: float | None = None
    share: float = 0.0
    busy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SavesFailing(Finding):
    """Checkpoints do not reach storage: this many saves failed, including the newest; ``said`` is its error."""

    kind: ClassVar[str] = "saves_failing"
    failures: int
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavesRare(Finding):
    """No checkpoint was made for ``seconds``; ``interval_seconds`` is the job's intended interval, where known."""

    kind: ClassVar[str] = "saves_rare"
    seconds: float
    interval_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavesSlow(Finding):
    """The newest save stalled training for ``seconds``, with an intended interval of ``interval_seconds``."""

    kind: ClassVar[str] = "saves_slow"
    seconds: float
    interval_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLoop(Finding):
    """The job has restarted this often within ``seconds``, the last time for ``cause``.

    ``total`` counts all of its restarts, those that its record no longer lists included; 0 where it is not known.
    """

    kind: ClassVar[str] = "restart_loop"
    restarts: int
    seconds: float
    cause: Fact
    total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdle(Finding):
    """The job is RUNNING, reports no step, and its GPUs are idle."""

    kind: ClassVar[str] = "job_idle"
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusUnused(Finding):
    """The job makes steps, and all of its GPUs are idle."""

    kind: ClassVar[str] = "gpus_unused"
    gpus: int


# -- nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSlow(Finding):
    """Every rank on the node is slower than those on the job's other nodes: ``factor`` times in the median."""

    kind: ClassVar[str] = "node_slow"
    factor: float
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSkewed(Finding):
    """The clock of the node is ahead of the daemon's by this many seconds; negative: behind it."""

    kind: ClassVar[str] = "clock_skewed"
    seconds: float


# -- the daemon


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOverloaded(Finding):
    """The daemon's loop runs ``late_seconds`` late: what it reports of the job may be late by as much."""

    kind: ClassVar[str] = "daemon_overloaded"
    late_seconds: float
