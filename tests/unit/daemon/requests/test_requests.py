"""Requests of the API about jobs, on a production loop and a store in memory."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import weakref
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from orchestrator.api.errors import (
    BadRequestError,
    DaemonStoppingError,
    DiskFullError,
    InvalidSpecError,
    NoSuchJobError,
    NotPermittedError,
    RefusedError,
    WorkdirNeededError,
)
from orchestrator.api.protocol import Verb
from orchestrator.api.requests import ActionRequest, ProfileRequest, SubmitRequest
from orchestrator.api.service import Caller, JobFilter
from orchestrator.core.events import GitState, JobFinished, JobSubmitted
from orchestrator.core.facts.reasons import PlacingGang
from orchestrator.core.ids import JobId
from orchestrator.core.scheduler.shares import Sharing
from orchestrator.core.stored import job_from_dict, job_to_dict
from orchestrator.daemon.loop import Published
from orchestrator.daemon.metrics import Metering
from orchestrator.daemon.nodes.care import LoopNodes
from orchestrator.daemon.nodes.quarantine import NodeQuarantine
from orchestrator.daemon.requests.actions import JobActions
from orchestrator.daemon.requests.files import JobSpecs
from orchestrator.daemon.requests.pruning import Pruning
from orchestrator.daemon.requests.ranks import RankInspection
from orchestrator.daemon.requests.reader import JobReader, LiveFacts
from orchestrator.daemon.requests.submissions import Submissions
from orchestrator.daemon.sharing import SharingState
from orchestrator.daemon.stopping import StopRequest
from orchestrator.daemon.submitting.under_way import SubmissionsUnderWay
from orchestrator.runtime.pools import Pool, Pools
from orchestrator.spec.queues import parse_queues
from orchestrator.spec.settings import Settings
from orchestrator.store.records import DiskStatus, DiskTrouble
from orchestrator.train.script.profiling import TraceRefusedError
from tests.support.records import replace
from tests.unit.core.builders import node, pending, running, started
from tests.unit.daemon.parts import ADA, BOB, Rounds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from orchestrator.core.job.record import Job
    from orchestrator.daemon.jobs.progress import JobProgress

T = TypeVar("T")
YAML = """
version: 1
name: tiny
entrypoint: python -c "pass"
working_dir: null
resources: {num_workers: 2, resources_per_worker: {gpu: 0, cpu: 1}}
"""


class NoProgress:
    def of(self, _: JobId) -> JobProgress | None:
        return None

    def left(self, _: JobId) -> None:
        return None

    async def recall(self, _: Any) -> None:
        pass


class Counted:
    def __init__(self) -> None:
        self.took = self.failed = 0

    def submitted(self, _: float) -> None:
        self.took += 1

    def commit_failed(self) -> None:
        self.failed += 1


class Desk:
    """Every part, on one loop and one store."""

    def __init__(self, rounds: Rounds, home: Path, **environ: str) -> None:
        self.rounds = rounds
        self.settings = Settings.from_environ({"ORCH_HOME": str(home), **environ})
        self.settings.paths.jobs.mkdir(parents=True)
        loop, store = rounds.loop, rounds.store
        self.stop, self.counted, self.blind = StopRequest(), Counted(), list[str]()
        self.nodes = LoopNodes(loop, NodeQuarantine(), self.stop)
        self.nodes.set({"a": node("a", cpus=4)})
        self.reader = JobReader(loop, store, self.settings.paths, Pools(), NoProgress(), LiveFacts())
        self.under_way = SubmissionsUnderWay(self.settings.paths, Pools().submissions)
        self.submissions = self.submissions_with(Pools().submissions)
        self.actions = JobActions(loop, self.reader, self.submissions, self.settings, end_collection=lambda _job: False)

    def submissions_with(self, pool: Pool) -> Submissions:
        return Submissions(
            self.rounds.loop,
            self.rounds.store,
            self.settings,
            admission=self.stop,
            nodes=self.nodes,
            counter=self.counted,
            blind_to=self.blind_to,
            resume_path=self.reader.checkpoint_path,
            pool=pool,
            under_way=self.under_way,
        )

    async def blind_to(self, _: str) -> list[str]:
        return self.blind

    def request(self, text: str = YAML, **fields: Any) -> SubmitRequest:
        import sys

        values: dict[str, Any] = {"source": "job.yaml", "idempotency_key": "k", "cwd": "/", "path": "/usr/bin"}
        return SubmitRequest(yaml=text, python=sys.executable, **{**values, **fields})

    async def act(self, job_id: JobId, verb: Verb, **fields: Any) -> Any:
        return await self.actions.act(job_id, ActionRequest(verb=verb, **fields), ADA)


@asynccontextmanager
async def desk(tmp_path: Path, **environ: str) -> AsyncIterator[Desk]:
    async with Rounds() as rounds:
        yield Desk(rounds, tmp_path / "home", **environ)


def on_a_desk(tmp_path: Path, story: Callable[[Desk], Awaitable[None]], **environ: str) -> None:
    async def run() -> None:
        async with asyncio.timeout(300), desk(tmp_path, **environ) as made:
            await story(made)

    asyncio.run(run())


def test_a_submission_is_durable_and_known_to_the_loop(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        reply = await desk.submissions.submit(desk.request(), ADA)
        assert reply.created
        assert reply.job_id is not None
        assert (await desk.rounds.store.job(reply.job_id)).submission.user == "ada"
        assert reply.job_id in desk.rounds.loop.jobs
        again = await desk.submissions.submit(desk.request(), ADA)
        assert (again.job_id, again.created) == (reply.job_id, False)
        assert desk.counted.took == 2
        with pytest.raises(RefusedError):
            await desk.submissions.submit(desk.request(YAML.replace("tiny", "other")), ADA)
        assert [p.name for p in desk.settings.paths.jobs.iterdir()] == [reply.job_id]  # no files of refused submissions

    on_a_desk(tmp_path, story)


def test_a_submission_is_refused_for_what_it_lacks(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        secret = await desk.submissions.submit(desk.request(YAML + "secrets: [TOKEN]\n"), ADA)
        assert (secret.job_id, secret.needs_secrets) == (None, ("TOKEN",))
        desk.blind.append("host-b (b)")
        with pytest.raises(RefusedError, match="is not shared with host-b"):
            await desk.submissions.submit(desk.request(YAML + f"checkpoint: {{storage_path: {tmp_path}}}\n"), ADA)
        desk.rounds.store.disk = lambda: DiskStatus(free_bytes=1, reserve_present=True, trouble=DiskTrouble.FULL)  # type: ignore[method-assign]
        with pytest.raises(DiskFullError):
            await desk.submissions.submit(desk.request(), ADA)
        desk.stop.now()
        with pytest.raises(DaemonStoppingError):
            await desk.submissions.submit(desk.request(), ADA)
        assert await desk.reader.jobs(JobFilter()) == []

    on_a_desk(tmp_path, story)


class CountedPool(Pool):
    """Pool that records the functions that it runs."""

    def __init__(self) -> None:
        super().__init__("submissions", 1, 1)
        self.ran: list[str] = []

    async def run(self, function: Callable[..., T], *args: object) -> T:
        self.ran.append(function.__name__)
        return await super().run(function, *args)


def test_a_submission_without_a_directory_takes_two_turns_of_a_thread(tmp_path: Path) -> None:
    """Each turn costs the daemon about as much as reading a small submission does."""

    async def story(desk: Desk) -> None:
        pool = CountedPool()
        taker = desk.submissions_with(pool)
        await taker.submit(desk.request(), ADA)
        assert pool.ran == ["check", "_lay_out_all"]
        (tmp_path / "train.py").write_text("import torch\n")
        text = YAML.replace('python -c "pass"', "python train.py").replace("null", str(tmp_path))
        await taker.submit(desk.request(text, idempotency_key="other"), ADA)
        assert pool.ran.count("torch_notes") == 1, "what a script of a directory imports is looked at"
        pool.close()

    on_a_desk(tmp_path, story)


def test_a_repeated_submission_is_answered_whatever_has_changed_since(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        reply = await desk.submissions.submit(desk.request(), ADA)
        desk.rounds.store.disk = lambda: DiskStatus(free_bytes=1, reserve_present=True, trouble=DiskTrouble.FULL)  # type: ignore[method-assign]
        again = await desk.submissions.submit(desk.request(), ADA)
        assert (again.job_id, again.created) == (reply.job_id, False)
        with pytest.raises(DiskFullError):
            await desk.submissions.submit(desk.request(YAML.replace("tiny", "other")), ADA)
        with pytest.raises(DiskFullError):
            await desk.submissions.submit(desk.request(idempotency_key="another"), ADA)

    on_a_desk(tmp_path, story)


def test_a_plan_says_where_when_and_whether_a_job_starts(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        now = await desk.submissions.plan(desk.request(), ADA)
        assert (now.starts, [seat.node for seat in now.seats]) == ("now", ["a", "a"])
        never = await desk.submissions.plan(desk.request(YAML.replace("cpu: 1", "cpu: 9")), ADA)
        assert never.starts == "never"
        job = pending()
        desk.rounds.loop.jobs = Published([job])
        later = await desk.submissions.plan(desk.request(), ADA)
        assert (later.starts, later.ahead) == ("later", (job.id,))

    on_a_desk(tmp_path, story)


def test_actions_are_durable_when_they_are_answered(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.nodes.forget()  # nothing is placed
        job = await desk.rounds.accept()
        assert (await desk.act(job.id, Verb.PAUSE)).state == "SUSPENDED"
        assert (await desk.act(job.id, Verb.UPDATE, priority=90)).message == "priority is 90 now"
        assert (await desk.rounds.store.job(job.id)).priority == 90
        assert (await desk.act(job.id, Verb.RESUME)).state == "PENDING"
        assert (await desk.act(job.id, Verb.RESUME)).state == "PENDING"
        assert (await desk.act(job.id, Verb.CANCEL)).state == "CANCELLED"
        assert (await desk.act(job.id, Verb.CANCEL)).message == "it is cancelled already"
        for verb, fields in ((Verb.PAUSE, {}), (Verb.RESUME, {}), (Verb.UPDATE, {"priority": 1})):
            with pytest.raises(RefusedError):
                await desk.act(job.id, verb, **fields)
        with pytest.raises(BadRequestError):
            await desk.act((await desk.rounds.accept(job_id="other-aaaaaa")).id, Verb.UPDATE)

    on_a_desk(tmp_path, story)


def test_a_job_that_is_being_cancelled_is_not_paused(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        job = await desk.rounds.accept()
        await desk.rounds.loop.command(lambda: [started(desk.rounds.loop.decided[job.id])])
        assert (await desk.act(job.id, Verb.CANCEL)).state == "DRAINING"
        with pytest.raises(RefusedError, match="is being cancelled; it cannot be paused"):
            await desk.act(job.id, Verb.PAUSE)

    on_a_desk(tmp_path, story)


def test_a_job_is_found_by_id_prefix_and_name_and_read_page_by_page(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.nodes.forget()
        first = await desk.rounds.accept(job_id="one-aaaaaa")
        second = await desk.rounds.accept(job_id="two-bbbbbb")
        assert await desk.reader.resolve("one-a", ADA) == first.id
        assert [view.id for view in await desk.reader.jobs(JobFilter())] == [second.id, first.id]
        assert [view.id for view in await desk.reader.jobs(JobFilter(before=second.id))] == [first.id]
        assert [event.sequence for event in await desk.reader.events(first.id, 0, tail=1)] == [1]
        assert await desk.reader.checkpoints(first.id, verify=False) == []
        with pytest.raises(NoSuchJobError):
            await desk.reader.resolve("three", ADA)
        with pytest.raises(BadRequestError):
            await desk.reader.checkpoint_path("one@last", ADA)

    on_a_desk(tmp_path, story)


def test_a_name_means_the_caller_s_own_job_and_only_its_user_starts_from_its_checkpoints(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.nodes.forget()
        mine = await desk.rounds.accept(job_id="one-aaaaaa", spec={"name": "one"})
        theirs = await desk.rounds.accept(job_id="one-bbbbbb", spec={"name": "one"}, user="bob", uid=BOB.uid)
        await desk.rounds.accept(job_id="two-bbbbbb", spec={"name": "two"}, user="bob", uid=BOB.uid)
        assert [await desk.reader.resolve(ref, ADA) for ref in ("one", "bob/one")] == [mine.id, theirs.id]
        assert [await desk.reader.resolve(ref, BOB) for ref in ("one", "ada/one")] == [theirs.id, mine.id]
        with pytest.raises(NoSuchJobError, match="you have no job 'two'") as caught:
            await desk.reader.resolve("two", ADA)
        assert caught.value.hint == "write bob/two (two-bbbbbb)"
        for ref in (mine.id, "ada/one", "one-a", "ada/one@7"):
            with pytest.raises(NotPermittedError, match="belongs to ada; bob may not start from a checkpoint of it"):
                await desk.reader.checkpoint_path(ref, BOB)
        domain = await desk.rounds.accept(job_id="one-cccccc", spec={"name": "one"}, user="eve@lab", uid=1002)
        with pytest.raises(NoSuchJobError):
            await desk.reader.resolve("eve/one", ADA)
        assert await desk.reader.resolve("eve@lab/one", ADA) == domain.id
        for ref, caller in ((theirs.id, ADA), ("one", BOB), ("eve@lab/one", ADA)):  # ADA is the daemon's owner
            with pytest.raises(BadRequestError, match="has no good checkpoint"):
                await desk.reader.checkpoint_path(ref, caller)

    on_a_desk(tmp_path, story)


def test_no_git_runs_in_a_submitted_directory_and_the_submitter_s_facts_are_kept(tmp_path: Path) -> None:
    directory, ran = tmp_path / "code", tmp_path / "ran"
    (directory / ".git").mkdir(parents=True)
    (directory / "train.py").touch()
    subprocess.run(["git", "init", "-q", str(directory)], check=True, capture_output=True)
    with (directory / ".git" / "config").open("a") as config:
        config.write(f'[core]\n\tfsmonitor = "touch {ran}; false"\n')

    async def story(desk: Desk) -> None:
        git = GitState(commit="c" * 40, branch="main", dirty=True)
        for key, facts in (("key-none", None), ("key-git", git)):
            text = YAML.replace("working_dir: null", "working_dir: .")
            request = desk.request(text, cwd=str(directory), git=facts, idempotency_key=key)
            reply = await desk.submissions.submit(request, BOB)
            job = await desk.reader.record(JobId(reply.job_id or ""))
            (event,) = [e.event for e in await desk.rounds.store.events(job.id) if isinstance(e.event, JobSubmitted)]
            assert event.git == facts
            assert os.listdir(job.submission.work_dir) == ["train.py"]
        assert not ran.exists()

    on_a_desk(tmp_path, story)


def test_another_user_s_job_is_waited_for_by_user_and_name_and_not_by_chance(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await desk.rounds.accept(job_id="prepare-aaaaaa", spec={"name": "prepare"})
        wanted = YAML + "depends_on: [{job: prepare}]\n"
        with pytest.raises(InvalidSpecError) as caught:
            await desk.submissions.submit(desk.request(wanted), BOB)
        (problem,) = caught.value.problems
        assert problem.message == "you have no job 'prepare'; other users have"
        assert problem.hint == "write ada/prepare (prepare-aaaaaa)"
        reply = await desk.submissions.submit(desk.request(wanted.replace("prepare", "ada/prepare")), BOB)
        assert (await desk.reader.job(JobId(reply.job_id or ""))).depends_on == {"prepare-aaaaaa": "success"}

    on_a_desk(tmp_path, story)


@pytest.mark.parametrize(
    ("entrypoint", "reason"),
    [
        ("python " + "x" * 300 + ".py", "cannot be read: File name too long"),
        ("python loop", "cannot be read: Too many levels"),
        ("python pipe", "is not a regular file"),
        ("python directory", "is not a regular file"),
        ("{here}/directory/python train.py", "is not a regular file"),
        ("{here}/a/python train.py", "is not a regular file"),
        ("{here}/b/python train.py", "cannot be executed"),
    ],
)
def test_files_of_a_submission_that_are_no_files_are_errors_of_the_job(
    tmp_path: Path, entrypoint: str, reason: str
) -> None:
    here = tmp_path / "submitted"
    here.mkdir()
    (here / "loop").symlink_to("loop")
    os.mkfifo(here / "pipe", 0o700)
    (here / "directory" / "python").mkdir(parents=True)
    (here / "a").mkdir()
    os.mkfifo(here / "a" / "python", 0o700)
    (here / "b").mkdir()
    (here / "b" / "python").symlink_to("python")
    (here / "train.py").touch()
    text = f"version: 1\nname: odd\nentrypoint: {entrypoint.format(here=here)}\nresources: {{num_workers: 1}}\n"

    async def story(desk: Desk) -> None:
        for ask in (desk.submissions.submit, desk.submissions.plan):
            with pytest.raises(InvalidSpecError) as refused:
                await ask(desk.request(text, cwd=str(here)), ADA)
            (problem,) = refused.value.problems
            assert reason in problem.message

    on_a_desk(tmp_path, story)


@pytest.mark.parametrize("name", ["x" * 300, "loop", "pipe.whl"])
def test_modules_that_are_no_files_are_errors_of_the_job(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe.whl")
    text = f"version: 1\nname: odd\nentrypoint: echo\nruntime_env: {{py_modules: [{name}]}}\nresources: {{num_workers: 1}}\n"

    async def story(desk: Desk) -> None:
        with pytest.raises(InvalidSpecError, match="has one error"):
            await desk.submissions.submit(desk.request(text, cwd=str(tmp_path)), ADA)

    on_a_desk(tmp_path, story)


@pytest.mark.parametrize("channel", ["tcp", "tunnel"])
def test_a_directory_of_another_machine_is_never_the_daemons_own(tmp_path: Path, channel: str) -> None:
    away = replace(ADA, channel=channel)
    (tmp_path / "pkg").mkdir()
    modules = YAML + "runtime_env: {py_modules: [pkg]}\n"

    async def story(desk: Desk) -> None:
        for ask in (desk.submissions.submit, desk.submissions.plan):
            with pytest.raises(WorkdirNeededError):
                await ask(desk.request(YAML.replace("working_dir: null", "working_dir: ."), cwd=str(tmp_path)), away)
            with pytest.raises(InvalidSpecError) as refused:
                await ask(desk.request(modules, cwd=str(tmp_path)), away)
            (problem,) = refused.value.problems
            assert problem.path == "runtime_env.py_modules[0]"
            assert problem.message == "pkg is on the submitter's machine, and no working_dir is uploaded"
        assert (await desk.submissions.plan(desk.request(modules, cwd=str(tmp_path)), ADA)).name == "tiny"

    on_a_desk(tmp_path, story)


def test_checkpoints_that_cannot_be_read_are_told_by_their_place(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.nodes.forget()
        job = await desk.rounds.accept(job_id="one-aaaaaa")
        place = desk.reader._paths.checkpoints(job.id)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(place.name)  # a loop
        for look in (desk.reader.checkpoints(job.id, verify=True), desk.reader.checkpoint_path(job.id, ADA)):
            with pytest.raises(RefusedError, match="the checkpoints of one-aaaaaa cannot be read") as refused:
                await look
            assert str(place) in refused.value.hint

    on_a_desk(tmp_path, story)


class Ranks:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def trace(self, _job: Job, rank: int, steps: int, seconds: float) -> bytes:
        if steps == 0:
            raise TraceRefusedError("it does not use the training system: see the docs")
        self.asked.append((rank, steps, seconds))
        return b"trace"

    async def look(self, _job: Job, *, stacks: bool, ranks: Any = None) -> dict[int, Any]:
        self.asked.append((stacks, ranks))
        return {}

    async def note(self, _job: Job, lines: Any) -> None:
        self.asked.append(lines)


def test_only_ranks_of_a_running_job_are_looked_at() -> None:
    async def story() -> None:
        ranks, jobs = Ranks(), {"running": running(), "waits": pending()}

        async def record(job_id: Any) -> Job:
            return jobs[job_id]

        inspection = RankInspection(record, ranks)
        assert await inspection.profile("running", ProfileRequest(steps=2, rank=1)) == b"trace"  # type: ignore[arg-type]
        assert [rank.rank for rank in (await inspection.stacks("running", None)).ranks] == [0, 1]  # type: ignore[arg-type]
        assert ranks.asked == [(1, 2, 60.0), (True, (0, 1)), {}]
        with pytest.raises(RefusedError) as refused:
            await inspection.profile("running", ProfileRequest(steps=0))  # type: ignore[arg-type]
        assert (refused.value.message, refused.value.hint) == ("it does not use the training system", "see the docs")
        with pytest.raises(BadRequestError):
            await inspection.stacks("running", 2)  # type: ignore[arg-type]
        with pytest.raises(RefusedError):
            await inspection.stacks("waits", None)  # type: ignore[arg-type]

    asyncio.run(story())


def test_pruning_removes_files_before_the_record(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.nodes.forget()
        job = await desk.rounds.accept()
        await desk.act(job.id, Verb.CANCEL)
        folder = desk.settings.paths.job(job.id)
        folder.mkdir()
        (folder / "log").write_text("line\n")
        pruning = Pruning(desk.rounds.store, desk.settings.paths, Pools().removals, set, desk.under_way)
        dry = await pruning.prune(older_than_seconds=-1e9, dry_run=True)
        assert (dry.removed, dry.freed_bytes, folder.exists()) == ((job.id,), 5, True)
        done = await pruning.prune(older_than_seconds=-1e9, dry_run=False)
        assert (done.removed, folder.exists()) == ((job.id,), False)
        assert await desk.reader.jobs(JobFilter()) == []

    on_a_desk(tmp_path, story)


def test_a_rerun_takes_changed_values(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        first = (await desk.submissions.submit(desk.request(), ADA)).job_id
        assert first is not None
        again = await desk.act(first, Verb.RERUN, overrides=("priority=60", "name=other"))
        made = await desk.rounds.store.job(again.job_id)
        assert (made.priority, made.name, made.submission.rerun_of) == (60, "other", first)
        with pytest.raises(InvalidSpecError):
            await desk.act(first, Verb.RERUN, overrides=("max_duration=2",))
        with pytest.raises(RefusedError, match="working_dir cannot change"):
            await desk.act(first, Verb.RERUN, overrides=("working_dir=/tmp",))
        with pytest.raises(RefusedError, match="TOKEN"):
            await desk.act(first, Verb.RERUN, overrides=("secrets=[TOKEN]",))
        specs = JobSpecs(desk.rounds.store, desk.settings.paths, Pools().files)
        changed = (await specs.diff(first, again.job_id)).values
        assert {value.key for value in changed} == {"name", "priority"}
        assert (await specs.spec(again.job_id)).rerun_of == first

    on_a_desk(tmp_path, story)


def test_a_job_of_a_queue_that_is_not_there_is_refused_and_a_plan_says_so(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.rounds.loop.shares = SharingState(Sharing(queues=parse_queues("research maximum=1")))
        lost = desk.request(f"{YAML}queue: gone\n")
        with pytest.raises(RefusedError, match="there is no queue 'gone'; the queues are default, research"):
            await desk.submissions.submit(lost, ADA)
        plan = await desk.submissions.plan(lost, ADA)
        assert plan.starts == "never"
        assert "there is no queue 'gone'" in plan.reason
        reply = await desk.submissions.submit(desk.request(f"{YAML}queue: research\n"), ADA)
        assert reply.created
        assert reply.job_id is not None
        with pytest.raises(RefusedError, match="there is no queue 'gone'"):
            await desk.act(reply.job_id, Verb.RERUN, overrides=("queue=gone",))

    on_a_desk(tmp_path, story)


def test_the_view_of_a_job_that_waits_is_made_again_only_when_it_looks_otherwise(tmp_path: Path) -> None:
    async def story() -> None:
        rounds = Rounds()  # its loop does not run: nothing changes but what this test changes
        reader = Desk(rounds, tmp_path / "home").reader
        job = await rounds.accept()
        first = await reader.job(job.id)
        assert await reader.job(job.id) is first
        rounds.loop.waiting[job.id] = PlacingGang()
        assert (await reader.job(job.id)).reason != first.reason
        rounds.loop.jobs[job.id] = replace(job, version=job.version + 1, priority=77)
        assert (await reader.job(job.id)).priority == 77

    asyncio.run(story())


GRACE = Caller(uid=1001, gid=1000, user="grace", is_owner=False)


HELD = YAML + "hold: true\n"


def test_each_user_may_have_so_many_jobs_that_have_not_ended(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        async def submit(key: str, caller: Caller = ADA, text: str = HELD) -> str:
            reply = await desk.submissions.submit(desk.request(text, idempotency_key=key), caller)
            assert reply.job_id is not None
            return reply.job_id

        first = await submit("0")
        answers = await asyncio.gather(*(submit(str(n)) for n in range(1, 8)), return_exceptions=True)
        refused = [one for one in answers if not isinstance(one, str)]
        assert len(answers) - len(refused) == 2, "those that arrive together count, too"
        assert {type(one) for one in refused} == {RefusedError}
        assert "may have 3 jobs that have not ended (ORCH_USER_MAX_QUEUED), and has" in str(refused[0])
        assert len(list(desk.settings.paths.jobs.iterdir())) == 3, "no files of refused submissions"
        await submit("theirs", GRACE)
        assert await submit("0") == first, "one that was accepted before is answered"
        with pytest.raises(RefusedError, match="ORCH_USER_MAX_QUEUED"):
            await desk.act(JobId(first), Verb.RERUN)
        with pytest.raises(RefusedError, match="ORCH_USER_MAX_QUEUED"):
            await submit(
                "matrix", GRACE, HELD + "matrix: {parameters: {lr: [1, 2, 3]}}\n" + "env: {LR: '${matrix.lr}'}\n"
            )
        await desk.act(JobId(first), Verb.CANCEL)
        await submit("8")

    on_a_desk(tmp_path, story, ORCH_USER_MAX_QUEUED="3")


LARGE = HELD + "env: {DATA: '%s'}\n"


def test_each_user_s_job_files_may_take_so_many_bytes(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        async def submit(key: str, size: int, caller: Caller = ADA) -> str:
            request = desk.request(LARGE % (key * size), idempotency_key=f"key-{key}")
            return (await desk.submissions.submit(request, caller)).job_id or ""

        first = await submit("a", 60_000)
        with pytest.raises(RefusedError, match=r"may take .* KiB \(ORCH_USER_MAX_QUEUED_BYTES\), and take .* KiB"):
            await submit("b", 60_000)
        await submit("c", 1_000)
        await submit("d", 60_000, GRACE)
        await desk.act(JobId(first), Verb.CANCEL)
        await submit("b", 60_000)

    on_a_desk(tmp_path, story, ORCH_USER_MAX_QUEUED_BYTES="100K")


def test_memory_of_large_job_files_is_given_back_when_the_jobs_end(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        specs = []
        for key in "abcd":
            request = desk.request(LARGE % (key * 100_000), idempotency_key=f"key-{key}")
            job = await desk.reader.record(JobId((await desk.submissions.submit(request, ADA)).job_id or ""))
            assert await desk.reader.job(job.id)
            specs.append(weakref.ref(job.spec))
            assert job_from_dict(job_to_dict(job)) == job_from_dict(job_to_dict(job)) == job
            metering = Metering(desk.settings, 0.0)
            await desk.act(job.id, Verb.CANCEL)
            ended = await desk.reader.record(job.id)
            metering.observe(ended, JobFinished(job_id=job.id, at=1.0, state=ended.state, reason=ended.reason))
            assert await desk.reader.job(job.id)
        await desk.rounds.store.prune(1e12, frozenset())
        del job, ended
        await asyncio.sleep(0)
        gc.collect()
        assert [spec() for spec in specs if spec() is not None] == []

    on_a_desk(tmp_path, story)


def test_only_the_owner_gives_a_priority_above_the_limit(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        def request(priority: int, key: str) -> SubmitRequest:
            return desk.request(YAML + f"priority: {priority}\n", idempotency_key=key)

        with pytest.raises(NotPermittedError, match=r"at most priority 50 \(ORCH_USER_MAX_PRIORITY\), not 51"):
            await desk.submissions.submit(request(51, "a"), GRACE)
        mine = JobId((await desk.submissions.submit(request(50, "a"), GRACE)).job_id or "")
        await desk.submissions.submit(request(100, "a"), ADA)
        for verb, fields in ((Verb.UPDATE, {"priority": 80}), (Verb.RERUN, {"overrides": ("priority=80",)})):
            with pytest.raises(NotPermittedError, match="ORCH_USER_MAX_PRIORITY"):
                await desk.actions.act(mine, ActionRequest(verb=verb, **fields), GRACE)
            await desk.actions.act(mine, ActionRequest(verb=verb, **fields), ADA)
        await desk.actions.act(mine, ActionRequest(verb=Verb.UPDATE, priority=20), GRACE)
        assert (await desk.reader.record(mine)).priority == 20

    on_a_desk(tmp_path, story)
