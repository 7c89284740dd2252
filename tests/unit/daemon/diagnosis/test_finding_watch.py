"""Findings from reports and progress: as events, in the record, in metrics and in web hooks."""

from __future__ import annotations

import json
from typing import Any

from orchestrator.core import events as ev
from orchestrator.core.diagnosis.observation import ProcessSeen, StorageSeen, TerminalSeen
from orchestrator.core.facts.faults import ExitCode, GpuLost, Xid
from orchestrator.core.facts.findings import Finding, RestartLoop
from orchestrator.core.lifecycle.fold import fold
from orchestrator.core.notices import notices_of
from orchestrator.core.states import FailureClass
from orchestrator.core.stored import job_from_dict, job_to_dict
from orchestrator.daemon.findings import FindingWatch, Senses, job_seen, rank_seen
from orchestrator.daemon.jobs.progress import JobProgress
from orchestrator.daemon.jobs.views import event_view, job_view
from orchestrator.daemon.web_hooks import with_links
from orchestrator.gpu.exporter import GpuStatus
from orchestrator.gpu.sample import GpuProcess, Throttle, XidCount
from orchestrator.gpu.sampler import Health
from orchestrator.runtime.exporters.actor import ExporterReport
from orchestrator.spec.model import NotifySpec
from orchestrator.store.records import StoredEvent
from orchestrator.telemetry.logging import get_logger
from orchestrator.train.script.progress_reading import CheckpointFacts, ProgressSnapshot
from tests.support.records import replace
from tests.unit.core.builders import after, changed, make_spec, pending, started, up
from tests.unit.gpu.support import gpu_info, sample

UUIDS = ("GPU-a", "GPU-b")


def report(uuid: str, *, lineages: tuple[tuple[int, ...], ...] = (), health: Health = Health.OK, **values: Any) -> Any:
    processes = tuple(GpuProcess(pid=line[0], memory_bytes=1) for line in lineages)
    status = GpuStatus(
        info=gpu_info(uuid), health=health, sample=sample(uuid, processes=processes, **values), error=None
    )
    return ExporterReport(url="http://127.0.0.1:1/metrics", pid=1, status=status, lineages=lineages)


class World:
    """A running job of two ranks with a GPU each, and a clock."""

    def __init__(self) -> None:
        hook = NotifySpec(url="https://example.org/hook", on=("FINDING",))
        job = pending(make_spec(gpu=1.0, notify=(hook,)))
        job = after(job, started(job), up(job))
        seats = tuple(
            ev.RankPlacement(rank=rank, node_id="n", node_name="node1", gpu_ids=("0",), gpu_uuids=(uuid,), actor_pid=5)
            for rank, uuid in enumerate(UUIDS)
        )
        self.job = changed(job, seats=seats, pids=(100, 200))
        self.now = 0.0
        self.wall = (self.job.attempts[-1].running_at or 0.0) + 10.0
        self.reports: dict[str, Any] = {uuid: report(uuid) for uuid in UUIDS}
        self.progress = JobProgress(attempt=1)
        self.processes: dict[int, ProcessSeen] = {}
        self.storage: dict[int, StorageSeen] = {}
        self.terminals: dict[int, TerminalSeen] = {}
        self.starting: set[str] = set()
        self.load_cv: float | None = None
        self.events: list[ev.Event] = []
        self.notices: list[Any] = []
        self.watch = self.daemon()

    def daemon(self) -> FindingWatch:
        return FindingWatch(
            Senses(
                reports=lambda: self.reports,
                progress=lambda _: self.progress,
                stall=lambda _: None,
                processes=lambda _: self.processes,
                storage=lambda _: self.storage,
                terminals=lambda _: self.terminals,
                missing=lambda: (),
                is_starting=lambda uuid: uuid in self.starting,
                load_cv=lambda _: self.load_cv,
            ),
            jobs=lambda: [self.job],
            post=self.post,
            log=get_logger("test"),
            clock=lambda: self.now,
            wall=lambda: self.wall + self.now,
        )

    def post(self, events: Any) -> None:
        for event in events:
            before, self.job = self.job, fold(self.job, event)
            self.events.append(event)
            self.notices += notices_of(before, self.job, event.at)

    def run(self, seconds: float, *, late: float | None = None) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 2.0
            self.watch.tick(late)

    @property
    def open(self) -> list[tuple[str, int | None]]:
        return [(one.kind, one.rank) for one in self.job.findings if isinstance(one, Finding)]


