"""A matrix from its submission to its end, on a production loop and a store in memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.api.errors import DiskFullError, InvalidSpecError, RefusedError
from orchestrator.api.protocol import Verb
from orchestrator.api.requests import ActionRequest
from orchestrator.api.service import Caller
from orchestrator.core import events as ev
from orchestrator.core.facts.faults import MaxDuration
from orchestrator.core.ids import JobId
from orchestrator.core.states import JobState
from orchestrator.daemon.requests.matrices import BestValues, Matrices
from orchestrator.daemon.searches import Searches
from orchestrator.daemon.submitting import submission
from orchestrator.runtime.pools import Pools
from orchestrator.store.errors import DiskFullError as StoreFullError
from tests.support.records import replace
from tests.unit.daemon.parts import LOG
from tests.unit.daemon.requests.test_dependencies import until
from tests.unit.daemon.requests.test_requests import ADA, YAML, Desk, on_a_desk

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.api import views as v

GRID = (
    YAML.replace("tiny", "tiny-${matrix.lr}").replace('"pass"', '"pass" ${matrix.lr} ${matrix.seed}')
    + "checkpoint: {score_attribute: loss, score_order: min}\n"
    + "matrix: {parameters: {lr: [0.1, 0.01], seed: [1, 2]}}\n"
)


class GridDesk:
    """A desk of matrices beside the other desks."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        best = BestValues(desk.settings.paths.metrics)
        loop, store = desk.rounds.loop, desk.rounds.store
        self.searches = Searches(loop, store, desk.settings, Pools().submissions, desk.under_way, LOG)
        self.matrices = Matrices(loop, store, desk.reader, desk.actions, best, self.searches, Pools().files)

    async def submit(self, text: str = GRID, *, key: str = "key-grid", **fields: Any) -> v.SubmitReply:
        return await self.desk.submissions.submit(self.desk.request(text, idempotency_key=key, **fields), ADA)

    async def act(self, matrix_id: str | None, verb: Verb, **fields: Any) -> v.ActionReply:
        assert matrix_id is not None
        return await self.matrices.act(matrix_id, ActionRequest(verb=verb, **fields), ADA)

    async def end(self, job_id: str, state: JobState) -> None:
        event = ev.JobFinished(
            job_id=JobId(job_id), at=self.desk.rounds.loop.now(), state=state, reason=MaxDuration(limit_seconds=1.0)
        )
        await self.desk.rounds.loop.command(lambda: [event])


def held(text: str = GRID) -> str:
    """Return the text of a matrix on hold: without a runtime, a started job would never end."""
    return text + "hold: true\n"


