"""What is observed of a job at one moment, and how long each rank takes for a step, without waits for other ranks. Pure.

Ranks that meet in a collective at every step all take as long as the slowest one, so the length of a step identifies no
rank. The slow one is identified by its own work in a step: getting the batch and the forward pass as the training
system measures them, else the processor time of its training thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from orchestrator.core.codec import Count, Message, Seconds, Text, Time

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.facts.findings import Lateness, Stillness


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeen:
    """Progress that a rank has reported.

    ``steps`` counts its steps, ``step_seconds`` are the newest ones' durations, oldest first. ``parts`` are seconds of a
    step by part, ``busy_seconds`` those in which its thread used a processor. ``training``: it makes steps, and is not in
    an evaluation or a save. ``losses`` are the metrics with a name of a loss.
    """

    rank: int
    node: str = ""
    steps: int = 0
    step_seconds: tuple[float, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    busy_seconds: float | None = None
    training: bool = True
    losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSeen:
    """A GPU that a rank holds. ``silent``: its exporter does not answer, and the values are of no use.

    ``starting``: its exporter has not answered yet and is within its start time; nothing is known of the GPU.

    ``work`` is the share of time in which a simulated GPU's rank worked and did not wait. ``fault`` is what the GPU or its
    driver reports, ``foreign_pids`` are processes that belong to no job on the GPU. ``sampled_at`` distinguishes samples.
    ``clock_offset_seconds`` is how far its node's clock seems ahead of the daemon's, less the age of the sample.
    ``own_memory_bytes`` is what the processes of the jobs on the GPU use, None where the driver does not report it of all of them.
    ``uncorrected`` and ``corrected`` memory errors and ``remapped`` rows are counted since the driver was loaded.
    """

    gpu_uuid: str
    rank: int
    node: str = ""
    model: str = ""
    sampled_at: float | None = None
    silent: bool = False
    starting: bool = False
    utilization: float | None = None
    memory_bytes: float | None = None
    memory_total_bytes: float | None = None
    clock_offset_seconds: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    clock_hertz: float | None = None
    own_memory_bytes: float | None = None
    uncorrected: int | None = None
    corrected: int | None = None
    remapped: int | None = None
    work: float | None = None
    throttle: tuple[str, ...] = ()
    foreign_pids: tuple[int, ...] = ()
    fault: Fact | None = None


class ProcessSeen(Message):
    """A rank's processes, as the kernel shows them. Counts are since the rank's start, ``at`` is seconds of its node's clock.

    ``looks`` counts looks at the training thread: in ``asleep`` of them it waited for a file, a pipe or the network, in
    ``locked`` for another thread. ``grouped``: it belongs to a process group. ``available_bytes`` is the
    memory that its node has left.
    """

    at: Time
    rank: Count = 0
    cpu_seconds: Seconds = 0.0
    resident_bytes: Count = 0
    available_bytes: Count | None = None
    looks: Count = 0
    asleep: Count = 0
    locked: Count = 0
    grouped: bool = False


class StorageSeen(Message):
    """A rank's writes of its part of the checkpoints, and its storage.

    ``failures`` are those since the newest success, which began at ``failing_since``; ``cause`` is the same for failures
    of one cause (the name of an error number), ``said`` is the newest one's text. ``written_bytes`` and ``seconds`` are those of the
    newest write, ``busy_seconds`` is how long the storage has taken for the present request. ``free_bytes`` is what it has left.
    """

    rank: Count = 0
    failures: Count = 0
    failing_since: Time | None = None
    cause: Text = ""
    said: Text = ""
    writes: Count = 0
    written_bytes: Count = 0
    seconds: Seconds = 0.0
    busy_seconds: Seconds = 0.0
    free_bytes: Count | None = None


class TerminalSeen(Message):
    """A rank's terminal: its own in an ``interactive`` job, else its debugger's. ``attached`` counts clients.

    ``idle``: an interactive job's rank has been idle for the job's limit. ``stopped_at`` is when the rank stopped at a
    breakpoint, in seconds since the epoch.
    """

    rank: Count = 0
    interactive: bool = False
    attached: Count = 0
    idle: bool = False
    stopped_at: Time | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StallSeen:
    """A job that makes no step: what was seen of its ranks, and for how long.

    ``proven``: no rank can continue. ``longest_step`` and ``longest_pause`` are the longest times without a step that this job had before.
    """

    seen: Stillness
    late: Lateness
    longest_step: float = 0.0
    longest_pause: float = 0.0
    proven: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SavesSeen:
    """The job's checkpoints. ``failures`` are the attempt's saves that failed, 0 where the newest one succeeded.

    ``cause`` is the same for all failures of one cause. ``waited_seconds`` is how long saves of this attempt have waited for storage.

    ``stall_seconds`` is how long the newest save stalled training, None before the second one. ``unsaved_seconds`` is the time since the newest checkpoint, or since the first step where there is none.
    ``behind`` is the attempt's step and that of the checkpoint with which it could begin, while it has not reached it.
    """

    failures: int = 0
    said: str = ""
    ever: bool = False
    unsaved_seconds: float | None = None
    interval_seconds: float | None = None
    stall_seconds: float | None = None
    cause: str = ""
    waited_seconds: float = 0.0
    behind: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartsSeen:
    """The restarts of the last hour: how many, within which time, and the cause of the last one.

    A record lists only its newest attempts, so ``count`` is bounded; ``total`` counts all restarts of the job.
    """

    count: int
    seconds: float
    cause: Fact
    total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeen:
    """A job at one moment. ``running``: every rank's process is up. ``certain_work``: processor time is work.

    ``load_cv`` is the wider of the coefficients of variation of its GPUs' utilization and power, None unless all report.
    ``memory_bytes`` is what each rank may use, where that is limited. ``late_seconds`` is the delay of the daemon's loop
    for this look. Processor time is not work where a rank has a real GPU: a thread that waits for one spins.
    """

    ranks: tuple[RankSeen, ...] = ()
    gpus: tuple[GpuSeen, ...] = ()
    processes: tuple[ProcessSeen, ...] = ()
    load_cv: float | None = None
    running: bool = True
    certain_work: bool = False
    num_ranks: int = 1
    memory_bytes: int | None = None
    stall: StallSeen | None = None
    saves: SavesSeen = SavesSeen()
    storage: tuple[StorageSeen, ...] = ()
    terminals: tuple[TerminalSeen, ...] = ()
    late_seconds: float | None = None
    restarts: RestartsSeen | None = None


APART: Final = ("data_seconds", "forward_seconds")
"""The parts of a step in which no rank waits for another; backward passes exchange gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """One rank's mean seconds for a step, and its own work in them; None where that is unknown.

    ``own_seconds`` of a job's ranks must be measured in the same way: see ``paces``.
    """

    rank: int
    step_seconds: float | None = None
    own_seconds: float | None = None


def paces(
    steps: Mapping[int, float | None], parts: Mapping[int, Mapping[str, float]], busy: Mapping[int, float | None]
) -> tuple[Pace, ...]:
    """Return each rank's pace from its seconds per step, its measured ``parts`` of a step, and its processor seconds per step.

    The parts count where every rank has reported them, else the processor time where every rank has.
    """
    ranks = sorted(steps)
    measured = [sum(parts.get(rank, {}).get(name, 0.0) for name in APART) for rank in ranks]
    own: list[float | None] = [*measured] if all(measured) else [busy.get(rank) for rank in ranks]
    whole = all(value is not None for value in own)
    return tuple(
        Pace(rank=rank, step_seconds=steps[rank], own_seconds=value if whole else None)
        for rank, value in zip(ranks, own, strict=True)
    )