def test_a_rank_at_a_breakpoint_is_told_with_the_command_also_when_others_have_ended() -> None:
    world = World()
    world.terminals = {1: TerminalSeen(rank=1, stopped_at=5.0)}
    world.run(4.0)
    assert world.open == [("rank_at_breakpoint", 1)]
    assert f"`orch attach {world.job.id} --rank 1`" in event_view(StoredEvent(number=1, event=world.events[0])).summary
    end = ev.Exit(rank=0, at=world.wall, exit_code=0, signal=None)
    world.post([ev.RankExited(job_id=world.job.id, at=world.wall, attempt=1, exit=end)])
    world.run(20.0)
    assert world.open == [("rank_at_breakpoint", 1)]
    world.terminals = {1: TerminalSeen(rank=1)}
    world.run(10.0)
    assert world.open == []


def test_a_process_of_no_job_is_found_told_and_forgotten_when_it_is_gone() -> None:
    world = World()
    world.reports["GPU-b"] = report("GPU-b", lineages=((201, 200, 1), (666, 1)))
    world.run(20.0)
    assert world.open == [("gpu_shared", 1)]
    (opened,) = world.events
    assert isinstance(opened, ev.FindingOpened)
    said = event_view(StoredEvent(number=1, event=opened)).summary
    assert said.startswith(
        "found: a process that belongs to no job here uses the GPU of rank 1 (GPU-b): 666; find its owner"
    )
    (notice,) = world.notices
    told = json.loads(notice.body)
    assert told["finding"]["kind"] == "gpu_shared"
    assert told["finding"]["runbook"] == "docs/diagnosis.md#gpu_shared"
    assert told["text"].startswith(f"{world.job.id}: a process that belongs to no job")
    assert job_from_dict(json.loads(json.dumps(job_to_dict(world.job)))).findings == world.job.findings
    world.watch = world.daemon()
    world.run(10.0)
    assert len(world.events) == 1, "a restarted daemon goes on with it"
    world.reports["GPU-b"] = report("GPU-b", lineages=((201, 200, 1),))
    world.run(40.0)
    assert world.open == []
    assert isinstance(world.events[-1], ev.FindingClosed)
    assert event_view(StoredEvent(number=2, event=world.events[-1])).summary.startswith("over: a process that belongs")


def test_a_view_has_the_newest_figures_and_the_record_those_of_the_opening() -> None:
    world = World()
    world.run(60.0, late=1.0)
    world.run(60.0, late=3.0)
    assert len(world.events) == 1
    shown = job_view(world.job, None, None, "", findings=world.watch.current(world.job.id))
    assert [one.sentence[:34] for one in shown.findings] == ["the daemon's loop is 3s late: the "]
    assert job_view(world.job, None, None, "").findings[0].sentence.startswith("the daemon's loop is 1s")
    assert shown.findings[0].since == world.job.findings[0].since  # type: ignore[attr-defined]  # it is a finding
    world.watch = world.daemon()
    assert world.watch.current(world.job.id) == ()
    (shown_first,) = job_view(world.job, None, None, "", findings=()).findings
    assert shown_first.sentence == "daemon_overloaded: open since before the daemon started, and not measured again yet"
    assert (shown_first.fact, shown_first.since) == ({"kind": "daemon_overloaded"}, shown.findings[0].since)
    told = []
    for _ in range(30):
        world.run(2.0, late=2.0)
        told += [one.sentence() for one in world.watch.current(world.job.id)]
    assert told
    assert all(one.startswith("the daemon's loop is 2s") for one in told), "never those of the opening"
    assert len(world.events) == 1


