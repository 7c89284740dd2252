"""Jobs that depend on others, from the submission to the end, on a production loop and a store in memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.errors import InvalidSpecError
from orchestrator.api.protocol import Verb
from orchestrator.core.events import JobResumed, Prerequisite
from orchestrator.core.ids import JobId
from orchestrator.core.states import EndCondition
from orchestrator.daemon.jobs.prerequisites import prerequisite_states, still_needed
from orchestrator.daemon.requests.pruning import Pruning
from orchestrator.runtime.pools import Pools
from tests.unit.core.builders import make_spec, submission
from tests.unit.daemon.parts import Rounds
from tests.unit.daemon.requests.test_requests import ADA, YAML, Desk, on_a_desk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orchestrator.core.job.record import Job

SECOND = YAML.replace("tiny", "second")


async def submitted(desk: Desk, text: str = YAML, *, key: str, **fields: object) -> JobId:
    reply = await desk.submissions.submit(desk.request(text, idempotency_key=key, **fields), ADA)
    assert reply.job_id is not None
    return JobId(reply.job_id)


async def until(desk: Desk, job_id: JobId, holds: Callable[[Job], bool]) -> Job:
    while not holds(job := await desk.reader.record(job_id)):
        desk.rounds.loop.wake()
        await asyncio.sleep(0)
    return job


def test_a_name_is_resolved_when_the_job_is_accepted(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        old = await submitted(desk, key="key-old")
        newest = await submitted(desk, key="key-new")
        by_name = await submitted(desk, SECOND + "depends_on: [{job: tiny, on: any}]\n", key="key-name")
        by_id = await submitted(desk, SECOND, key="key-id", after=(f"{old}:failure", "tiny"))
        views = {job_id: await desk.reader.job(job_id) for job_id in (by_name, by_id)}
        assert views[by_name].depends_on == {newest: "any"}
        assert views[by_id].depends_on == {old: "failure", newest: "success"}

    on_a_desk(tmp_path, story)


def test_everything_wrong_with_dependencies_is_said_at_once_and_nothing_is_stored(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await submitted(desk, key="key-one")
        await submitted(desk, key="key-two")
        gone = await submitted(desk, YAML.replace("tiny", "gone"), key="key-gone")
        await desk.act(gone, Verb.CANCEL)
        text = SECOND + "depends_on: [{job: nowhere}, {job: tin}, {job: gone}, {job: tiny}]\n"
        with pytest.raises(InvalidSpecError) as caught:
            await submitted(desk, text, key="key-bad", after=("tiny:any",))
        assert [(p.path, p.message) for p in caught.value.problems] == [
            ("depends_on[0].job", "there is no job 'nowhere'"),
            ("depends_on[1].job", "'tin' fits several jobs"),
            ("depends_on[2].job", f"{gone} was required to succeed, and has ended CANCELLED"),
            ("depends_on[4].job", f"{(await desk.reader.resolve('tiny', ADA))} is to succeed and to end"),
        ]
        assert all(problem.hint for problem in caught.value.problems)
        with pytest.raises(InvalidSpecError, match="2 errors"):
            await submitted(desk, SECOND, key="key-worse", after=("tiny:sometimes", ":any", "tiny"))
        assert len(list(desk.settings.paths.jobs.iterdir())) == 3

    on_a_desk(tmp_path, story)


def test_a_dependents_end_follows_from_the_others_also_down_a_chain(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.nodes.forget()  # nothing is placed, so that the first one waits
        first = await desk.rounds.accept(job_id="first-aaaaaa")
        second = await submitted_after(desk, "first-aaaaaa", "second")
        third = await submitted_after(desk, second, "third")
        waiting = await until(desk, third, lambda _: third in desk.rounds.loop.waiting)
        assert waiting.attempts == ()
        assert (await desk.reader.job(third)).reason == f"waiting for {second} (PENDING) to succeed"
        await desk.act(first.id, Verb.CANCEL)
        ended = await until(desk, third, lambda job: job.state.is_terminal)
        assert (await desk.reader.job(second)).reason == "depends on first-aaaaaa to succeed, which ended CANCELLED"
        view = await desk.reader.job(third)
        assert (ended.state, view.reason) == ("FAILED", f"depends on {second} to succeed, which ended FAILED")
        assert view.fact is not None
        assert view.fact["kind"] == "prerequisite_unmet"

    on_a_desk(tmp_path, story)


async def submitted_after(desk: Desk, other: str, name: str) -> JobId:
    """Submit a job that depends on ``other`` as ``submit`` does, without waiting for nodes."""
    needed = (Prerequisite(job_id=JobId(other), on=EndCondition.SUCCESS),)
    event = submission(make_spec(name=name), job_id=f"{name}-bbbbbb", prerequisites=needed)
    job, _ = await desk.rounds.store.submit(event)
    desk.rounds.loop.add(job, await prerequisite_states(job, desk.rounds.loop.decided, desk.rounds.store))
    return job.id


def test_a_restarted_daemon_knows_how_the_others_ended(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.nodes.forget()
        await desk.rounds.accept(job_id="first-aaaaaa")
        second = await submitted_after(desk, "first-aaaaaa", "second")
        await desk.act(second, Verb.PAUSE)
        await desk.act(JobId("first-aaaaaa"), Verb.CANCEL)
        async with Rounds(desk.rounds.store) as again:
            await again.loop.load()
            assert list(again.loop.jobs) == [second]
            await again.loop.command(lambda: [JobResumed(job_id=second, at=again.loop.now(), by="ada")])
            assert (await desk.rounds.store.job(second)).state == "FAILED"

    on_a_desk(tmp_path, story)


def test_pruning_keeps_what_waiting_jobs_depend_on(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.nodes.forget()
        loop = desk.rounds.loop
        first, other = await desk.rounds.accept(job_id="first-aaaaaa"), await desk.rounds.accept(job_id="other-aaaaaa")
        second = await submitted_after(desk, first.id, "second")
        await desk.act(second, Verb.PAUSE)  # it still depends on the first, and does not fail while it is paused
        for job in (first, other):
            await desk.act(job.id, Verb.CANCEL)
        pruning = Pruning(
            desk.rounds.store,
            desk.settings.paths,
            Pools().removals,
            lambda: still_needed(loop.jobs.values()),
            desk.under_way,
        )
        assert (await pruning.prune(older_than_seconds=-1e9, dry_run=True)).removed == (other.id,)
        assert (await pruning.prune(older_than_seconds=-1e9, dry_run=False)).removed == (other.id,)
        await desk.act(second, Verb.CANCEL)
        assert set((await pruning.prune(older_than_seconds=-1e9, dry_run=False)).removed) == {first.id, second}

    on_a_desk(tmp_path, story)


def test_a_plan_says_what_the_job_would_wait_for(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        first = await submitted(desk, YAML.replace("num_workers: 2", "num_workers: 4"), key="key-first")
        plan = await desk.submissions.plan(desk.request(SECOND, after=("tiny:any",)), ADA)
        state = (await desk.reader.record(first)).state
        assert (plan.starts, plan.reason) == ("later", f"waiting for {first} ({state}) to end")
        with pytest.raises(InvalidSpecError, match="one error"):
            await desk.submissions.plan(desk.request(SECOND, after=("nowhere",)), ADA)

    on_a_desk(tmp_path, story)


def test_a_rerun_waits_again_only_where_the_job_had_not_started(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        first = await submitted(desk, key="key-first")
        second = await submitted(desk, SECOND, key="key-second", after=("tiny:any",))
        await desk.act(second, Verb.CANCEL)
        rerun = await desk.act(second, Verb.RERUN)
        assert (await desk.reader.job(rerun.job_id)).depends_on == {first: "any"}
        await until(desk, first, lambda job: bool(job.attempts))
        again = await desk.act(first, Verb.RERUN)
        assert (await desk.reader.job(again.job_id)).depends_on == {}

    on_a_desk(tmp_path, story)


def test_a_rerun_with_changes_waits_for_the_earlier_job_of_its_own_name(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        first = await submitted(desk, key="key-first")
        second = await submitted(desk, key="key-second", after=("tiny:any",))
        assert (await desk.reader.job(second)).depends_on == {first: "any"}
        await desk.act(second, Verb.CANCEL)
        rerun = await desk.act(second, Verb.RERUN, overrides=("priority=60",))
        assert (await desk.reader.job(rerun.job_id)).depends_on == {first: "any"}

    on_a_desk(tmp_path, story)
