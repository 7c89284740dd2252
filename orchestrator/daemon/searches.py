"""Conducts the searches: gets values from the advisor when a trial has ended, submits them, and ends bad trials.

A trial is a job like any other, submitted by the daemon from the archive of the first one. A daemon that starts again finds the trials
in the store and the rest in the files, so a search continues where it was, and no trial is submitted twice.

The files of searches, below ``searches`` in the home: their plans, and the results of their trials.

    searches/ID/plan.json    the plan of further trials, written before the first trial is accepted
    searches/ID/secrets      values of the jobs' secrets, mode 0600, removed when the search is over
    searches/ID/study.json   the results of the trials, whether the search is over or paused, and what is wrong

The trials themselves are jobs in the store. ``study.json`` can be remade from them, but not ``paused``, nor ``over`` after a cancel.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from orchestrator import trees
from orchestrator.api.errors import OrchError
from orchestrator.api.service import Caller
from orchestrator.core.events import MatrixCell
from orchestrator.core.facts.reasons import ByPruner, is_pruned
from orchestrator.core.lifecycle.advance import request_stop
from orchestrator.core.states import JobState, StopPurpose
from orchestrator.daemon.sharing import check_queue
from orchestrator.daemon.submitting.submission import Checked, check_fits, prepare_rerun
from orchestrator.daemon.submitting.under_way import mark_accepted
from orchestrator.durable_files import sync_directory, write_whole
from orchestrator.private_files import make_private
from orchestrator.runtime.pools import working_for
from orchestrator.spec.job import parse_trial
from orchestrator.spec.matrix import objectives_of, prunes
from orchestrator.spec.problems import SpecError
from orchestrator.store.errors import DiskError
from orchestrator.train.trainer.config.config import trainer_findings
from orchestrator.units import duration

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from structlog.typing import FilteringBoundLogger

    from orchestrator.api.requests import SubmitRequest
    from orchestrator.core.events import Event, JobSubmitted
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.submitting.under_way import SubmissionsUnderWay, UnderWay
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.settings import Settings
    from orchestrator.store.store import Store

    Change = Callable[["StudyRecord"], "StudyRecord"]
    MakeAdvisor = Callable[[Mapping[str, Any]], AbstractAsyncContextManager["Advisor"]]

COMMAND: Final = (sys.executable, "-m", "orchestrator.analysis.search")
ANSWER_SECONDS: Final = 300.0
MAX_BYTES: Final = 16 * 1024 * 1024
_THREADS: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class AdvisorError(Exception):
    """The advising process has ended, or does not answer; the message has its last error line."""


class Advisor:
    """The process of one search."""

    def __init__(self, process: asyncio.subprocess.Process, answer_seconds: float) -> None:
        self._process = process
        self._answer_seconds = answer_seconds

    async def ask(self, trials: Sequence[Mapping[str, Any]], want: int) -> Mapping[str, Any]:
        """Return the process's answer to one question. Raises AdvisorError."""
        await self.write({"trials": list(trials), "want": want})
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(self._answer_seconds):
                line = await self._process.stdout.readline()
            found: Mapping[str, Any] = json.loads(line)
        except TimeoutError as error:
            raise AdvisorError(f"no answer in {duration(self._answer_seconds)}") from error
        except ValueError as error:
            raise AdvisorError(await self._last_words()) from error
        return found

    async def write(self, body: Mapping[str, Any]) -> None:
        """Send one line. Raises AdvisorError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(body).encode() + b"\n")
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise AdvisorError(await self._last_words()) from error

    async def _last_words(self) -> str:
        assert self._process.stderr is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        stderr_lines = (await self._process.stderr.read()).decode(errors="replace").strip().splitlines()
        return stderr_lines[-1][:500] if stderr_lines else "its process ended without a message"


@contextlib.asynccontextmanager
async def process_advisor(
    space: Mapping[str, Any], *, command: Sequence[str] = COMMAND, answer_seconds: float = ANSWER_SECONDS
) -> AsyncIterator[Advisor]:
    """Start the process for a space, and end it afterwards."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **_THREADS},
        cwd="/",
        start_new_session=True,
        limit=MAX_BYTES,
    )
    try:
        advisor = Advisor(process, answer_seconds)
        await advisor.write(space)
        yield advisor
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """A search as it was submitted: its file, the space in the form of ``analysis.search``, and its limits."""

    matrix_id: str
    name: str
    yaml: str
    source: str
    overrides: tuple[str, ...]
    passed: Mapping[str, str]
    space: Mapping[str, Any]
    trials: int
    max_concurrent: int
    fail_fast: bool

    @property
    def objectives(self) -> dict[str, str]:
        """The metrics to optimize: `min` or `max` by name."""
        return dict(self.space["objectives"])