def test_runbooks_are_addresses_where_the_documentation_is_served() -> None:
    world = World()
    world.run(60.0, late=1.0)
    (found,) = job_view(world.job, None, None, "", docs_url="https://example.org/docs").findings
    assert found.runbook == "https://example.org/docs/diagnosis.md#daemon_overloaded"
    body = json.dumps({"text": "x", "finding": {"runbook": "docs/diagnosis.md#daemon_overloaded"}})
    assert json.loads(with_links(body, "https://example.org/docs"))["finding"]["runbook"] == found.runbook
    assert with_links(body, "") == body
    assert with_links('{"finding": null}', "https://example.org/docs") == '{"finding": null}'


def test_all_restarts_are_counted_also_those_that_the_record_no_longer_lists() -> None:
    world = World()
    failed = ev.AttemptFailed(
        job_id=world.job.id,
        at=world.wall,
        attempt=1,
        failure=ev.Failure(failure_class=FailureClass.INFRA, cause=ExitCode(rank=0, exit_code=1)),
        failed_at=world.wall,
        retry=True,
        keep_gang=False,
        not_before=0.0,
    )
    job = replace(fold(world.job, failed), restarts={"infra": 1998, "preemption": 7, "hang": 2})
    seen = job_seen(job, None, {}, None, holding=(), missing=(), interval_seconds=None, now=world.wall + 1.0)
    assert seen.restarts is not None
    assert (seen.restarts.count, seen.restarts.total) == (1, 2000)


def test_an_exporter_that_does_not_answer_and_an_xid_are_told_with_their_gpu() -> None:
    world = World()
    del world.reports["GPU-a"]
    old = XidCount(code=13, count=1, last_timestamp=1.0)
    new = XidCount(code=48, count=1, last_timestamp=world.wall)
    world.reports["GPU-b"] = report("GPU-b", xids=(old, new))
    world.run(40.0)
    assert sorted(world.open) == [("exporter_silent", 0), ("gpu_fault", 1)]
    assert Xid(gpu_uuid="GPU-b", number=48, at=world.wall) in [
        getattr(one, "fault", None) for one in world.job.findings
    ]


def test_an_exporter_that_starts_is_not_silent_and_one_that_never_starts_is() -> None:
    world = World()
    del world.reports["GPU-a"]
    world.starting = {"GPU-a"}
    world.run(60.0)
    assert world.open == []
    world.starting = set()
    world.run(40.0)
    assert world.open == [("exporter_silent", 0)]


def test_an_exporter_that_a_busy_machine_keeps_waiting_for_half_a_minute_is_not_silent() -> None:
    world = World()
    for _ in range(3):
        del world.reports["GPU-a"]
        world.run(28.0)
        world.reports["GPU-a"] = report("GPU-a")
        world.run(2.0)
    assert not world.events


def test_a_silent_exporter_stays_one_while_a_new_daemon_waits_for_its_first_answer() -> None:
    world = World()
    del world.reports["GPU-a"]
    world.run(40.0)
    world.watch, world.starting = world.daemon(), {"GPU-a"}
    world.run(60.0)
    assert world.open == [("exporter_silent", 0)]
    assert not any(isinstance(event, ev.FindingClosed) for event in world.events)
    world.reports["GPU-a"] = report("GPU-a")
    world.run(12.0)
    assert world.open == []