def test_a_matrix_is_accepted_as_one_and_known_again_by_its_key(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        grid = GridDesk(desk)
        reply = await grid.submit()
        assert reply.created
        assert len(reply.job_ids) == 4
        assert reply.job_id == reply.job_ids[0]
        again = await grid.submit()
        assert (again.created, again.matrix_id, again.job_ids) == (False, reply.matrix_id, reply.job_ids)
        assert sorted(p.name for p in desk.settings.paths.jobs.iterdir()) == sorted(reply.job_ids)
        with pytest.raises(RefusedError):
            await grid.submit(GRID.replace("0.01", "0.001"))
        assert len(list(desk.settings.paths.jobs.iterdir())) == 4
        views = [await desk.reader.job(JobId(job_id)) for job_id in reply.job_ids]
        assert [view.name for view in views] == ["tiny-0-1", "tiny-0-1", "tiny-0-01", "tiny-0-01"]
        assert [view.matrix.values for view in views if view.matrix] == [
            {"lr": 0.1, "seed": 1}, {"lr": 0.1, "seed": 2}, {"lr": 0.01, "seed": 1}, {"lr": 0.01, "seed": 2},
        ]  # fmt: skip

    on_a_desk(tmp_path, story)


def test_of_a_matrix_that_cannot_be_stored_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(desk: Desk) -> None:
        async def full(_: Any) -> Any:
            raise StoreFullError(tmp_path, "full")

        monkeypatch.setattr(desk.rounds.store, "submit_all", full)
        with pytest.raises(DiskFullError):
            await GridDesk(desk).submit()
        assert list(desk.settings.paths.jobs.iterdir()) == []
        assert desk.rounds.loop.jobs == {}

    on_a_desk(tmp_path, story)


def test_when_one_job_cannot_be_laid_out_none_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(desk: Desk) -> None:
        whole, made = submission.prepare, 0

        async def prepare(*arguments: Any, **fields: Any) -> Any:
            nonlocal made
            made += 1
            if made == 3:
                raise OSError(28, "No space left on device")
            return await whole(*arguments, **fields)

        monkeypatch.setattr(submission, "prepare", prepare)
        with pytest.raises(DiskFullError, match="is full, so no new job is accepted"):
            await GridDesk(desk).submit()
        assert list(desk.settings.paths.jobs.iterdir()) == []

    on_a_desk(tmp_path, story)


def test_copies_that_do_not_fit_on_the_disk_are_refused() -> None:
    taken = submission.archives.Snapshot(digest="d", size_bytes=10**9)
    submission.check_room(taken, 1, 10**6)
    submission.check_room(taken, 3, 4 * 10**9)
    with pytest.raises(RefusedError, match=r"5 copies of working_dir need 4\.7 GiB, and 3\.7 GiB are free"):
        submission.check_room(taken, 5, 4 * 10**9)


def test_a_job_that_can_never_fit_refuses_the_whole(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        text = GRID.replace("num_workers: 2", 'num_workers: "${matrix.seed}"').replace("seed: [1, 2]", "seed: [1, 400]")
        with pytest.raises(RefusedError, match="no node can fit 400 ranks"):
            await GridDesk(desk).submit(text)
        with pytest.raises(InvalidSpecError, match="2 errors"):
            await GridDesk(desk).submit(GRID.replace("${matrix.lr}", "${matrix.rl}", 1).replace("${matrix.lr}", "1"))
        assert list(desk.settings.paths.jobs.iterdir()) == []

    on_a_desk(tmp_path, story)


def test_a_plan_lists_the_combinations_and_stores_nothing(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        plan = await desk.submissions.plan(desk.request(GRID), ADA)
        assert [one.values for one in plan.combinations][:2] == [{"lr": 0.1, "seed": 1}, {"lr": 0.1, "seed": 2}]
        assert (plan.starts, plan.name) == ("now", "tiny-0-1")
        late = await desk.submissions.plan(desk.request(YAML, overrides=("start_at=2990-01-01T00:00",)), ADA)
        assert (late.starts, late.reason[:12]) == ("later", "starts at 29")
        kept = await desk.submissions.plan(desk.request(YAML, overrides=("hold=true",)), ADA)
        assert (kept.starts, kept.reason) == ("later", "held until `orch release`")
        assert list(desk.settings.paths.jobs.iterdir()) == []

    on_a_desk(tmp_path, story)


def test_the_whole_is_released_held_paused_changed_and_cancelled(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        grid = GridDesk(desk)
        desk.nodes.set({})  # nothing starts
        reply = await grid.submit(held(), key="key-held")
        assert (await grid.matrices.matrix(str(reply.matrix_id))).state == "SUSPENDED"
        assert (await grid.act(reply.matrix_id, Verb.UPDATE, priority=80)).message == "4 of 4 jobs changed"
        done = await grid.act(reply.matrix_id, Verb.RELEASE)
        assert (done.message, done.state, done.job_ids) == ("4 of 4 jobs put into the queue", "PENDING", reply.job_ids)
        assert {job.priority for job in desk.rounds.loop.jobs.values()} == {80}
        assert (await grid.act(reply.matrix_id, Verb.HOLD)).message == "4 of 4 jobs held"
        with pytest.raises(RefusedError, match=r"no job of .* waits in the queue"):
            await grid.act(reply.matrix_id, Verb.HOLD)
        assert (await grid.act(reply.matrix_id, Verb.RESUME)).message == "4 of 4 jobs put back into the queue"
        assert (await grid.act(reply.matrix_id, Verb.PAUSE)).message == "4 of 4 jobs paused"
        done = await grid.act(reply.matrix_id, Verb.CANCEL)
        assert (done.message, done.state) == ("4 of 4 jobs cancelled", "CANCELLED")
        assert (await grid.act(reply.matrix_id, Verb.CANCEL)).message == "0 of 4 jobs cancelled"
        with pytest.raises(RefusedError, match=r"every job of .* has ended"):
            await grid.act(reply.matrix_id, Verb.PAUSE)

    on_a_desk(tmp_path, story)


def test_failures_are_run_again_in_their_places_and_best_values_are_over_all_runs(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        grid = GridDesk(desk)
        desk.nodes.set({})
        reply = await grid.submit(key="key-again")
        first, second, *_ = reply.job_ids
        with pytest.raises(RefusedError, match=r"no job of .* has ended"):
            await grid.act(reply.matrix_id, Verb.RERUN)
        await grid.end(first, JobState.FAILED)
        await grid.end(second, JobState.CANCELLED)
        line = '{"at": 1.0, "attempt": 1, "step": 1, "total_steps": 2, "epoch": null, "phase": "", "samples": null,'
        line += ' "tokens": null, "step_seconds": 0.1, "metrics": {"loss": %s}}\n'
        desk.settings.paths.metrics(first).write_text(line % 0.5 + line % 0.25 + line % "null" + line % 0.75)
        again = await grid.act(reply.matrix_id, Verb.RERUN, failed=True, overrides=("env.A=1",))
        assert (again.message, len(again.job_ids)) == ("runs 1 combination again with env.A=1", 1)
        view = await grid.matrices.matrix(str(reply.matrix_id))
        assert (view.jobs[0].job_id, view.jobs[0].runs, view.jobs[0].best) == (again.job_ids[0], 2, 0.25)
        assert view.counts == {"PENDING": 3, "CANCELLED": 1}
        with pytest.raises(RefusedError, match=r"no job of .* failed"):
            await grid.act(reply.matrix_id, Verb.RERUN, failed=True)
        rest = await grid.act(reply.matrix_id, Verb.RERUN)
        assert rest.message == "runs 1 combination again"
        single = await desk.act(JobId(second), Verb.RERUN)  # a job by itself is no part of the matrix
        assert (await desk.reader.job(JobId(single.job_id))).matrix is None
        with pytest.raises(RefusedError, match="has not failed"):
            await desk.act(JobId(second), Verb.RERUN, failed=True)

    on_a_desk(tmp_path, story)


def test_a_failure_cancels_the_others_and_a_rerun_of_failures_brings_them_back(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        grid = GridDesk(desk)
        desk.nodes.set({})
        text = GRID.replace("matrix: {", "matrix: {fail_fast: true, ")
        reply = await grid.submit(text, key="key-fast")
        await grid.end(reply.job_ids[2], JobState.FAILED)
        view = await grid.matrices.matrix(str(reply.matrix_id))
        assert (view.state, view.counts) == ("FAILED", {"CANCELLED": 3, "FAILED": 1})
        assert view.jobs[0].reason == f"cancelled by fail_fast of {reply.matrix_id}: {reply.job_ids[2]} failed"
        again = await grid.act(reply.matrix_id, Verb.RERUN, failed=True)
        await asyncio.sleep(0)
        assert len(again.job_ids) == 4
        assert {desk.rounds.loop.jobs[JobId(i)].state for i in again.job_ids} == {JobState.PENDING}

    on_a_desk(tmp_path, story)


def test_a_held_job_is_released_and_one_that_runs_is_not_held(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        reply = await desk.submissions.submit(desk.request(YAML + "hold: true\n", idempotency_key="key-h"), ADA)
        job_id = JobId(str(reply.job_id))
        assert reply.state == "SUSPENDED"
        assert (await desk.act(job_id, Verb.HOLD)).state == "SUSPENDED"
        await desk.act(job_id, Verb.RELEASE)
        await until(desk, job_id, lambda job: job.state is not JobState.PENDING)
        with pytest.raises(RefusedError, match="only a job in the queue can be held"):
            await desk.act(job_id, Verb.HOLD)
        again = await desk.act(job_id, Verb.RERUN)
        assert again.state == "PENDING"  # the hold applied to the first job only

    on_a_desk(tmp_path, story)


def test_another_users_key_is_another_matrix(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        mine = await GridDesk(desk).submit()
        bob = replace(ADA, uid=1001, user="bob") if isinstance(ADA, Caller) else ADA
        other = await desk.submissions.submit(desk.request(GRID, idempotency_key="key-grid"), bob)
        assert other.created
        assert not set(other.job_ids) & set(mine.job_ids)

    on_a_desk(tmp_path, story)
