"""The faults, each in five forms: ranks, step times, with and without reports, on quiet and on noisy machines.

A case is a job, what happens to it at ``FAULT_AT``, and the finding that must name it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.insight.traces import JobModel
from orchestrator.core.diagnosis.observation import RestartsSeen, SavesSeen, StallSeen, StorageSeen
from orchestrator.core.facts.faults import ExitCode, GpuLost, Xid
from orchestrator.core.facts.findings import Lateness, Sign, Stillness
from orchestrator.core.thresholds import JUMPED_VALUES

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

    from orchestrator.core.diagnosis.observation import JobSeen

FAULT_AT = 120.0
BUSY_NOISE = 0.15
"""The spread of a step's parts where other programs use the same processors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault in one form. ``rank`` None: the whole job. ``slowest`` is the time of a step, which a finding may wait for.

    ``patience`` is the time that a slow fault needs to become visible: a leak is judged over minutes.
    """

    fault: str
    form: str
    job: JobModel
    kind: str
    rank: int | None
    change: Callable[[JobModel], None] | None = None
    slowest: float = 0.0
    node: str = ""
    patience: float = 0.0


FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("2 ranks, 0.1 s", {"ranks": 2, "step_seconds": 0.1}),
    ("8 ranks, 5 s", {"ranks": 8, "step_seconds": 5.0}),
    ("4 ranks, 5 ms", {"ranks": 4, "step_seconds": 0.005}),
    ("4 ranks, 1 s, busy machine", {"ranks": 4, "step_seconds": 1.0, "noise": BUSY_NOISE}),
    ("6 ranks, 0.3 s", {"ranks": 6, "step_seconds": 0.3}),
)
SILENT = {"reports": False}


def cases() -> Iterator[Case]:
    """Yield every case."""
    for number, (form, values) in enumerate(FORMS):
        rank = number % values["ranks"]
        silent = SILENT if number == 4 else {}
        yield from _of_ranks(form, values, rank, number)
        yield from _of_gpus(form, values | silent, rank, number)
        yield from _of_jobs(form, values, rank, number)
        yield from _of_nodes(form, values, number)


def _case(fault: str, form: str, values: dict[str, Any], kind: str, rank: int | None, **more: Any) -> Case:
    change, node, patience = more.pop("change", None), more.pop("node", ""), more.pop("patience", 0.0)
    job = JobModel(**{"seed": len(fault) * 7 + len(form), **values, **more})
    return Case(
        fault=fault,
        form=form,
        job=job,
        kind=kind,
        rank=rank,
        change=change,
        slowest=job.step_seconds,
        node=node,
        patience=patience,
    )


def _set(rank: int | None, **values: Any) -> Callable[[JobModel], None]:
    def change(job: JobModel) -> None:
        for number, each in enumerate(job.each):
            if rank is None or number == rank:
                for name, value in values.items():
                    setattr(each, name, value)

    return change


def _of_ranks(form: str, values: dict[str, Any], rank: int, number: int) -> Iterator[Case]:
    for words, factor in (("20 %", 1.25), ("half", 2.0)):
        slow = _set(rank, slower=factor)
        where = {"simulated": True, "parts": False} if number % 2 else {}
        yield _case(f"rank slower by {words}", form, values | where, "rank_slow", rank, change=slow)
        apart = {"lockstep": False, "parts": False}
        yield _case(f"rank slower by {words}, no collectives", form, values | apart, "rank_slow", rank, change=slow)
    starved = 0.45 + 0.1 * (number % 3)
    yield _case("starved input, one rank", form, values, "input_starved", rank, change=_set(rank, data_share=starved))
    yield _case("starved input, all ranks", form, values, "input_starved", None, change=_set(None, data_share=starved))
    power = _set(rank, slower=2.0)
    yield _case(
        "rank awaited, no times of its own", form, values | {"parts": False}, "rank_awaited", rank, change=power
    )
    signs = (Sign.OUTSIDE, Sign.LOCK, Sign.COLLECTIVE, Sign.UNKNOWN, Sign.MISMATCH)
    still = _still(rank, signs[number], values["step_seconds"])
    yield _case("no step", form, values, "no_step", rank, change=_set(rank, stopped=True), hook=still)
    stopped = _still(rank, Sign.STOPPED, values["step_seconds"])
    yield _case("rank stopped", form, values, "rank_stopped", rank, change=_set(rank, stopped=True), hook=stopped)


def _still(rank: int, sign: Sign, usual: float) -> Callable[[JobModel, float, JobSeen], JobSeen]:
    def hook(_job: JobModel, at: float, seen: JobSeen) -> JobSeen:
        still = at - FAULT_AT
        if still < max(3.0, 3.0 * usual):
            return seen
        late = Lateness(still_seconds=still, usual_seconds=usual)
        stillness = Stillness(rank=rank, sign=sign, place="pull (data.py:7)", pid=9)
        return replace(seen, stall=StallSeen(seen=stillness, late=late, longest_step=1.2 * usual))

    return hook


def _gpu_is(rank: int, **values: Any) -> Callable[[JobModel, float, JobSeen], JobSeen]:
    def hook(_job: JobModel, at: float, seen: JobSeen) -> JobSeen:
        if at < FAULT_AT:
            return seen
        return replace(seen, gpus=tuple(replace(g, **values) if g.rank == rank else g for g in seen.gpus))

    return hook


def _of_gpus(form: str, values: dict[str, Any], rank: int, number: int) -> Iterator[Case]:
    yield _case("idle GPU of a busy job", form, values, "gpu_idle", rank, change=_set(rank, idle_gpu=True))
    clock = (0.8, 0.5, 0.7, 0.85, 0.75)[number]
    slow = _set(rank, clock=clock, slower=1.0 / clock)
    yield _case("slow GPU", form, values, "gpu_slow", rank, change=slow)
    reason = ("thermal", "hardware_thermal", "power_brake", "hardware_slowdown", "thermal")[number]
    slowed = _set(rank, clock=0.7, slower=1.4)
    throttled = _gpu_is(rank, throttle=(reason,))
    yield _case("throttled GPU", form, values, "gpu_throttled", rank, hook=throttled, change=slowed)
    capped = _gpu_is(rank, throttle=("power_cap",), power_limit_watts=200.0)
    yield _case("lower power cap", form, values, "gpu_throttled", rank, hook=capped, change=slowed)
    foreign = _gpu_is(rank, foreign_pids=(4711,))
    crowded = _set(rank, slower=1.5) if number % 2 else None  # also when the balance is good
    yield _case("another's process on the GPU", form, values, "gpu_shared", rank, hook=foreign, change=crowded)
    taken = _gpu_is(rank, memory_bytes=(40e9, 36e9, 76e9, 60e9, 45e9)[number])
    own = _gpus_have(own_memory_bytes=29.4e9)
    yield _case("memory taken by a hidden process", form, values, "gpu_memory_taken", rank, hook=_both(own, taken))
    lost = _growing(rank, "uncorrected", (1, 2, 1, 7, 3)[number], 1e9)
    yield _case("uncorrected memory errors", form, values, "gpu_fault", rank, hook=lost)
    remaps = _growing(rank, "remapped", 1, 1e9)
    corrects = _growing(rank, "corrected", 40, (0.5, 0.2, 1.0, 0.3, 0.7)[number])
    yield _case(
        "corrected memory errors, remapped rows",
        form,
        values,
        "gpu_memory_errors",
        rank,
        hook=remaps if number % 2 else corrects,
    )
    faults = (Xid(number=79), Xid(number=48), GpuLost(), Xid(number=94), Xid(number=119))
    yield _case("GPU lost, Xid, ECC", form, values, "gpu_fault", rank, hook=_gpu_is(rank, fault=faults[number]))
    yield _case("exporter dead or hung", form, values, "exporter_silent", rank, hook=_gpu_is(rank, silent=True))


def _of_jobs(form: str, values: dict[str, Any], rank: int, number: int) -> Iterator[Case]:
    at_step = max(3, int(FAULT_AT / values["step_seconds"]))
    value = (math.nan, math.inf)[number % 2]
    bad = values | {"loss": lambda step, rnd: value if step >= at_step else 2.0 + rnd.random()}
    yield _case("NaN or infinite loss", form, bad, "loss_not_finite", None)
    flat = values | {"loss": lambda step, rnd: 2.302585 if step >= at_step else 2.0 + rnd.random()}
    yield _case("flat loss", form, flat, "loss_flat", None)
    jump = values | {"loss": lambda step, rnd: _loss_after(step, at_step, number, rnd)}
    yield _case(
        "loss that jumps", form, jump, "loss_jumped", None, patience=3.0 * JUMPED_VALUES * values["step_seconds"]
    )
    yield from _of_storage(form, values, number)
    late = (0.8, 1.5, 4.0, 0.7, 2.5)[number]
    slow_daemon = _late(late)
    yield _case("overloaded daemon", form, values, "daemon_overloaded", None, hook=slow_daemon)
    failing = values | {
        "saves": lambda at: SavesSeen(failures=2 + number if at >= FAULT_AT else 0, said="no such host")
    }
    yield _case("failing saves", form, failing, "saves_failing", None)
    interval = (None, 60.0, 300.0, 600.0, 500.0)[number]
    rare = values | {
        "saves": lambda at: SavesSeen(ever=True, unsaved_seconds=1800.0 + at - FAULT_AT, interval_seconds=interval)
    }
    yield _case("saves too rare", form, rare, "saves_rare", None)
    loop = RestartsSeen(count=3 + number, seconds=900.0, cause=ExitCode(rank=rank, exit_code=1))
    yield _case("restart loop", form, values, "restart_loop", None, hook=_with(restarts=loop))
    idle = StallSeen(
        seen=Stillness(rank=0, sign=(Sign.UNKNOWN, Sign.OUTSIDE)[number % 2]),
        late=Lateness(still_seconds=60.0, by_steps=False),
    )
    nothing = _idle(idle)
    yield _case("RUNNING and doing nothing", form, values | SILENT, "job_idle", None, hook=nothing)


def _loss_after(step: int, at_step: int, number: int, rnd: random.Random) -> float:
    """Return a loss that falls with noise, and from ``at_step`` on is far higher: at once, or growing, or as random guessing gives it."""
    usual = 0.5 + 2.0 / (1.0 + 0.02 * step)
    noisy = usual * rnd.lognormvariate(0.0, 0.1)
    if step < at_step:
        return noisy
    return (noisy * 4.0, 11.0 + rnd.random(), noisy * 1.02 ** min(800, step - at_step + 60), noisy + 6.0, noisy * 10.0)[
        number
    ]


def _of_storage(form: str, values: dict[str, Any], number: int) -> Iterator[Case]:
    gb, ranks = 10**9, values["ranks"]
    failed = SavesSeen(failures=1 + number, said="has 0 bytes free", cause=("ENOSPC", "EDQUOT")[number % 2])
    full = values | {"saves": lambda at: failed if at >= FAULT_AT and number % 2 else SavesSeen()}
    room = _storage(lambda at: {"written_bytes": gb, "free_bytes": gb * ranks // 2 if at >= FAULT_AT else 90 * gb})
    yield _case("full storage", form, full, "storage_full", None, **({} if number % 2 else {"hook": room}))

    def slower(at: float) -> dict[str, Any]:
        write = (2.0, 4.0, 1.0, 3.0, 8.0)[number]
        after = at - FAULT_AT
        return {
            "writes": 1 + int(min(at, FAULT_AT) // 20.0),
            "seconds": write,
            "written_bytes": gb,
            "busy_seconds": max(0.0, after) if number % 2 else 0.0,
        } | ({"writes": 99, "seconds": 30.0 + 8.0 * write} if after >= 0.0 and not number % 2 else {})

    waiting = values | {"saves": lambda at: SavesSeen(waited_seconds=0.4 * max(0.0, at - FAULT_AT))}
    if number == 4:
        yield _case("slow storage", form, waiting, "storage_slow", None)
    else:
        yield _case("slow storage", form, values, "storage_slow", None, hook=_storage(slower))


def _storage(of: Callable[[float], dict[str, Any]]) -> Callable[[JobModel, float, JobSeen], JobSeen]:
    """Return a hook that sets the storage seen by every rank."""
    return lambda _job, at, seen: replace(
        seen, storage=tuple(StorageSeen(rank=rank, **of(at)) for rank in range(seen.num_ranks))
    )


def _late(seconds: float) -> Callable[[JobModel, float, JobSeen], JobSeen]:
    return lambda job, at, seen: replace(
        seen, late_seconds=seconds * job.random.uniform(0.8, 1.2) if at >= FAULT_AT else 0.01
    )


def _gpus_have(**values: Any) -> Callable[[JobModel, float, JobSeen], JobSeen]:
    """Return a hook that sets these values of every GPU from the beginning."""
    return lambda _job, _at, seen: replace(seen, gpus=tuple(replace(gpu, **values) for gpu in seen.gpus))


def _both(
    first: Callable[[JobModel, float, JobSeen], JobSeen], second: Callable[[JobModel, float, JobSeen], JobSeen]
) -> Callable[[JobModel, float, JobSeen], JobSeen]:
    return lambda job, at, seen: second(job, at, first(job, at, seen))


def _growing(rank: int, counter: str, least: int, every: float) -> Callable[[JobModel, float, JobSeen], JobSeen]:
    """Return a hook with a driver's counter that is 3, rises by ``least`` and then by 1 every ``every`` seconds."""

    def hook(_job: JobModel, at: float, seen: JobSeen) -> JobSeen:
        more = least + int((at - FAULT_AT) / every) if at >= FAULT_AT else 0
        gpus = (replace(gpu, **{counter: 3 + (more if gpu.rank == rank else 0)}) for gpu in seen.gpus)  # type: ignore[arg-type]  # mypy does not see the counter's name
        return replace(seen, gpus=tuple(gpus))

    return hook


