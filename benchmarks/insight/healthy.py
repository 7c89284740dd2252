"""Over sixty kinds of healthy jobs, for which diagnosis must report nothing."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.core.diagnosis.observation import SavesSeen, StallSeen, StorageSeen
from orchestrator.core.facts.findings import Lateness, Sign, Stillness

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.insight.traces import JobModel
    from orchestrator.core.diagnosis.observation import JobSeen


def _still(begin: float, seconds: float, sign: Sign, *, pause: float = 0.0, every: float = 0.0) -> Any:
    """Return a hook with a pause without steps, as the hang watch reports it."""

    def hook(_job: JobModel, at: float, seen: JobSeen) -> JobSeen:
        into = at - begin if not every else (at - begin) % every
        if at < begin or not 3.0 <= into < seconds:
            return seen
        late = Lateness(still_seconds=into, usual_seconds=0.1)
        stall = StallSeen(seen=Stillness(rank=0, sign=sign), late=late, longest_step=0.15, longest_pause=pause)
        return replace(seen, stall=stall)

    return hook


def _phase(begin: float, seconds: float, every: float) -> Any:
    """Return a hook with an evaluation or a save on rank 0, during which the other ranks wait."""

    def hook(_job: JobModel, at: float, seen: JobSeen) -> JobSeen:
        if at < begin or (at - begin) % every >= seconds:
            return seen
        first, *rest = seen.ranks
        gpus = [replace(gpu, utilization=0.0 if gpu.rank == 0 else 1.0, power_watts=130.0) for gpu in seen.gpus]
        return replace(seen, ranks=(replace(first, training=False), *rest), gpus=tuple(gpus))

    return hook


def _all_gpus(**values: Any) -> Any:
    return lambda _job, _at, seen: replace(seen, gpus=tuple(replace(gpu, **values) for gpu in seen.gpus))


def _glitches(every: float, **values: Any) -> Any:
    """Return a hook with one bad sample now and then."""

    def hook(_job: JobModel, at: float, seen: JobSeen) -> JobSeen:
        if at % every or not seen.gpus:
            return seen
        return replace(seen, gpus=(replace(seen.gpus[0], **values), *seen.gpus[1:]))

    return hook


def _late_reports(_job: JobModel, at: float, seen: JobSeen) -> JobSeen:
    """Let the exporters of one node answer late for a while."""
    late = 20.0 if 100.0 < at < 118.0 else 0.0
    return replace(
        seen,
        gpus=tuple(
            replace(gpu, clock_offset_seconds=(gpu.clock_offset_seconds or 0.0) - late) if gpu.node == "n2" else gpu
            for gpu in seen.gpus
        ),
    )


def _storage(**values: Any) -> Callable[[JobModel, float, JobSeen], JobSeen]:
    return lambda _job, _at, seen: replace(
        seen, storage=tuple(StorageSeen(rank=rank, **values) for rank in range(seen.num_ranks))
    )


def _cosmic_rays(_job: JobModel, at: float, seen: JobSeen) -> JobSeen:
    """Give GPUs earlier memory errors, and one corrected error in five minutes."""
    return replace(
        seen, gpus=tuple(replace(g, uncorrected=1, remapped=2, corrected=70 + int(at // 300.0)) for g in seen.gpus)
    )


def _writes(job: JobModel, at: float, seen: JobSeen) -> JobSeen:
    """Write checkpoints every minute: 3 to 9 s each, and now and then one of 14 s."""
    number, into = divmod(at, 60.0)
    rnd = random.Random(f"{job.seed}-{number}")
    seconds = 14.0 if rnd.random() < 0.1 else rnd.uniform(3.0, 9.0)
    busy = into if into < seconds else 0.0
    return _storage(writes=int(number), seconds=seconds, busy_seconds=busy, written_bytes=10**9, free_bytes=10**12)(
        job, at, seen
    )  # fmt: skip


def _long_write(job: JobModel, at: float, seen: JobSeen) -> JobSeen:
    """Write the first checkpoint for five minutes, when no earlier write is known."""
    busy = at - 100.0 if 100.0 <= at < 400.0 else 0.0
    return _storage(writes=int(at >= 400.0), busy_seconds=busy, written_bytes=10**9, free_bytes=10**12)(job, at, seen)  # fmt: skip


def _pauses(job: JobModel, at: float, seen: JobSeen) -> JobSeen:
    """Make the daemon's loop late by 9 s for a few seconds of each minute."""
    return replace(seen, late_seconds=9.0 if at % 60.0 < 4.0 else 0.15 * job.random.random())


def _changing(step: int, rnd: random.Random) -> float:
    return 3.0 / (1.0 + 0.01 * step) + 0.1 * rnd.random()


