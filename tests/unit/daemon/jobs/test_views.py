"""Views of the API from a record and its progress: the slow rank, and the state of each rank."""

from __future__ import annotations

from orchestrator.api.views import JobView
from orchestrator.core import events as ev
from orchestrator.core.diagnosis.health import Frame, RankLook, Thread
from orchestrator.core.events import Exit, FirstStep, GangPlaced, RankExited
from orchestrator.core.facts.fact import UnreadableFact
from orchestrator.core.facts.findings import Lateness, NoStep, RankSlow, Sign, Stillness
from orchestrator.core.facts.reasons import ByLimit, ByNodeDrain, ByPreemption, ByUser
from orchestrator.core.job.record import Job
from orchestrator.core.states import StopPurpose
from orchestrator.daemon.jobs.progress import JobProgress
from orchestrator.daemon.jobs.views import event_view, job_view, rank_stacks
from orchestrator.store.records import StoredEvent
from orchestrator.train.script.progress_reading import ProgressSnapshot
from tests.support.records import replace
from tests.unit.core.builders import after, changed, pending, seats, started, up


def running() -> Job:
    job = pending()
    job = after(job, started(job))
    simulated = tuple(replace(seat, gpu_uuids=(f"simulated-a-{seat.rank}",)) for seat in seats(job, ("a", "a")))
    placed = GangPlaced(job_id=job.id, at=2.0, gang=job.gang, seats=simulated)
    return after(job, placed, up(job))


def snapshot(busy: float, **parts: float) -> ProgressSnapshot:
    return ProgressSnapshot(step=9, recent_step_seconds=(1.0, 1.0, 5.0), busy_seconds=busy, metrics=parts)


def view(*ranks: ProgressSnapshot, job: Job | None = None) -> JobView:
    return job_view(job or running(), JobProgress(attempt=1, ranks=dict(enumerate(ranks))), None, "/logs")


def test_a_step_is_shown_at_the_time_that_it_was_done() -> None:
    heard = FirstStep(job_id=running().id, at=9.0, attempt=2, step=7, step_at=8.1, steps_lost=1)
    shown = event_view(StoredEvent(number=4, event=heard))
    assert (shown.at, shown.summary) == (8.1, "first new step 7, 1 step done again")


def test_an_error_is_shown_without_its_place_in_a_librarys_source() -> None:
    message = "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:51093"
    gone = RankExited(
        job_id=running().id,
        at=9.0,
        attempt=1,
        exit=Exit(rank=0, at=9.0, exit_code=None, signal=9, error_type="RuntimeError", error_message=message),
    )
    said = "rank 0 ended with signal 9 (RuntimeError: Connection closed by peer [127.0.0.1]:51093)"
    assert event_view(StoredEvent(number=4, event=gone)).summary == said


def test_events_agree_in_number_and_say_what_is_in_memory_only() -> None:
    job_id = running().id
    for event, said in (
        (ev.AttemptStarted(job_id=job_id, at=1.0, attempt=1, gang=1, nodes=("n",)), "attempt 1: 1 rank on 1 node"),
        (
            ev.AttemptStarted(job_id=job_id, at=1.0, attempt=2, gang=1, nodes=("n", "m")),
            "attempt 2: 2 ranks on 2 nodes",
        ),
        (ev.AttemptGone(job_id=job_id, at=1.0, attempt=2), "all processes of attempt 2 ended"),
        (ev.CheckpointSaved(job_id=job_id, at=1.0, attempt=1, step=7, path="/c"), "checkpoint of step 7 is complete"),
        (
            ev.CheckpointSaved(job_id=job_id, at=1.0, attempt=1, step=7, path=""),
            "snapshot of step 7 is complete, in memory only",
        ),
    ):
        assert event_view(StoredEvent(number=1, event=event)).summary == said


def test_a_stop_is_shown_in_the_words_of_the_jobs_reason() -> None:
    for purpose, by, said in (
        (StopPurpose.CANCEL, ByUser(name="ada"), "cancelled by ada"),
        (StopPurpose.PREEMPT, ByPreemption(job="urgent", priority=60), "making room for urgent, priority 60"),
        (StopPurpose.PREEMPT, ByNodeDrain(name="ada"), "making room (ada drains its node)"),
        (StopPurpose.TIMEOUT, ByLimit(key="max_duration"), "exceeded max_duration"),
    ):
        event = ev.StopRequested(job_id=running().id, at=1.0, purpose=purpose, by=by, deadline=2.0)
        shown = event_view(StoredEvent(number=1, event=event))
        assert shown.summary == f"{said}; its processes have time to save"


def test_on_real_gpus_processor_time_is_no_rank_s_own() -> None:
    job = running()
    real = changed(job, seats=tuple(replace(seat, gpu_uuids=(f"GPU-{seat.rank}",)) for seat in job.seats))
    shown = view(snapshot(0.4), snapshot(0.8), job=real)
    assert [rank.own_seconds for rank in shown.gpus] == [None, None]


def test_findings_are_shown_the_gravest_first_and_a_job_without_a_step_has_no_speed() -> None:
    slow = RankSlow(rank=1, factor=2.0, seconds=0.8, usual_seconds=0.4, since=5.0)
    still = NoStep(
        rank=0,
        seen=Stillness(rank=0, sign=Sign.OUTSIDE, place="pull (/work/data.py:7)"),
        late=Lateness(still_seconds=40.0, usual_seconds=0.1),
    )
    shown = view(snapshot(0.4), snapshot(0.8), job=changed(running(), findings=(slow, still, UnreadableFact(text="?"))))
    assert [found.kind for found in shown.findings] == ["no_step", "rank_slow"]
    assert shown.findings[0].sentence == (
        "no step for 40s, where 100ms is usual; rank 0 waits for a file, the network or a sleep, in pull (/work/data.py:7)"
    )
    assert shown.findings[0].severity == "critical"
    assert shown.findings[1].runbook == "docs/diagnosis.md#rank_slow"
    assert shown.progress is not None
    assert shown.progress.steps_per_second is None
    assert JobView.from_json(shown.to_json()) == shown


def test_stacks_of_a_rank_that_was_reached_and_of_one_that_was_not() -> None:
    frames = (Frame("pull", "/work/data.py", 7),)
    look = RankLook(rank=1, at=0.0, pid=7, state="T", threads=(Thread(name="MainThread", frames=frames),))
    shown = rank_stacks(1, look)
    assert (shown.pid, shown.state, shown.threads[0].frames) == (7, "T", ("pull (/work/data.py:7)",))
    assert "not reached" in rank_stacks(1, None).problem
