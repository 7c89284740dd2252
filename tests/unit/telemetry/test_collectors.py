"""The daemon's metrics: exactly the catalogue, without unknown values, and bounded whatever the number of jobs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from orchestrator import catalogue as c
from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import ByUser, RanksSucceeded
from orchestrator.core.ids import JobId
from orchestrator.core.states import JobState, StopPurpose
from orchestrator.telemetry.collectors import (
    LINGER_SECONDS,
    MAX_METRICS,
    AnnotationKind,
    DaemonFacts,
    Disk,
    Histogram,
    JobSeries,
    Snapshot,
    mark_of,
    registry,
    render,
)
from tests.support.records import replace
from tests.support.work import calls
from tests.unit.core.builders import failure

NOW = 1_800_000_000.0
DAEMON = DaemonFacts(
    version="0.1.0",
    node="n0",
    started_at=NOW - 60,
    loop_lag_seconds=0.001,
    commit_failures=2,
    disks=(Disk(node="n0", path="/var/lib/orch", free_bytes=10, size_bytes=100),),
)


def waited(*seconds: float) -> Histogram:
    histogram = Histogram(c.QUEUE_WAIT)
    for value in seconds:
        histogram.observe(value)
    return histogram


def full_job(job_id: str = "digits-abc234", *, live: bool = True, ended_at: float | None = None) -> JobSeries:
    return JobSeries(
        job_id=job_id,
        name="digits",
        user="ada",
        queue="default",
        state="RUNNING" if live else "SUCCEEDED",
        live=live,
        ended_at=ended_at,
        seats=(("GPU-a", 0), ("GPU-b", 1)) if live else (),
        gpus=2 if live else 0,
        step=7,
        progress=0.5,
        samples=700,
        tokens=9000,
        mfu=0.4,
        metrics={"loss": 0.25, "accuracy": 0.9},
        rank_step_seconds={0: 0.1, 1: 0.2},
        heartbeat_at=NOW - 1,
        hang_suspected=False,
        restarts={"infra": 2},
        balance_cv={"utilization": 0.1, "power": math.nan},
        balance_min_per_median={"utilization": 0.9},
        silent_gpus=0,
        gpu_seconds={"productive": 50.0},
        checkpoint_at=NOW - 30,
        checkpoint_interval_seconds=60.0,
        findings=(("rank_slow", "1", "GPU-b", "n1"),),
        events={"start": NOW - 100, "checkpoint": NOW - 30},
    )


def full() -> Snapshot:
    scheduling, submission = Histogram(c.SCHEDULING), Histogram(c.SUBMISSION)
    scheduling.observe(0.0004)
    submission.observe(0.002)
    return Snapshot(
        at=NOW,
        daemon=DAEMON,
        series=(full_job(),),
        queues=("default", "night"),
        jobs={("default", "RUNNING"): 1, ("default", "PENDING"): 3},
        finished={("default", "FAILED", "user"): 4, ("old", "FAILED", "gremlins"): 1},
        gpus={("n0", "busy"): 2, ("n0", "idle"): 0},
        nodes={"ready": 1, "unreachable": 0},
        oldest_pending_seconds={"default": 12.0},
        gpu_seconds={("default", "productive"): 99.0},
        gpu_seconds_uncommitted={"default": 3.0},
        queue_wait={"default": waited(0.05, 0.5, 100_000).counts()},
        scheduling=scheduling.counts(),
        submission=submission.counts(),
    )


def samples(snapshot: Snapshot, accept: str = "text/plain") -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    page, _ = render(registry(lambda: snapshot), accept)
    found = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, "a series is exported twice"
            found[key] = sample.value
    return found


def value(snapshot: Snapshot, name: str, /, **labels: str) -> float | None:
    return samples(snapshot).get((name, tuple(sorted(labels.items()))))


def test_every_metric_of_the_daemon_is_exported_as_the_catalogue_says() -> None:
    page, content_type = render(registry(full), "")
    assert content_type.startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(page.decode())}
    own = [metric for metric in c.METRICS if metric.owner != "gpu"]
    assert set(families) == {metric.name.removesuffix("_total") for metric in own}
    for metric in own:
        family = families[metric.name.removesuffix("_total")]
        assert family.type == metric.type
        assert family.documentation == metric.help
        assert family.samples, metric.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)


def test_openmetrics_is_spoken_to_who_asks_for_it() -> None:
    page, content_type = render(registry(full), "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert page.endswith(b"# EOF\n")
    assert {family.name for family in parse_openmetrics(page.decode())} >= {"orch_jobs", "orch_gpu_seconds"}


def test_values_arrive_unchanged() -> None:
    picture = full()
    assert value(picture, "orch_job_gpu", job_id="digits-abc234", gpu_uuid="GPU-b", rank="1") == 1
    assert value(picture, "orch_job_gpus", job_id="digits-abc234") == 2
    assert value(picture, "orch_job_metric", job_id="digits-abc234", name="loss") == 0.25
    assert value(picture, "orch_job_state", job_id="digits-abc234", state="RUNNING") == 1
    assert value(picture, "orch_job_state", job_id="digits-abc234", state="FAILED") == 0
    assert value(picture, "orch_jobs_finished_total", queue="default", state="FAILED", **{"class": "user"}) == 4
    assert value(picture, "orch_jobs_finished_total", queue="old", state="FAILED", **{"class": "gremlins"}) == 1
    assert value(picture, "orch_gpu_seconds_total", queue="default", phase="productive") == 99
    assert value(picture, "orch_queue_wait_seconds_bucket", queue="default", le="0.5") == 2
    assert value(picture, "orch_queue_wait_seconds_count", queue="default") == 3
    assert value(picture, "orch_queue_wait_seconds_sum", queue="default") == 100_000.55
    assert value(picture, "orch_disk_free_bytes", node="n0", path="/var/lib/orch") == 10


def test_closed_sets_have_their_zeros_so_that_no_first_event_is_missed() -> None:
    picture = full()
    assert value(picture, "orch_job_restarts_total", job_id="digits-abc234", **{"class": "hang"}) == 0
    assert value(picture, "orch_jobs", queue="night", state="PENDING") == 0
    assert value(picture, "orch_jobs_finished_total", queue="night", state="FAILED", **{"class": "infra"}) == 0
    assert value(picture, "orch_gpu_seconds_total", queue="night", phase="lost") == 0
    assert value(picture, "orch_job_gpu_seconds_total", job_id="digits-abc234", phase="lost") == 0


def test_what_is_not_known_has_no_series() -> None:
    bare = JobSeries(job_id="x-222222", name="x", user="u", queue="default", state="STARTING", live=True)
    picture = Snapshot(at=NOW, daemon=DaemonFacts(version="1", node="n", started_at=NOW), series=(bare,))
    names = {name for name, labels in samples(picture) if ("job_id", "x-222222") in labels}
    assert names == {"orch_job_info", "orch_job_state", "orch_job_restarts_total"}
    assert value(full(), "orch_job_gpu_balance_cv", job_id="digits-abc234", quantity="power") is None
    assert value(picture, "orch_daemon_loop_lag_seconds") is None


def test_a_diverged_loss_is_shown_as_such() -> None:
    job = JobSeries(job_id="a", name="a", user="u", queue="q", state="RUNNING", live=True, metrics={"loss": math.nan})
    found = value(Snapshot(at=NOW, daemon=DAEMON, series=(job,)), "orch_job_metric", job_id="a", name="loss")
    assert found is not None
    assert math.isnan(found)


def test_an_ended_job_keeps_its_series_for_a_quarter_of_an_hour_but_not_its_gpus() -> None:
    ended = full_job("a-222222", live=False, ended_at=NOW - LINGER_SECONDS)
    picture = Snapshot(at=NOW, daemon=DAEMON, series=(ended,))
    assert value(picture, "orch_job_state", job_id="a-222222", state="SUCCEEDED") == 1
    assert value(picture, "orch_job_gpus", job_id="a-222222") is None
    assert not [name for name, labels in samples(picture) if name == "orch_job_gpu"]
    later = Snapshot(at=NOW + 1, daemon=DAEMON, series=(ended,))
    assert not [labels for _, labels in samples(later) if ("job_id", "a-222222") in labels]


def test_labels_that_people_choose_are_escaped() -> None:
    job = JobSeries(job_id="a", name='say "hi"\\\n', user="ü", queue="q", state="RUNNING", live=True)
    assert (
        value(
            Snapshot(at=NOW, daemon=DAEMON, series=(job,)),
            "orch_job_info",
            job_id="a",
            name='say "hi"\\\n',
            user="ü",
            queue="q",
        )
        == 1
    )


def test_names_that_a_script_reports_are_capped() -> None:
    many = {f"m{i:04}": float(i) for i in range(1000)}
    job = JobSeries(job_id="a", name="a", user="u", queue="q", state="RUNNING", live=True, metrics=many)
    found = [
        labels for name, labels in samples(Snapshot(at=NOW, daemon=DAEMON, series=(job,))) if name == "orch_job_metric"
    ]
    assert len(found) == MAX_METRICS


class Counted(list[JobSeries]):
    """A list of jobs that counts its iterations."""

    passes = 0

    def __iter__(self) -> Iterator[JobSeries]:
        self.passes += 1
        return super().__iter__()


def test_what_a_scrape_of_ten_thousand_jobs_gives_and_costs_is_bounded() -> None:
    """50 run, 100 ended just now, the rest waits or ended long ago: series and work depend on the first two."""
    few = [full_job(f"run-{i:06}") for i in range(50)]
    few += [full_job(f"new-{i:06}", live=False, ended_at=NOW - 10) for i in range(100)]
    jobs = Counted(few)
    jobs += [full_job(f"old-{i:06}", live=False, ended_at=NOW - 86_400) for i in range(5000)]
    jobs += [
        JobSeries(job_id=f"wait-{i:06}", name="w", user="u", queue="default", state="PENDING", live=False)
        for i in range(4850)
    ]
    picture = Snapshot(at=NOW, daemon=DAEMON, series=jobs, jobs={("default", "PENDING"): 4850})
    per_job = len(
        [1 for _, labels in samples(Snapshot(at=NOW, daemon=DAEMON, series=jobs[:1])) if "job_id" in dict(labels)]
    )
    page, _ = render(registry(lambda: picture), "")
    passes = jobs.passes
    series = [line for line in page.decode().splitlines() if not line.startswith("#")]
    assert len(series) < 150 * per_job + 200
    assert not [line for line in series if "old-" in line or "wait-" in line]
    assert passes < 20
    small = registry(lambda: replace(picture, series=few))
    large = registry(lambda: picture)
    work = calls(lambda: render(large, ""))
    assert work < 1.1 * calls(lambda: render(small, "")), "the jobs that have no series cost next to nothing"


def test_marks_are_what_the_boards_draw() -> None:
    from dashboards.job import EVENT_COLORS

    assert set(EVENT_COLORS) == {mark.value for mark in AnnotationKind}


def test_events_leave_their_marks() -> None:
    who = {"job_id": JobId("a-222222"), "at": 10.0}
    cases: list[tuple[ev.Event, tuple[AnnotationKind, float] | None]] = [
        (ev.AttemptRunning(**who, attempt=1, pids=(1,)), (AnnotationKind.START, 10.0)),
        (ev.CheckpointSaved(**who, attempt=1, step=5, path=""), (AnnotationKind.CHECKPOINT, 10.0)),
        (
            ev.AttemptFailed(
                **who, attempt=1, failure=failure(), failed_at=9.0, retry=True, keep_gang=True, not_before=0.0
            ),
            (AnnotationKind.FAILURE, 9.0),
        ),
        (ev.FirstStep(**who, attempt=2, step=6, step_at=9.5, steps_lost=0), (AnnotationKind.RECOVERY, 9.5)),
        (ev.FirstStep(**who, attempt=1, step=1, step_at=9.5, steps_lost=0), None),
        (
            ev.StopRequested(**who, purpose=StopPurpose.PREEMPT, by=ByUser(name="b"), deadline=11),
            (AnnotationKind.PREEMPTION, 10.0),
        ),
        (ev.StopRequested(**who, purpose=StopPurpose.CANCEL, by=ByUser(name="b"), deadline=11), None),
        (ev.JobFinished(**who, state=JobState.SUCCEEDED, reason=RanksSucceeded()), None),
    ]
    for event, expected in cases:
        assert mark_of(event) == expected


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_names_that_scripts_report_stay_in_their_label(accept: str) -> None:
    """A name is a label's value: it can neither end it nor begin a line of its own."""
    names = ['a"} 1\nup{x="', "back\\slash", "{}", "\U0001f600", "a=1,b", "# HELP x", ""]
    metrics = {name: math.inf if number % 2 else math.nan for number, name in enumerate(names)}
    job = replace(full_job(), metrics=metrics)
    page, _ = render(registry(lambda: Snapshot(at=NOW, daemon=DAEMON, series=[job])), accept)
    parse = parse_openmetrics if accept else text_string_to_metric_families
    families = list(parse(page.decode()))
    (family,) = [family for family in families if family.name == c.JOB_METRIC.name]
    assert {tuple(sorted(sample.labels)) for sample in family.samples} == {tuple(sorted(c.JOB_METRIC.labels))}
    assert {sample.labels[c.JOB_METRIC.labels[1]] for sample in family.samples} == set(names)
    assert "up" not in {family.name for family in families}