def _of_nodes(form: str, values: dict[str, Any], number: int) -> Iterator[Case]:
    each = values | {"nodes": 2, "ranks": max(4, values["ranks"])}
    slow, half = (1.25, 2.0, 1.4, 1.6, 1.3)[number], each["ranks"] // 2
    second = [_set(rank, slower=slow) for rank in range(half, each["ranks"])]
    yield _case("slow node", form, each, "node_slow", None, node="n2", change=_each(second))
    offset = (30.0, -60.0, 15.0, -14.0, 3600.0)[number]
    skewed = _node_is("n2", clock_offset_seconds=offset)
    yield _case("clock skew between nodes", form, each, "clock_skewed", None, node="n2", hook=skewed)
    pace = (2e9, 3e8, 8e8, 2e8, 4e8)[number] / 60.0
    leak = values | {"memory": lambda at, rnd: 20e9 + pace * max(0.0, at - FAULT_AT) + rnd.uniform(0.0, 0.05) * pace}
    leaky = {**leak, "ranks": 1, "nodes": 1}
    yield _case("GPU memory that grows", form, leaky, "gpu_memory_growing", 0, patience=660.0)
    unused = _all_gpus(utilization=(0.0, 0.01, 0.0, 0.005, 0.0)[number], power_watts=70.0)
    yield _case("steps, and every GPU idle", form, values, "gpus_unused", None, hook=unused)
    interval = (10.0, 60.0, 30.0, 120.0, 5.0)[number]
    stall = values | {
        "saves": lambda at: SavesSeen(
            ever=True,
            unsaved_seconds=at % interval,
            interval_seconds=interval,
            stall_seconds=interval * (0.35 if at >= FAULT_AT else 0.02),
        )
    }
    yield _case("saves too slow or too frequent", form, stall, "saves_slow", None)


