"""A search from its submission to its end: an advisor with given answers, a production loop, a store in memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.api.errors import InvalidSpecError
from orchestrator.api.protocol import Verb
from orchestrator.api.requests import ActionRequest
from orchestrator.core import events as ev
from orchestrator.core.facts.faults import MaxDuration
from orchestrator.core.facts.reasons import ByPruner, Cancelled
from orchestrator.core.states import JobState
from orchestrator.daemon.requests.matrices import BestValues, Matrices
from orchestrator.daemon.searches import AdvisorError, Searches
from orchestrator.daemon.submitting import submission
from orchestrator.parts import install_line
from orchestrator.runtime.pools import Pools
from tests.unit.core.builders import node
from tests.unit.daemon.parts import LOG
from tests.unit.daemon.requests.test_requests import ADA, YAML, Desk, on_a_desk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from pathlib import Path

    from orchestrator.api.matrix_views import MatrixView
    from orchestrator.core.job.record import Job

SEARCH = (
    YAML.replace("tiny", "net-${matrix.lr}").replace('"pass"', '"pass" ${matrix.lr}')
    + "matrix: {strategy: optuna, ranges: {lr: {low: 0.1, high: 0.9}}, trials: 3, objectives: {loss: min}}\n"
)


PRUNER = ByPruner(matrix="net-abc234", metric="loss", step=7, value=2.5)


class Oracle:
    """Advisor that suggests 0.2, 0.3, ... and answers ``prune`` and ``given``; its first ``fails`` calls fail."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], int]] = []
        self.prune: list[dict[str, Any]] = []
        self.given: dict[str, list[float]] = {}
        self.fails = 0
        self.thinks = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    @contextlib.asynccontextmanager
    async def __call__(self, _: Mapping[str, Any]) -> AsyncIterator[Oracle]:
        yield self

    async def ask(self, trials: Sequence[Mapping[str, Any]], want: int) -> Mapping[str, Any]:
        if self.fails:
            self.fails -= 1
            raise AdvisorError("no module named optuna")
        self.asked.append(([trial["state"] for trial in trials], want))
        if want:  # else it is only told of what has been reported, at any time
            self.thinks.set()
            await self.may_answer.wait()
        suggested = [{"lr": round(0.1 * (len(trials) + n + 1), 3)} for n in range(want)]
        return {"suggested": suggested, "pruned": self.prune, "given": self.given, "missing": {}}