def _by_epoch(step: int, _rnd: random.Random) -> float:
    return 3.0 / (1 + step // 400)


def _pausing(begin: float, seconds: float, every: float = 1e9) -> Any:
    return lambda at: at >= begin and (at - begin) % every < seconds


HEALTHY: dict[str, dict[str, Any]] = {
    "plain": {},
    "one rank": {"ranks": 1},
    "two ranks": {"ranks": 2},
    "16 ranks": {"ranks": 16},
    "steps of 5 ms": {"step_seconds": 0.005},
    "steps of 5 s": {"step_seconds": 5.0},
    "steps of 40 s": {"step_seconds": 40.0},
    "no reports": {"reports": False},
    "no reports, 8 ranks, noisy": {"reports": False, "ranks": 8, "noise": 0.1},
    "no times of its own": {"parts": False},
    "no times of its own, 8 ranks": {"parts": False, "ranks": 8},
    "no GPU": {"gpus": False, "parts": False},
    "no GPU, no collectives": {"gpus": False, "parts": False, "lockstep": False},
    "simulated GPUs": {"simulated": True, "parts": False},
    "simulated GPUs, trainer": {"simulated": True},
    "no collectives": {"lockstep": False, "parts": False},
    "no collectives, varied lengths": {"lockstep": False, "parts": False, "noise": 0.35},
    "varied lengths": {"noise": 0.3},
    "varied lengths, simulated": {"noise": 0.3, "simulated": True, "parts": False},
    "busy machine": {"noise": 0.15, "simulated": True, "parts": False},
    "busy machine, no GPU": {"noise": 0.2, "gpus": False, "parts": False},
    "busy machine, 5 ms": {"noise": 0.25, "step_seconds": 0.005},
    "long first step": {"first_step_at": 400.0},
    "long first step, no reports": {"first_step_at": 60.0, "reports": False},
    "mixed GPU models": {"models": ("H100", "A100")},
    "mixed GPU models, no times": {"models": ("H100", "L40S"), "parts": False},
    "evaluation on rank 0": {"hook": _phase(100.0, 40.0, 200.0)},
    "short evaluations": {"hook": _phase(30.0, 4.0, 15.0)},
    "pauses that are not reported": {"paused": _pausing(100.0, 25.0, 150.0)},
    "a pause in which ranks compute": {"paused": _pausing(100.0, 120.0), "hook": _still(100.0, 120.0, Sign.WORKS)},
    "slow saves": {
        "paused": _pausing(90.0, 70.0, 300.0),
        "hook": _still(90.0, 70.0, Sign.OUTSIDE, pause=60.0, every=300.0),
    },
    "all GPUs at their power limit": {"hook": _all_gpus(throttle=("power_cap",))},
    "clocks that a person has set": {"hook": _all_gpus(throttle=("clock_setting",))},
    "one sample of heat": {"hook": _glitches(20.0, throttle=("thermal",))},
    "one reading lost": {"hook": _glitches(30.0, silent=True)},
    "one sample without load": {"hook": _glitches(10.0, utilization=0.0)},
    "falling loss": {"loss": _changing},
    "loss by epoch": {"loss": _by_epoch},
    "loss of few steps": {"loss": lambda step, _rnd: 2.0 - 0.01 * (step // 50)},
    "loss of long steps": {"loss": _changing, "step_seconds": 5.0},
    "regular saves": {"saves": lambda at: SavesSeen(ever=True, unsaved_seconds=at % 300.0, interval_seconds=300.0)},
    "no saves, a short job": {"saves": lambda at: SavesSeen(unsaved_seconds=at)},
    "one failed save": {"saves": lambda at: SavesSeen(failures=int(100.0 < at < 130.0), said="timeout")},
    "two nodes": {"nodes": 2},
    "two nodes, busy machine": {"nodes": 2, "ranks": 8, "noise": 0.2, "parts": False, "gpus": False},
    "two nodes, reports that come late": {"nodes": 2, "hook": _late_reports},
    "memory that fills a cache": {"memory": lambda at, _: 60e9 * (1.0 - math.exp(-at / 200.0))},
    "memory of varied lengths": {"memory": lambda _, rnd: 40e9 + 20e9 * rnd.random()},
    "memory that grows for five minutes": {"memory": lambda at, _: 20e9 + 1e8 * min(at, 300.0)},
    "saves of 5 %": {
        "saves": lambda at: SavesSeen(ever=True, unsaved_seconds=at % 300.0, interval_seconds=300.0, stall_seconds=15.0)
    },
    "loss of small batches": {"loss": lambda step, rnd: (0.3 + 2.0 / (1 + 0.01 * step)) * rnd.lognormvariate(0.0, 0.6)},
    "loss with single spikes": {"loss": lambda _step, rnd: 1.0 + rnd.random() + (40.0 if rnd.random() < 0.03 else 0.0)},
    "loss that swings": {"loss": lambda step, rnd: 2.0 + 1.5 * math.sin(step / 800.0) + 0.1 * rnd.random()},
    "loss of warm restarts": {
        "loss": lambda step, rnd: (0.6 + 0.5 * (step % 3000 < 400)) * rnd.lognormvariate(0.0, 0.1)
    },
    "loss of two players": {"loss": lambda _step, rnd: rnd.choice((0.7, 2.1)) * rnd.lognormvariate(0.0, 0.4)},
    "loss near nothing": {"loss": lambda _step, rnd: 1e-6 * rnd.expovariate(1.0)},
    "drivers that take memory": {"hook": _all_gpus(memory_bytes=31.2e9, own_memory_bytes=29.6e9)},
    "single corrected errors": {"hook": _cosmic_rays},
    "storage that is nearly full": {
        "hook": _storage(free_bytes=41 * 10**9, written_bytes=10**10, writes=3, seconds=9.0)
    },
    "writes of varied time": {"hook": _writes},
    "a first write that takes long": {"hook": _long_write},
    "a machine that pauses": {"hook": _pauses},
    "slow warm-up": {"first_step_at": 30.0, "noise": 0.2},
    "small job of 30 s": {"ranks": 2, "step_seconds": 0.05},
}
SECONDS = {"small job of 30 s": 30.0, "no saves, a short job": 1200.0}
"""Durations of the jobs that are healthy because they are short."""