def _each(changes: Sequence[Callable[[JobModel], None]]) -> Callable[[JobModel], None]:
    def change(job: JobModel) -> None:
        for one in changes:
            one(job)

    return change


def _node_is(node: str, **values: Any) -> Callable[[JobModel, float, JobSeen], JobSeen]:
    def hook(_job: JobModel, at: float, seen: JobSeen) -> JobSeen:
        if at < FAULT_AT:
            return seen
        return replace(seen, gpus=tuple(replace(gpu, **values) if gpu.node == node else gpu for gpu in seen.gpus))

    return hook


def _all_gpus(**values: Any) -> Callable[[JobModel, float, JobSeen], JobSeen]:
    return lambda _job, at, seen: (
        replace(seen, gpus=tuple(replace(gpu, **values) for gpu in seen.gpus)) if at >= FAULT_AT else seen
    )


def _with(**values: Any) -> Callable[[JobModel, float, JobSeen], JobSeen]:
    return lambda _job, at, seen: replace(seen, **values) if at >= FAULT_AT else seen


def _idle(stall: StallSeen) -> Callable[[JobModel, float, JobSeen], JobSeen]:
    def hook(_job: JobModel, at: float, seen: JobSeen) -> JobSeen:
        if at < FAULT_AT:
            return seen
        return replace(seen, gpus=tuple(replace(gpu, utilization=0.0) for gpu in seen.gpus), stall=stall)

    return hook