class Searching:
    """The desks of a daemon with a search; ``restart`` starts another daemon on the same store and files."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.oracle = Oracle()
        self._start()

    def _start(self) -> None:
        rounds = self.desk.rounds
        self.searches = Searches(
            rounds.loop,
            rounds.store,
            self.desk.settings,
            Pools().submissions,
            self.desk.under_way,
            LOG,
            advisor=self.oracle,
            look_seconds=0.01,
            first_delay=0.01,
        )
        rounds.watchers = [self.searches.changed]
        best = BestValues(self.desk.settings.paths.metrics)
        pool = Pools().files
        self.matrices = Matrices(
            rounds.loop, rounds.store, self.desk.reader, self.desk.actions, best, self.searches, pool
        )
        self._task = asyncio.create_task(self.searches.run())

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def restart(self) -> None:
        await self.stop()
        self._start()

    async def submit(self, text: str = SEARCH, **fields: Any) -> str:
        reply = await self.desk.submissions.submit(self.desk.request(text, idempotency_key="key-s", **fields), ADA)
        assert reply.matrix_id is not None
        return reply.matrix_id

    async def act(self, matrix_id: str, verb: Verb) -> str:
        """Run a command on the matrix; return the message of the reply."""
        return (await self.matrices.act(matrix_id, ActionRequest(verb=verb), ADA)).message

    async def trials(self, matrix_id: str, count: int) -> list[Job]:
        """Return the jobs, once there are ``count`` of them."""
        return await self.until(matrix_id, lambda jobs: len(jobs) == count)

    async def until(self, matrix_id: str, holds: Callable[[list[Job]], bool]) -> list[Job]:
        while True:
            jobs = list(await self.desk.rounds.store.matrix_jobs(matrix_id))
            if holds(jobs):
                return jobs
            await asyncio.sleep(0.001)

    async def end(self, job: Job, *, failed: bool = False) -> None:
        """End a job that has not started, long enough ago for its records to be complete, as failed or as pruned."""
        state = JobState.FAILED if failed else JobState.CANCELLED
        reason = MaxDuration(limit_seconds=1.0) if failed else Cancelled(by=PRUNER)
        event = ev.JobFinished(job_id=job.id, at=self.desk.rounds.loop.now() - 60, state=state, reason=reason)
        await self.desk.rounds.loop.command(lambda: [event])

    async def view(self, matrix_id: str, holds: Callable[[MatrixView], bool]) -> MatrixView:
        while True:
            view = await self.matrices.matrix(matrix_id)
            if holds(view):
                return view
            await asyncio.sleep(0.001)


def on_a_search(tmp_path: Path, story: Callable[[Searching], Any]) -> None:
    async def run(desk: Desk) -> None:
        desk.nodes.set({})  # nothing starts: the test ends the trials
        searching = Searching(desk)
        try:
            await story(searching)
        finally:
            await searching.stop()

    on_a_desk(tmp_path, run)


def test_a_trial_follows_a_trial_until_all_have_ended_also_after_a_kill(tmp_path: Path) -> None:
    async def story(at: Searching) -> None:
        at.desk.settings.paths.jobs.parent.joinpath("searches", "gone-abc234").mkdir(parents=True)
        matrix_id = await at.submit()
        (first,) = await at.trials(matrix_id, 1)
        cell = first.submission.matrix
        assert cell is not None
        assert (cell.values, cell.index, cell.count, cell.max_concurrent, cell.search) == ({"lr": 0.5}, 0, 3, 1, True)
        await at.end(first)
        _, second = await at.trials(matrix_id, 2)
        assert second.submission.matrix is not None
        assert second.submission.matrix.values == {"lr": 0.2}
        assert (second.name, second.submission.user) == ("net-0-2", "ada")
        await at.restart()
        at.oracle.given = {"0": [0.75], "1": [0.5], "2": [0.25]}
        await at.end(second)
        *_, third = await at.trials(matrix_id, 3)
        assert (await at.view(matrix_id, lambda v: v.jobs[0].given == {"loss": 0.75})).searching
        await at.end(third)
        view = await at.view(matrix_id, lambda view: not view.searching)
        assert (view.state, view.count, view.objectives) == ("SUCCEEDED", 3, {"loss": "min"})
        assert [(job.given["loss"], job.is_best) for job in view.jobs] == [(0.75, False), (0.5, False), (0.25, True)]
        assert [want for _, want in at.oracle.asked if want] == [1, 1]

    on_a_search(tmp_path, story)


def test_a_trial_that_the_advisor_prunes_is_stopped(tmp_path: Path) -> None:
    async def story(at: Searching) -> None:
        at.desk.nodes.set({"a": node("a", cpus=4)})
        matrix_id = await at.submit()
        (first,) = await at.until(matrix_id, lambda jobs: bool(jobs and jobs[0].attempts))
        at.oracle.prune = [{"number": 0, "step": 7, "value": 2.5}]
        (first,) = await at.until(matrix_id, lambda jobs: jobs[0].stop is not None)
        assert first.stop is not None
        assert first.stop.by == ByPruner(matrix=matrix_id, metric="loss", step=7, value=2.5)

    on_a_search(tmp_path, story)


def test_a_pruned_trial_ends_well_and_says_so(tmp_path: Path) -> None:
    async def story(at: Searching) -> None:
        matrix_id = await at.submit()
        (first,) = await at.trials(matrix_id, 1)
        await at.end(first)
        await at.trials(matrix_id, 2)
        view = await at.matrices.matrix(matrix_id)
        assert (view.jobs[0].state, view.jobs[0].pruned, view.state) == ("CANCELLED", True, "RUNNING")
        assert view.jobs[0].reason == "pruned at step 7: loss was 2.5, worse than the median of the trials"
        assert (await at.desk.reader.job(first.id)).matrix.pruned  # type: ignore[union-attr]  # it is of a matrix
        assert at.oracle.asked[-1][0][0] == "pruned"

    on_a_search(tmp_path, story)


def test_a_cancelled_search_submits_no_more_and_stays_so(tmp_path: Path) -> None:
    async def story(at: Searching) -> None:
        matrix_id = await at.submit(SEARCH + "secrets: [TOKEN]\n", secrets={"TOKEN": "s3"})
        await at.trials(matrix_id, 1)
        secret = at.desk.settings.home / "searches" / matrix_id / "secrets"
        assert json.loads(secret.read_text()) == {"TOKEN": "s3"}
        assert secret.stat().st_mode & 0o777 == 0o600
        await at.matrices.act(matrix_id, ActionRequest(verb=Verb.CANCEL), ADA)
        view = await at.view(matrix_id, lambda view: view.state == "CANCELLED")
        assert (len(view.jobs), view.searching) == (1, False)
        assert not secret.exists()
        await at.restart()
        await at.searches.stop(matrix_id)
        assert len(await at.trials(matrix_id, 1)) == 1

    on_a_search(tmp_path, story)


@pytest.mark.parametrize(("verb", "back"), [(Verb.PAUSE, Verb.RESUME), (Verb.HOLD, Verb.RELEASE)])
def test_a_paused_search_submits_nothing_until_it_is_resumed_also_after_a_kill(
    tmp_path: Path, verb: Verb, back: Verb
) -> None:
    async def story(at: Searching) -> None:
        matrix_id = await at.submit()
        (first,) = await at.trials(matrix_id, 1)
        said = await at.act(matrix_id, verb)
        assert said.endswith(f"; no further trial is submitted until `orch {back} {matrix_id}`")
        assert (await at.matrices.matrix(matrix_id)).state == "SUSPENDED"
        await at.restart()
        at.oracle.given = {"0": [0.75]}
        await at.end(first)
        view = await at.view(matrix_id, lambda view: view.jobs[0].given == {"loss": 0.75})
        assert (view.state, view.searching, view.paused, len(view.jobs)) == ("SUSPENDED", True, True, 1)
        assert at.oracle.asked[-1] == (["pruned"], 0)
        assert await at.act(matrix_id, verb), "a search between two trials can be paused again"
        assert await at.act(matrix_id, back) == "0 of 1 job put into the queue; the search goes on".replace(
            "put into", "put back into" if back is Verb.RESUME else "put into"
        )
        await at.trials(matrix_id, 2)
        assert not (await at.matrices.matrix(matrix_id)).paused

    on_a_search(tmp_path, story)


def test_a_search_that_is_paused_while_its_advisor_thinks_submits_nothing(tmp_path: Path) -> None:
    async def story(at: Searching) -> None:
        matrix_id = await at.submit()
        (first,) = await at.trials(matrix_id, 1)
        await at.until(matrix_id, lambda _: bool(at.oracle.asked))
        at.oracle.thinks.clear()
        at.oracle.may_answer.clear()
        await at.end(first)
        await at.oracle.thinks.wait()
        assert at.oracle.asked[-1][1] == 1, "a trial is asked for"
        await at.act(matrix_id, Verb.PAUSE)
        at.oracle.given = {"0": [0.5]}
        at.oracle.may_answer.set()
        view = await at.view(matrix_id, lambda view: view.jobs[0].given == {"loss": 0.5})
        assert (len(view.jobs), view.paused) == (1, True)
        await at.act(matrix_id, Verb.RESUME)
        await at.trials(matrix_id, 2)

    on_a_search(tmp_path, story)


def test_fail_fast_ends_a_search_and_without_it_a_failure_is_a_trial(tmp_path: Path) -> None:
    async def story(at: Searching) -> None:
        matrix_id = await at.submit()
        (first,) = await at.trials(matrix_id, 1)
        await at.end(first, failed=True)
        await at.trials(matrix_id, 2)
        assert at.oracle.asked[-1][0][0] == "failed"

    on_a_search(tmp_path, story)

    async def broken(at: Searching) -> None:
        matrix_id = await at.submit(SEARCH.replace("trials: 3", "trials: 9"))
        for count in (1, 2, 3):
            await at.end((await at.trials(matrix_id, count))[-1], failed=True)
        view = await at.view(matrix_id, lambda view: not view.searching)
        assert view.problem == "3 trials failed and none ended well; fix the script and submit it again"
        assert len(view.jobs) == 3

    on_a_search(tmp_path / "broken", broken)

    async def fast(at: Searching) -> None:
        matrix_id = await at.submit(SEARCH.replace("trials: 3", "trials: 3, fail_fast: true"))
        (first,) = await at.trials(matrix_id, 1)
        await at.end(first, failed=True)
        view = await at.view(matrix_id, lambda view: not view.searching)
        assert (view.state, len(view.jobs)) == ("FAILED", 1)

    on_a_search(tmp_path / "fast", fast)


def test_an_advisor_that_fails_is_told_and_asked_again(tmp_path: Path) -> None:
    async def story(at: Searching) -> None:
        at.oracle.fails = 2
        matrix_id = await at.submit()
        await at.view(matrix_id, lambda view: view.problem == "no module named optuna")
        (first,) = await at.trials(matrix_id, 1)
        await at.end(first)
        await at.trials(matrix_id, 2)
        await at.view(matrix_id, lambda view: not view.problem)

    on_a_search(tmp_path, story)


def test_a_search_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(at: Searching) -> None:
        monkeypatch.setattr(submission, "missing_modules", lambda _: ("optuna",))
        with pytest.raises(InvalidSpecError) as caught:
            await at.submit()
        (problem,) = caught.value.problems
        assert problem.message.startswith("optuna cannot be imported by the daemon's ")
        assert problem.hint.startswith(install_line("search"))
        assert list(at.desk.settings.paths.jobs.iterdir()) == []

    on_a_search(tmp_path, story)


def test_the_same_submission_again_is_the_same_search(tmp_path: Path) -> None:
    async def story(at: Searching) -> None:
        matrix_id = await at.submit()
        assert await at.submit() == matrix_id
        assert at.searches.book.ids() == [matrix_id]

    on_a_search(tmp_path, story)