def test_findings_end_with_their_attempt_and_a_restart_loop_does_not() -> None:
    world = World()
    loop = RestartLoop(restarts=3, seconds=60.0, cause=ExitCode(rank=0, exit_code=1))
    del world.reports["GPU-a"]
    world.run(40.0)
    world.post([ev.FindingOpened(job_id=world.job.id, at=2.0, attempt=1, finding=loop)])
    assert world.open == [("exporter_silent", 0), ("restart_loop", None)]
    late = ev.FindingOpened(job_id=world.job.id, at=2.0, attempt=7, finding=loop)
    assert fold(world.job, late) is world.job
    assert fold(world.job, world.events[-1]) is world.job, "it is open already"
    world.job = fold(world.job, ev.AttemptSucceeded(job_id=world.job.id, at=3.0, attempt=1))
    assert world.open == [("restart_loop", None)]
    world.job = fold(world.job, ev.GangReleased(job_id=world.job.id, at=4.0, gang=world.job.gang))
    done = ev.JobFinished(job_id=world.job.id, at=5.0, state=world.job.state.SUCCEEDED, reason=world.job.reason)
    assert fold(world.job, done).findings == ()


def test_what_ranks_report_becomes_an_observation() -> None:
    told = ProgressSnapshot(
        step=9,
        steps_reported=9,
        recent_step_seconds=(0.1,) * 9,
        metrics={
            "loss": float("nan"),
            "val_loss": 1.0,
            "data_seconds": 0.02,
            "lr": 0.1,
            "forward_seconds": float("inf"),
        },
        phase="evaluate",
    )
    seen = rank_seen(3, told)
    assert (seen.rank, seen.steps, seen.training, set(seen.losses)) == (3, 9, False, {"loss", "val_loss"})
    assert seen.parts == {"data_seconds": 0.02}
    assert rank_seen(0, replace(told, phase="train")).training


def test_saves_and_drivers_become_an_observation() -> None:
    world = World()
    failing = CheckpointFacts(failed_saves=1, failed_at=world.wall, failure="no space left")
    world.progress.ranks[0] = ProgressSnapshot(checkpoint=failing)
    world.reports["GPU-a"] = report("GPU-a", health=Health.LOST)
    world.reports["GPU-b"] = report("GPU-b", throttle=((Throttle.THERMAL, True),), memory_total_bytes=80 << 30)

    def look(later: float) -> Any:
        return job_seen(
            world.job,
            world.progress,
            world.reports,
            None,
            holding=[world.job],
            missing=(),
            interval_seconds=60.0,
            now=world.wall + later,
        )

    seen = look(10.0)
    assert (seen.saves.failures, seen.saves.said, seen.saves.ever) == (1, "no space left", False)
    assert look(70.0).saves.failures == 2
    assert seen.gpus[0].fault == GpuLost(gpu_uuid="GPU-a")
    assert seen.gpus[1].throttle == ("thermal",)
    assert seen.gpus[1].node == "node1"
    assert not seen.certain_work
    assert seen.gpus[1].memory_total_bytes == 80 << 30
    stamped = world.reports["GPU-b"].status.sample.timestamp
    assert seen.gpus[1].clock_offset_seconds == stamped - (world.wall + 10.0)
    assert seen.saves.stall_seconds is None
    world.progress.ranks[0] = ProgressSnapshot(saves=2, save_seconds=3.0)
    assert look(10.0).saves.stall_seconds == 3.0


def test_snapshots_that_do_not_reach_storage_are_found_although_every_rank_goes_on() -> None:
    world = World()
    world.storage = {
        1: StorageSeen(
            rank=1, failures=9, failing_since=world.wall - 60.0, cause="ENOSPC", said="0 bytes free", free_bytes=0
        )
    }
    world.run(20.0)
    assert world.open == [("storage_full", None)]
    world.storage = {1: replace(world.storage[1], cause="EIO", said="Input/output error")}
    world.run(40.0)
    assert world.open == [("saves_failing", None)]


def test_a_write_that_is_tried_again_soon_and_succeeds_is_no_finding() -> None:
    world = World()
    world.storage = {0: StorageSeen(failures=4, failing_since=world.wall - 1.0, cause="EIO", said="Input/output error")}
    world.run(6.0)
    world.storage = {0: StorageSeen(writes=1)}
    world.run(10.0)
    assert (world.open, world.events) == ([], [])


