"""The daemon's findings and the Prometheus rules for the same conditions agree: both get the same series.

A case is a job as the daemon sees it, second by second. Its observations go through the production diagnosis; what
Prometheus would have scraped of them every 15 s goes through promtool. Each pair has a case on either side of the threshold.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from benchmarks.insight.traces import TICK_SECONDS, JobModel
from dashboards import rules
from orchestrator.core import thresholds as d
from orchestrator.core.diagnosis.diagnosis import Diagnosis
from orchestrator.core.diagnosis.observation import GpuSeen, JobSeen, RestartsSeen, SavesSeen
from orchestrator.core.facts.faults import ExitCode
from tests.integration.test_rules_promtool import (
    STEP,
    Scenario,
    Series,
    daemon,
    gpu,
    holds,
    of_gpu,
    promtool_test,
    run_promtool,
)
from tests.support.records import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing: .ci/install-test-tools")

JOB = "a"
MINUTES = 20
HOURS = 2.25


@dataclass(frozen=True)
class Case:
    """One job: at the end ``alert`` must be firing and a finding of ``kind`` open if ``told``, else neither."""

    title: str
    alert: str
    kind: str
    told: bool
    change: Callable[[JobSeen, float], JobSeen]
    labels: Mapping[str, str] = field(default_factory=dict)
    minutes: int = MINUTES
    rank: int | None = None
    step: float = 0.0


def _gpus(**values: object) -> Callable[[JobSeen, float], JobSeen]:
    return lambda seen, _: replace(seen, gpus=tuple(replace(one, **values) for one in seen.gpus))  # type: ignore[arg-type]


def _gpu(number: int, **values: object) -> Callable[[JobSeen, float], JobSeen]:
    return lambda seen, _: replace(
        seen,
        gpus=tuple(replace(one, **values) if one.rank == number else one for one in seen.gpus),  # type: ignore[arg-type]
    )


def _hot(share: float) -> Callable[[JobSeen, float], JobSeen]:
    def change(seen: JobSeen, at: float) -> JobSeen:
        hot = at % 14.0 < 14.0 * share
        return _gpu(0, throttle=("thermal",) if hot else ())(seen, at)

    return change


def _unsaved(interval: float | None, *, ever: bool = True) -> Callable[[JobSeen, float], JobSeen]:
    return lambda seen, at: replace(seen, saves=SavesSeen(ever=ever, unsaved_seconds=at, interval_seconds=interval))


def _restarts(count: int) -> Callable[[JobSeen, float], JobSeen]:
    def change(seen: JobSeen, at: float) -> JobSeen:
        made = sum(at >= 120.0 * (number + 1) for number in range(count))
        loop = RestartsSeen(count=made, seconds=at, cause=ExitCode(rank=0, exit_code=1)) if made else None
        return replace(seen, restarts=loop)

    return change


def _step(rank: int, factor: float) -> Callable[[JobSeen, float], JobSeen]:
    def change(seen: JobSeen, _at: float) -> JobSeen:
        return replace(
            seen,
            ranks=tuple(
                replace(
                    one,
                    step_seconds=tuple(0.1 * (factor if one.rank == rank else 1.0) for _ in one.step_seconds),
                    parts={},
                )
                for one in seen.ranks
            ),
        )

    return change


def _uncorrected(count: int) -> Callable[[JobSeen, float], JobSeen]:
    return lambda seen, at: _gpu(0, uncorrected=count if at >= 300.0 else 0)(seen, at)


def _late(seconds: float) -> Callable[[JobSeen, float], JobSeen]:
    return lambda seen, _: replace(seen, late_seconds=seconds)


G0 = {"gpu_uuid": "g0", "gpu": "0", "node": "n0"}
LABELS = {"job_id": JOB}
LONG = int(60 * HOURS)

CASES = [
    Case("hot", "OrchGpuThrottled", "gpu_throttled", True, _hot(0.7), {"reason": "thermal", **G0}, rank=0),
    Case("now and then hot", "OrchGpuThrottled", "gpu_throttled", False, _hot(0.3), rank=0),
    Case("no GPU is used", "OrchJobGpusIdle", "gpus_unused", True, _gpus(utilization=0.01), LABELS),
    Case("GPUs are used a little", "OrchJobGpusIdle", "gpus_unused", False, _gpus(utilization=0.03)),
    Case("a save is due", "OrchCheckpointTooOld", "saves_rare", True, _unsaved(300.0), LABELS, minutes=45),
    Case("a save is not due", "OrchCheckpointTooOld", "saves_rare", False, _unsaved(1200.0), minutes=45),
    Case("never saved", "OrchJobNeverSaved", "saves_rare", True, _unsaved(None, ever=False), LABELS, minutes=LONG),
    Case("not saved yet", "OrchJobNeverSaved", "saves_rare", False, _unsaved(None, ever=False), minutes=110),
    Case("three restarts", "OrchJobRestartLoop", "restart_loop", True, _restarts(3), LABELS),
    Case("two restarts", "OrchJobRestartLoop", "restart_loop", False, _restarts(2)),
    Case("a slow rank", "OrchRankStraggler", "rank_slow", True, _step(1, 1.7), {**LABELS, "rank": "1"}, rank=1),
    Case("ranks alike", "OrchRankStraggler", "rank_slow", False, _step(1, 1.02), rank=1),
    Case("memory lost data", "OrchGpuEccUncorrected", "gpu_fault", True, _uncorrected(2), G0, rank=0),
    Case("memory is sound", "OrchGpuEccUncorrected", "gpu_fault", False, _uncorrected(0), rank=0),
    Case("a late daemon", "OrchDaemonSlow", "daemon_overloaded", True, _late(0.9), {"job": "orch-daemon", "instance": "d"}),
    Case("a daemon in time", "OrchDaemonSlow", "daemon_overloaded", False, _late(0.3)),
]  # fmt: skip


def observations(case: Case) -> list[tuple[float, JobSeen]]:
    """Return the observations of the job, one every two seconds."""
    model = JobModel(ranks=4, lockstep=case.kind != "rank_slow", parts=False)
    ticks = math.ceil(60.0 * case.minutes / TICK_SECONDS)
    return [(tick * TICK_SECONDS, case.change(model.seen(tick * TICK_SECONDS), tick * TICK_SECONDS)) for tick in range(ticks + 1)]  # fmt: skip


def _of(seen: list[tuple[float, JobSeen]], value: Callable[[JobSeen, float], float]) -> str:
    """Return the values that Prometheus scrapes: the newest observation every 15 s."""
    scraped = [seen[int(at / TICK_SECONDS)] for at in range(0, int(seen[-1][0]) + 1, STEP)]
    return " ".join(f"{value(one, at):g}" for at, one in scraped)


def _one(seen: JobSeen, rank: int) -> GpuSeen:
    return next(gpu for gpu in seen.gpus if gpu.rank == rank)


def series(case: Case, seen: list[tuple[float, JobSeen]]) -> Series:
    """Return the series of the same job that the daemon and its exporters give to Prometheus."""
    found: Series = holds(JOB, [0, 1, 2, 3], samples=4 * case.minutes + 8)
    for rank in range(4):
        load = _of(seen, lambda one, _, rank=rank: _one(one, rank).utilization or 0.0)  # type: ignore[misc]
        watts = _of(seen, lambda one, _, rank=rank: _one(one, rank).power_watts or 0.0)  # type: ignore[misc]
        samples = 4 * case.minutes + 8
        found |= gpu(rank, load, watts, alive=f"1x{samples}", memory=f"4e10x{samples}")
    hot = _of(seen, lambda one, _: float("thermal" in _one(one, 0).throttle))
    found |= of_gpu("orch_gpu_throttle_active", hot, gpu_uuid="g0", reason="thermal")
    errors = _of(seen, lambda one, _: float(_one(one, 0).uncorrected or 0))
    found |= of_gpu("orch_gpu_ecc_errors_total", errors, gpu_uuid="g0", severity="uncorrected", scope="volatile")
    found |= daemon("orch_job_event_timestamp_seconds", _of(seen, lambda *_: 0.0), job_id=JOB, event="start")
    found |= daemon(
        "orch_job_restarts_total",
        _of(seen, lambda one, _: float(one.restarts.count if one.restarts else 0)),
        job_id=JOB,
        **{"class": "user"},
    )
    saves = seen[-1][1].saves
    if saves.interval_seconds:
        interval = saves.interval_seconds
        found |= daemon("orch_job_checkpoint_interval_seconds", _of(seen, lambda *_: interval), job_id=JOB)
    if saves.ever:
        found |= daemon("orch_job_checkpoint_timestamp_seconds", _of(seen, lambda *_: 0.0), job_id=JOB)
    if case.kind == "rank_slow":
        for rank in range(4):
            times = _of(seen, lambda one, _, rank=rank: one.ranks[rank].step_seconds[-1] if one.ranks[rank].step_seconds else 0.1)  # type: ignore[misc]  # fmt: skip
            found |= daemon("orch_job_rank_step_seconds", times, job_id=JOB, rank=str(rank))
    found |= daemon("orch_daemon_loop_lag_seconds", _of(seen, lambda one, _: one.late_seconds or 0.0))
    return found


@pytest.mark.rare
def test_findings_and_rules_agree(tmp_path: Path) -> None:
    """All cases in one run of promtool, which names those that fail."""
    tests = []
    for case in CASES:
        seen, diagnosis = observations(case), Diagnosis(0.0)
        for at, one in seen:
            diagnosis.observe(one, at, at)
        subjects = [(one.kind, one.rank) for one in diagnosis.findings]
        assert ((case.kind, case.rank) in subjects) == case.told, (case.title, subjects)
        fires = {case.alert: [dict(case.labels)] if case.told else []}
        test = promtool_test(Scenario(case.title, series(case, seen), fires, at=f"{case.minutes}m"))
        test["alert_rule_test"] = [one for one in test["alert_rule_test"] if one["alertname"] == case.alert]
        tests.append(test)
    run_promtool(tmp_path, tests)


def test_what_both_judge_has_one_threshold() -> None:
    said = {alert.name: alert.expr for alert in rules.ALERTS}
    assert f"> {d.NEVER_SAVED_SECONDS:.0f}" in said["OrchJobNeverSaved"]
    assert f"< {d.IDLE_UTILIZATION}" in said["OrchJobGpusIdle"]
    assert f"{d.UNSAVED_SECONDS:.0f}" in said["OrchCheckpointTooOld"]
    assert f"> {d.LATE_SECONDS:g}" in said["OrchDaemonSlow"]