def plan_of(request: SubmitRequest, first: Checked) -> SearchPlan | None:
    """Return the search that a submission requests; ``first`` is its first trial. None for any other."""
    matrix, cell = first.search, first.cell
    if matrix is None or cell is None:
        return None
    objectives = dict(objectives_of(matrix, first.spec.checkpoint))
    return SearchPlan(
        matrix_id=cell.matrix_id,
        name=cell.name,
        yaml=request.yaml,
        source=request.source,
        overrides=request.overrides,
        passed=dict(request.passed),
        space={
            "name": cell.matrix_id,
            "objectives": objectives,
            "parameters": {name: list(values) for name, values in matrix.parameters.items()},
            "ranges": {
                name: {"low": bounds.low, "high": bounds.high, "log": bounds.log}
                for name, bounds in matrix.ranges.items()
            },
            "prunes": prunes(matrix, objectives),
            "warmup_steps": matrix.warmup_steps,
        },
        trials=cell.count,
        max_concurrent=cell.max_concurrent or 1,
        fail_fast=cell.fail_fast,
    )


PLAN: Final = "plan.json"
SECRETS: Final = "secrets"
STUDY: Final = "study.json"
_ID = re.compile(r"[a-z0-9][-a-z0-9]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """Results of the trials, by number; what is missing of some; whether no further trial is submitted, or none at present."""

    given: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    missing: Mapping[int, str] = field(default_factory=dict)
    over: bool = False
    problem: str = ""
    paused: bool = False


class SearchFiles:
    """Reads and writes the files. Blocking: for threads, and for tests."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "searches"

    def keep(self, plan: SearchPlan, secrets: Mapping[str, str]) -> None:
        """Write a new search, durably. Raises OSError."""
        folder = make_private(self._of(plan.matrix_id))
        if secrets:
            write_whole(folder / SECRETS, json.dumps(dict(secrets)).encode())
        write_whole(folder / PLAN, json.dumps(asdict(plan)).encode())
        sync_directory(folder.parent)

    def plan(self, matrix_id: str) -> SearchPlan | None:
        """Return the plan of a search; None where the matrix is no search, or its file is damaged."""
        try:
            body = json.loads((self._of(matrix_id) / PLAN).read_bytes())
            return SearchPlan(**{**body, "overrides": tuple(body["overrides"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def secrets(self, matrix_id: str) -> dict[str, str]:
        """Return the secrets of its jobs."""
        try:
            values: dict[str, str] = json.loads((self._of(matrix_id) / SECRETS).read_bytes())
        except FileNotFoundError:
            return {}
        return values

    def study(self, matrix_id: str) -> StudyRecord:
        """Return the results of its trials; an empty record where none can be read."""
        try:
            body = json.loads((self._of(matrix_id) / STUDY).read_bytes())
            return StudyRecord(
                given={int(number): tuple(map(float, values)) for number, values in body["given"].items()},
                missing={int(number): str(text) for number, text in body["missing"].items()},
                over=bool(body["over"]),
                problem=str(body["problem"]),
                paused=bool(body.get("paused", False)),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return StudyRecord()

    def note(self, matrix_id: str, study: StudyRecord) -> None:
        """Write the results of its trials, and remove the secrets of a search that is over. Raises OSError."""
        folder = self._of(matrix_id)
        write_whole(folder / STUDY, json.dumps(asdict(study)).encode())
        if study.over:
            (folder / SECRETS).unlink(missing_ok=True)

    def ids(self) -> list[str]:
        """Return the ids of all searches."""
        try:
            return sorted(path.name for path in self._folder.iterdir() if _ID.fullmatch(path.name))
        except FileNotFoundError:
            return []

    def remove(self, matrix_id: str) -> None:
        """Forget a search."""
        trees.remove(self._of(matrix_id))

    def _of(self, matrix_id: str) -> Path:
        if not _ID.fullmatch(matrix_id):
            raise ValueError(f"not a matrix's id: {matrix_id!r}")
        return self._folder / matrix_id


async def prepare_trial(
    base: Job,
    plan: SearchPlan,
    cell: MatrixCell,
    secrets: Mapping[str, str],
    loop: Loop,
    settings: Settings,
    files: Pool,
    under_way: UnderWay,
) -> JobSubmitted:
    """Lay out the files of a trial at ``cell``, as ``base``'s were. Raises SpecError, RefusedError, OSError.

    The conditions that the first trials waited for (`depends_on`, `start_at`, `hold`) do not apply.
    """
    spec = parse_trial(
        plan.yaml,
        cell.values,
        source=plan.source,
        overrides=plan.overrides,
        rules=(trainer_findings,),
        environ=plan.passed,
    )
    spec = replace(spec, hold=False, start_at=None)
    check_fits(Checked(spec=spec, python=base.submission.python, directory=None), loop.nodes)
    check_queue(spec, loop.shares.sharing)
    who = base.submission
    caller = Caller(uid=who.uid, gid=-1, user=who.user, is_owner=False)
    event = await prepare_rerun(
        base, spec, caller, settings, secrets, None, files=files, at=loop.now(), under_way=under_way
    )
    return structs.replace(event, matrix=cell, rerun_of=None)


MAX_FAILURES: Final = 3
"""This many failed trials end a search in which no trial has ended well: the script is broken, not its values."""
SETTLE_SECONDS: Final = 3.0
"""The last report and the GPUs' last samples of a job are written this much after its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The trials as the advisor receives them, the next number, and how many run, have failed, and have ended well."""

    trials: tuple[dict[str, Any], ...]
    following: int
    live: int
    failed: int
    ended_well: int

    def gives_up(self, plan: SearchPlan) -> str:
        """Return why no further trial is submitted; empty where one may be."""
        if plan.fail_fast and self.failed:
            return "a trial failed (fail_fast)"
        if self.failed >= MAX_FAILURES and not self.ended_well:
            return f"{self.failed} trials failed and none ended well; fix the script and submit it again"
        return ""

    def want(self, plan: SearchPlan) -> int:
        """Return how many trials may be submitted now."""
        if self.gives_up(plan):
            return 0
        return max(0, min(plan.max_concurrent - self.live, plan.trials - self.following))

    def is_over(self, plan: SearchPlan) -> bool:
        """Whether every trial has ended and no further one comes."""
        return self.live == 0 and (self.following >= plan.trials or bool(self.gives_up(plan)))


def standing(jobs: Iterable[Job], now: float, directory_of: Callable[[str], object]) -> Standing:
    """Return the standing of a search; ``jobs`` are those of its matrix. The newest job of each trial counts."""
    newest: dict[int, Job] = {}
    for job in sorted(jobs, key=lambda job: job.submission.sequence):
        if job.submission.matrix is not None:
            newest[job.submission.matrix.index] = job
    states = {number: trial_state(job, now) for number, job in newest.items()}
    trials = tuple(
        {
            "number": number,
            "state": states[number],
            "values": dict(job.submission.matrix.values),
            "directory": str(directory_of(job.id)),
        }
        for number, job in sorted(newest.items())
        if job.submission.matrix is not None
    )
    return Standing(
        trials=trials,
        following=max(newest, default=-1) + 1,
        live=sum(state == "running" for state in states.values()),
        failed=sum(job.state is JobState.FAILED for job in newest.values()),
        ended_well=sum(state in ("complete", "pruned") for state in states.values()),
    )


def settles(job: Job, now: float) -> bool:
    """Whether records of an ended job may still be incomplete. An end in the future is from before a step of the clock."""
    return job.ended_at is not None and 0.0 <= now - job.ended_at < SETTLE_SECONDS


def trial_state(job: Job, now: float) -> str:
    """Return the state of a trial: running until its records are complete."""
    if not job.state.is_terminal or settles(job, now):
        return "running"
    if job.state is JobState.SUCCEEDED:
        return "complete"
    return "pruned" if is_pruned(job.reason) else "failed"


LOOK_SECONDS: Final = 2.0
"""Time between two looks at the reports of running trials."""
LOOK_SHARE: Final = 0.1
"""Largest share of the time that looks may take: with many trials they are farther apart."""
FIRST_DELAY_SECONDS: Final = 5.0
LONGEST_DELAY_SECONDS: Final = 300.0


@dataclass(slots=True)
class Search:
    """A search that is not over: its jobs by id, and its last written record."""

    plan: SearchPlan
    study: StudyRecord
    jobs: dict[JobId, Job] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    failures: int = 0


class Searches:
    """Conducts searches. ``advisor`` starts the advisor of a space; files are read and written in ``pool``."""

    def __init__(
        self,
        loop: Loop,
        store: Store,
        settings: Settings,
        pool: Pool,
        under_way: SubmissionsUnderWay,
        log: FilteringBoundLogger,
        *,
        advisor: MakeAdvisor = process_advisor,
        look_seconds: float = LOOK_SECONDS,
        first_delay: float = FIRST_DELAY_SECONDS,
    ) -> None:
        self._loop = loop
        self._store = store
        self._settings = settings
        self._pool = pool
        self._under_way = under_way
        self._log = log
        self._advisor = advisor
        self._look_seconds = look_seconds
        self._first_delay = first_delay
        self.book = SearchFiles(settings.home)
        self._searches: dict[str, Search] = {}
        self._new: asyncio.Queue[str] = asyncio.Queue()
        self._reading = asyncio.Lock()
        """Held while a search that is not conducted is read or written, so that none begins with an outdated record."""

    def changed(self, job: Job) -> None:
        """Handle a job that was accepted, has changed, or has ended."""
        cell = job.submission.matrix
        if cell is None or not cell.search:
            return
        search = self._searches.get(cell.matrix_id)
        if search is None:
            self._new.put_nowait(cell.matrix_id)
        else:
            search.jobs[job.id] = job
            search.changed.set()

    async def stop(self, matrix_id: str) -> None:
        """Submit no further trial; durable once this returns."""
        await self._set(matrix_id, lambda study: replace(study, over=True))

    async def pause(self, matrix_id: str) -> bool:
        """Submit no further trial until it is resumed; durable once this returns. False where the search is over, or is none."""
        return await self._set(matrix_id, lambda study: replace(study, paused=True))

    async def resume(self, matrix_id: str) -> bool:
        """Submit trials again; durable once this returns. False where the search is over, or is none."""
        return await self._set(matrix_id, lambda study: replace(study, paused=False))

    async def _set(self, matrix_id: str, change: Change) -> bool:
        async with self._reading:
            search = self._searches.get(matrix_id)
            if search is None:
                return await self._pool.run(self._set_file, matrix_id, change)
        async with search.turn:
            if search.study.over:
                return False
            await self._note(search, change(search.study))
        search.changed.set()
        return True

    def _set_file(self, matrix_id: str, change: Change) -> bool:
        if self.book.plan(matrix_id) is None:
            return False
        study = self.book.study(matrix_id)
        self.book.note(matrix_id, study if study.over else change(study))  # once more: a kill may have left secrets
        return not study.over

    async def run(self) -> None:
        """Conduct searches until cancelled. No failure of one is a failure of the daemon."""
        for matrix_id in await self._pool.run(self.book.ids):
            self._new.put_nowait(matrix_id)
        async with asyncio.TaskGroup() as tasks:
            while True:
                matrix_id = await self._new.get()
                if matrix_id in self._searches:
                    continue
                try:
                    async with self._reading:
                        search = await self._found(matrix_id)
                        if search is not None:
                            self._searches[matrix_id] = search
                except Exception as error:
                    self._log.warning("search.not_read", matrix=matrix_id, error=str(error))
                    continue
                if search is not None:
                    tasks.create_task(self._conduct(search))

    async def _found(self, matrix_id: str) -> Search | None:
        """Return a search that is not over. One without stored jobs (never accepted, or all pruned) is removed."""
        plan = await self._pool.run(self.book.plan, matrix_id)
        if plan is None:
            return None
        study = await self._pool.run(self.book.study, matrix_id)
        if study.over:
            return None
        jobs = await self._store.matrix_jobs(matrix_id)
        if not jobs:
            await self._pool.run(self.book.remove, matrix_id)
            return None
        return Search(plan, study, {job.id: self._loop.jobs.get(job.id, job) for job in jobs})

    async def _conduct(self, search: Search) -> None:
        while not search.study.over:
            try:
                async with self._advisor(search.plan.space) as advisor:
                    while not search.study.over:
                        await self._wait(search, await self._round(search, advisor))
            except Exception as error:
                search.failures += 1
                text = _text(error)
                self._log.warning("search.delayed", matrix=search.plan.matrix_id, error=text)
                with contextlib.suppress(OSError):
                    async with search.turn:
                        # A job file that is invalid with these values stays invalid; any other error may pass.
                        over = isinstance(error, SpecError) or search.study.over
                        await self._note(search, replace(search.study, problem=text, over=over))
                delay = min(LONGEST_DELAY_SECONDS, self._first_delay * 2.0 ** min(search.failures - 1, 10))
                await self._wait(search, 0.0 if search.study.over else delay, early=False)
        del self._searches[search.plan.matrix_id]

    @staticmethod
    async def _wait(search: Search, seconds: float | None, *, early: bool = True) -> None:
        """Wait for a change of a trial, at most ``seconds``; with ``early`` False, for that long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await (search.changed if early else asyncio.Event()).wait()
        search.changed.clear()

    async def _round(self, search: Search, advisor: Advisor) -> float | None:
        """Ask once and act on the answer; return the seconds until the next look, None for the next change."""
        plan, began = search.plan, self._loop.now()
        at = standing(search.jobs.values(), began, self._settings.paths.job)
        answer = await advisor.ask(at.trials, 0 if search.study.paused else at.want(plan))
        await self._prune(search, answer["pruned"])
        async with search.turn:
            if search.study.over:  # cancelled meanwhile
                return 0.0
            for values in () if search.study.paused else answer["suggested"]:  # also one that was paused meanwhile
                await self._submit(search, values)
            over, paused = at.is_over(plan), search.study.paused
            await self._note(search, _record(answer, over=over, paused=paused, problem=at.gives_up(plan)))
        search.failures = 0
        if over:
            return 0.0
        return self._pause(plan, at, self._loop.now() - began)

    def _pause(self, plan: SearchPlan, at: Standing, took: float) -> float | None:
        settling = [
            job.ended_at
            for job in self._searches[plan.matrix_id].jobs.values()
            if job.ended_at is not None and settles(job, self._loop.now())
        ]
        if settling:
            return max(0.1, min(settling) + SETTLE_SECONDS - self._loop.now())
        looks = plan.space["prunes"] and at.live and not self._searches[plan.matrix_id].study.paused
        return max(self._look_seconds, took / LOOK_SHARE) if looks else None

    async def _prune(self, search: Search, pruned: list[Mapping[str, Any]]) -> None:
        by_number = {one["number"]: one for one in pruned}
        objective = next(iter(search.plan.objectives))

        def make() -> list[Event]:
            events: list[Event] = []
            for job_id in search.jobs:
                live = self._loop.decided.get(job_id)
                cell = None if live is None else live.submission.matrix
                if live is None or cell is None or cell.index not in by_number or not live.attempts:
                    continue
                one = by_number[cell.index]
                by = ByPruner(matrix=cell.matrix_id, metric=objective, step=one["step"], value=one["value"])
                events += request_stop(live, StopPurpose.CANCEL, by, self._loop.now())
            return events

        if by_number:
            await self._loop.command(make)

    async def _submit(self, search: Search, values: Mapping[str, Any]) -> None:
        """Submit the next trial with these values. Raises OrchError, SpecError, OSError."""
        plan, base = search.plan, max(search.jobs.values(), key=lambda job: job.submission.sequence)
        number = 1 + max(job.submission.matrix.index for job in search.jobs.values() if job.submission.matrix)
        cell = MatrixCell(
            matrix_id=plan.matrix_id,
            name=plan.name,
            index=number,
            count=plan.trials,
            values=values,
            max_concurrent=plan.max_concurrent,
            fail_fast=plan.fail_fast,
            search=True,
        )
        secrets = await self._pool.run(self.book.secrets, plan.matrix_id)
        async with self._under_way.begin() as under_way:
            under_way.need([base.id])
            with working_for(base.submission.uid):
                given = (base, plan, cell, secrets, self._loop, self._settings, self._pool, under_way)
                event = await prepare_trial(*given)
            under_way.accepted = True  # until it is known: a cancelled write may be done
            try:
                job, _ = await self._store.submit(event)
            except DiskError:
                under_way.accepted = False
                raise
            mark_accepted(self._settings.paths, [job.id])
        search.jobs[job.id] = job
        self._loop.add(job, {})
        self._log.info("search.trial", matrix=plan.matrix_id, number=number, job=job.id, values=dict(values))

    async def _note(self, search: Search, study: StudyRecord) -> None:
        if study != search.study:
            await self._pool.run(self.book.note, search.plan.matrix_id, study)
            search.study = study


def _record(answer: Mapping[str, Any], *, over: bool, paused: bool, problem: str) -> StudyRecord:
    given = {int(n): tuple(v) for n, v in answer["given"].items() if all(map(math.isfinite, v))}
    missing = {int(n): text for n, text in answer["missing"].items()}
    return StudyRecord(given=given, missing=missing, over=over, paused=paused, problem=problem)


def _text(error: Exception) -> str:
    if isinstance(error, OrchError):
        return f"{error.message}; {error.hint}" if error.hint else error.message
    return str(error) or type(error).__name__