def test_a_late_daemon_is_found_and_a_single_pause_is_none() -> None:
    world = World()
    world.run(2.0, late=60.0)
    world.run(60.0, late=0.01)
    assert world.open == []
    world.run(60.0, late=1.5)
    assert world.open == [("daemon_overloaded", None)]
    world.run(90.0, late=0.01)
    assert world.open == []


def test_memory_of_no_process_and_errors_of_memory_are_those_of_the_gpu() -> None:
    world = World()
    own = ((201, 200, 1),)
    taken: dict[str, Any] = {"memory_total_bytes": 80 << 30, "memory_used_bytes": 60 << 30}
    world.reports["GPU-b"] = report("GPU-b", lineages=own, **taken)
    world.run(40.0)
    assert world.open == [("gpu_memory_taken", 1)]
    world.reports["GPU-b"] = report("GPU-b", lineages=(*own, (666, 1)), **taken)
    world.run(60.0)
    assert world.open == [("gpu_shared", 1)], "a process that can be seen says more"
    world = World()
    world.reports["GPU-b"] = report("GPU-b", lineages=(), **taken)
    world.run(40.0)
    assert world.open == [], "in a container the driver tells of no process at all"
    world.reports["GPU-b"] = report("GPU-b", ecc_errors=(("uncorrected", "volatile", 3), ("corrected", "aggregate", 9)))
    world.run(10.0)
    assert world.open == []
    world.reports["GPU-b"] = report(
        "GPU-b",
        ecc_errors=(("uncorrected", "volatile", 5), ("corrected", "aggregate", 99)),
        remapped_rows=(("correctable", 1),),
    )
    world.run(10.0)
    assert world.open == [("gpu_fault", 1), ("gpu_memory_errors", 1)]
    said = [event_view(StoredEvent(number=1, event=event)).summary for event in world.events]
    assert any("2 errors that it cannot correct" in one for one in said)
    assert any("has corrected 90 errors of its memory in ten minutes" in one for one in said)


def test_unevenly_loaded_gpus_are_found_by_the_balance_that_the_daemon_shows() -> None:
    world = World()
    uneven = ("load_uneven", None)

    def run(seconds: int) -> None:
        for _ in range(0, seconds, 2):
            values = {"at": world.now, "utilization": 0.9, "power_watts": 300.0}
            world.reports = {uuid: report(uuid, **values) for uuid in UUIDS}
            world.run(2.0)

    run(100)
    assert uneven not in world.open, "without a balance"
    world.load_cv = 0.4
    run(100)
    assert uneven in world.open
    world.load_cv = 0.1
    run(100)
    assert uneven not in world.open


def test_an_attempt_that_does_not_load_its_checkpoint_is_behind_it_until_it_has_passed_it() -> None:
    world = World()
    first = world.job.attempts[-1]
    world.job = changed(world.job, attempts=(replace(first, number=2, start_step=640),))
    world.progress = JobProgress(attempt=2)

    def behind(**values: Any) -> tuple[int, int] | None:
        world.progress.ranks = {0: ProgressSnapshot(**values)}
        seen = job_seen(
            world.job, world.progress, {}, None, holding=(), missing=(), interval_seconds=None, now=world.wall
        )
        return seen.saves.behind

    assert behind() is None, "it has made no step yet"
    assert behind(step=3, max_step=5) == (5, 640)
    assert behind(step=20, max_step=20, guessed=True) == (20, 640)
    assert behind(step=20, max_step=20, total_steps=100, guessed=True) is None, "a bar of one epoch"
    assert behind(step=641, max_step=641) is None
    world.job = changed(world.job, attempts=(replace(first, number=1, start_step=640),))
    assert behind(step=3, max_step=5) is None
