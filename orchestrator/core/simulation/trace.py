"""Input and output of a simulation: jobs of a trace, the result of each, and the use of the GPUs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """A job of a trace: submitted at ``at``, running for ``seconds`` once it has ``ranks`` ranks of ``gpus`` GPUs each."""

    at: float
    seconds: float
    ranks: int = 1
    gpus: float = 1.0
    user: str = ""
    priority: int = 50
    queue: str = "default"

    @property
    def all_gpus(self) -> float:
        """GPUs of all ranks of the job."""
        return self.ranks * self.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The result of a job. ``lost`` is GPU time that it repeated because it was preempted, in seconds."""

    job: TraceJob
    started_at: float
    ended_at: float
    preemptions: int = 0
    lost: float = 0.0

    @property
    def wait(self) -> float:
        """Seconds from its submission to its first start."""
        return self.started_at - self.job.at

    @property
    def completion(self) -> float:
        """Seconds from its submission to its end."""
        return self.ended_at - self.job.at


@dataclass(slots=True)
class Usage:
    """GPU time in seconds: all of it, busy, idle while jobs waited, and the part of that on partly used nodes."""

    total: float = 0.0
    busy: float = 0.0
    idle_while_waiting: float = 0.0
    in_pieces: float = 0.0

    def add(self, seconds: float, *, gpus: float, busy: float, pieces: float, waiting: bool) -> None:
        """Count a span in which nothing changed."""
        self.total += seconds * gpus
        self.busy += seconds * busy
        if waiting:
            self.idle_while_waiting += seconds * (gpus - busy)
            self.in_pieces += seconds * pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A whole simulation: each job in order of its end, those that can never fit, and (time, busy GPUs, waiting jobs) over time."""

    ran: tuple[Ran, ...]
    refused: tuple[TraceJob, ...]
    usage: Usage
    samples: tuple[tuple[float, float, int], ...]
