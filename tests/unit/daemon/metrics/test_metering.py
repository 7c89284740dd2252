"""Measurements of the daemon and of jobs, as a scrape receives them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.cluster import Node
from orchestrator.core.events import RankPlacement
from orchestrator.core.job.record import Job
from orchestrator.core.states import JobState, StopPurpose
from orchestrator.daemon.jobs.progress import JobProgress
from orchestrator.daemon.metrics import LAGS_KEPT, Metering
from orchestrator.spec.model import CheckpointSpec
from orchestrator.spec.settings import Settings
from orchestrator.telemetry.collectors import LINGER_SECONDS, JobSeries, Snapshot
from orchestrator.train.script.progress_reading import CheckpointFacts, ProgressSnapshot
from tests.unit.core.builders import T0, after, changed, finished, make_spec, pending, started, stop, up


@pytest.fixture
def metering(tmp_path: Path) -> Metering:
    return Metering(Settings(home=tmp_path), started_at=0.0)


def picture(
    metering: Metering, *jobs: Job, progress: Mapping[Any, JobProgress] | None = None, **facts: Any
) -> Snapshot:
    values: dict[str, Any] = {"nodes": (), "finished": (), "progress": progress or {}, "balances": {}, "gpu_states": {}}
    return metering.view(live=jobs, **{**values, **facts})


def running(interval: Any = "auto") -> Job:
    job = pending(make_spec(checkpoint=CheckpointSpec(interval=interval)))
    return after(job, started(job), up(job))


def series(metering: Metering, job: Job, *ranks: ProgressSnapshot) -> JobSeries:
    book = JobProgress(attempt=1, ranks=dict(enumerate(ranks)))
    (found,) = picture(metering, job, progress={job.id: book}).series
    return found


def test_jobs_that_only_wait_count_in_their_queue_and_have_no_series(metering: Metering) -> None:
    now = time.time()
    waits = [
        pending(make_spec(queue=queue), job_id=f"{queue}-{age}", at=now - age)
        for queue, age in (("a", 60), ("a", 90), ("b", 10))
    ]
    shown = picture(metering, *waits, running())
    assert [one.job_id for one in shown.series] == [running().id]
    assert shown.jobs == {("a", "PENDING"): 2, ("b", "PENDING"): 1, ("default", "RUNNING"): 1}
    oldest = shown.oldest_pending_seconds
    assert set(oldest) == {"a", "b", "default"}
    assert oldest["default"] == 0.0
    assert shown.at - oldest["a"] == pytest.approx(now - 90, abs=1e-3)
    assert shown.at - oldest["b"] == pytest.approx(now - 10, abs=1e-3)


@pytest.mark.parametrize(
    ("interval", "facts", "seconds"),
    [
        (timedelta(seconds=30), {}, 30.0),
        (100, {"step_seconds": 0.5}, 50.0),
        ("auto", {"step_seconds": 0.5, "checkpoint": CheckpointFacts(interval_steps=10)}, 5.0),
        ("auto", {"step_seconds": 0.5}, None),
        (100, {}, None),
    ],
    ids=["a time", "steps", "chosen by the rank", "not chosen yet", "no pace yet"],
)
def test_how_often_a_job_means_to_save(metering: Metering, interval: Any, facts: Any, seconds: float | None) -> None:
    found = series(metering, running(interval), ProgressSnapshot(step=1, **facts))
    assert found.checkpoint_interval_seconds == seconds


def test_the_slowest_rank_tells_whether_a_job_lives(metering: Metering) -> None:
    now = time.time()
    quick: dict[str, Any] = {"step": 9, "steps_reported": 9, "step_seconds": 0.1}
    ranks = [
        ProgressSnapshot(last_report_at=now - age, recent_step_seconds=(0.1, 0.3, 0.2), **quick) for age in (1, 90)
    ]
    found = series(metering, running(), *ranks)
    assert found.heartbeat_at == ranks[1].last_report_at
    assert found.rank_step_seconds == {0: 0.2, 1: 0.2}


@pytest.mark.parametrize("suspected", [True, False, None])
def test_a_running_job_shows_whether_it_is_suspected_to_hang(metering: Metering, suspected: bool | None) -> None:
    job = running()
    for shown_job, expected in ((job, suspected), (after(job, stop(job, StopPurpose.PAUSE)), None)):
        shown = picture(metering, shown_job, hang_suspected=lambda _: suspected)
        assert shown.series[0].hang_suspected is expected


def test_a_gpu_that_ranks_share_counts_once(metering: Metering) -> None:
    seats = tuple(
        RankPlacement(rank=rank, node_id="n1", node_name="n1", gpu_ids=("0",), gpu_uuids=("GPU-a",), actor_pid=1)
        for rank in range(2)
    )
    found = series(metering, changed(running(), seats=seats))
    assert found.seats == (("GPU-a", 0), ("GPU-a", 1))
    assert found.gpus == 1


def test_nodes_are_counted_by_what_they_are_good_for(metering: Metering) -> None:
    nodes = [
        Node(id="a", name="a"),
        Node(id="b", name="b", cordoned=True),
        Node(id="c", name="c", alive=False),
        Node(id="d", name="d", reachable=False),
    ]
    assert picture(metering, nodes=nodes).nodes == {"ready": 1, "cordoned": 1, "draining": 0, "unreachable": 2}


def test_a_blocked_loop_shows_as_lag_for_a_while(metering: Metering) -> None:
    assert picture(metering).daemon.loop_lag_seconds is None
    now, shown = 100.0, []

    def lag() -> float | None:
        return picture(metering).daemon.loop_lag_seconds

    async def sleep(seconds: float) -> None:
        nonlocal now
        if len(shown) == LAGS_KEPT + 2:
            raise asyncio.CancelledError
        now += seconds + (0.25 if not shown else 0.0)  # the loop is blocked once
        shown.append(lag())

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(metering.watch_lag(clock=lambda: now, sleep=sleep))
    assert shown == [None, *[pytest.approx(0.25)] * LAGS_KEPT, 0.0]


def test_an_ended_job_is_dropped_once_it_has_no_series_any_more(metering: Metering) -> None:
    for number in range(3):
        job = pending(job_id=f"job-{number}", at=T0)
        end = finished(job, JobState.CANCELLED, at=T0 + number)
        metering.observe(after(job, end), end)
    assert [one.job_id for one in picture(metering).series] == ["job-0", "job-1", "job-2"]
    other = pending(job_id="other", at=T0)
    metering.observe(other, started(other, at=T0 + LINGER_SECONDS + 1.5))
    assert [one.job_id for one in picture(metering).series] == ["job-2"]
