"""Finds hung jobs: keeps the heartbeat of every running attempt, has still ranks inspected, and acts on the result.

``core/diagnosis/health.py`` decides when a job is late, and whether it hangs; the runtime
inspects processes. This module decides when, and what follows: the stacks of all ranks in their logs, then a restart
that counts against the hang budget. Observations of a still job also go to the diagnosis, which reports them.
A job in interactive use is not late: one at a breakpoint, or an interactive one, which is cancelled when it is idle.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from msgspec import structs

from orchestrator import clock
from orchestrator.core import events as ev
from orchestrator.core.diagnosis.health import (
    TICK_SECONDS,
    Call,
    Circumstances,
    Heartbeat,
    LastProgress,
    SilentRanks,
    Standing,
    gathering,
    judge,
    standing,
)
from orchestrator.core.diagnosis.observation import StallSeen
from orchestrator.core.facts.findings import Hang, Lateness, Sign
from orchestrator.core.facts.reasons import ByLimit
from orchestrator.core.lifecycle.advance import declare_hung, request_stop
from orchestrator.core.states import FailureClass, JobState, StopPurpose
from orchestrator.runtime.ranks.process_inspector import report_lines

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
    from typing import Any

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.diagnosis.health import HangFinding, RankLook
    from orchestrator.core.diagnosis.observation import TerminalSeen
    from orchestrator.core.facts.findings import Stillness
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.gangs.rank_rpc import GangCalls
    from orchestrator.train.script.progress_reading import ProgressSnapshot

BETWEEN_LOOKS: Final = 1.0
AGAIN_SECONDS: Final = 1.0
UNREPORTED_SECONDS: Final = 5.0
"""Interval of inspections of ranks without any report: their scripts report nothing."""
SET_UP_SECONDS: Final = 8.0
"""Idle ranks without any report are inspected with stacks after this long: they may wait for their process group."""
SET_UP_AGAIN_SECONDS: Final = 60.0
LONGEST_AGAIN_SECONDS: Final = 30.0
"""The longest interval between reading stacks of a job that is still but not hung; the interval grows."""


@dataclass(slots=True)
class _Watched:
    """One attempt. Fields below ``again_at`` belong to one stillness and are reset when it ends."""

    attempt: int
    heartbeat: Heartbeat
    task: asyncio.Task[None] | None = None
    printed: dict[int, int] = field(default_factory=dict)
    silent: SilentRanks = field(default_factory=SilentRanks)
    again_at: float = 0.0
    stacks_at: float = 0.0
    stacks_again: float = AGAIN_SECONDS
    first: dict[int, RankLook] = field(default_factory=dict)
    reported: set[Call] = field(default_factory=set)
    seen: Stillness | None = None
    idle: bool = False
    number: int = 0

    def alive(self) -> None:
        """Record the end of the stillness."""
        self.number += 1
        self.again_at = self.stacks_at = 0.0
        self.stacks_again = AGAIN_SECONDS
        self.first = {}
        self.reported = set()
        self.seen = None
        self.idle = False

    def has_printed(self, looks: Mapping[int, RankLook]) -> bool:
        """Whether a rank has printed anything since the last call."""
        printed = {rank: look.printed for rank, look in looks.items()}
        before, self.printed = self.printed, {**self.printed, **printed}
        return any(count != before.get(rank, 0) for rank, count in printed.items())


class HangWatch:
    """Watches every running attempt. ``clock`` gives monotonic seconds; ``pause`` waits for a number of them.

    ``attend`` returns whether a job is in interactive use, so that it is not late.
    """

    def __init__(
        self,
        *,
        jobs: Callable[[], Iterable[Job]],
        inspector: GangCalls,
        command: Callable[[Callable[[], Sequence[ev.Event]]], Awaitable[None]],
        log: FilteringBoundLogger,
        attend: Callable[[Job], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._jobs = jobs
        self._inspector = inspector
        self._command = command
        self._log = log
        self._attend = attend
        self._clock = clock
        self._pause = pause
        self._watched: dict[JobId, _Watched] = {}

    def progress(self, job: Job, attempt: int, rank: int, snapshot: ProgressSnapshot) -> None:
        """Record a rank's report."""
        watched = self._of(job)
        if attempt != watched.attempt:
            return
        before = watched.heartbeat.still_seconds
        watched.heartbeat.beat(
            LastProgress(
                rank=rank,
                phase=snapshot.phase,
                saving=snapshot.saving_since is not None,
                steps=snapshot.steps_reported,
                step_seconds=snapshot.recent_step_seconds,
            )
        )
        if watched.heartbeat.still_seconds < before:  # else another rank is still and remains so
            watched.alive()

    def suspected(self, job_id: JobId) -> bool | None:
        """Whether the job is at present reported as hung or still; None while its pace is unknown."""
        watched = self._watched.get(job_id)
        if watched is None or (watched.heartbeat.locked_after is None and not watched.reported):
            return None
        return bool(watched.reported)

    def stall(self, job_id: JobId) -> StallSeen | None:
        """Return the observation of a still job; None for one that is not, or was not inspected."""
        watched = self._watched.get(job_id)
        if watched is None:
            return None
        silent, seen, late = watched.silent.hang, watched.seen, _lateness(watched.heartbeat)
        if seen is None and silent is not None:
            seen, late = silent.seen, silent.late
        if seen is None:
            return None
        return StallSeen(
            seen=seen,
            late=late,
            longest_step=watched.heartbeat.longest_step,
            longest_pause=watched.heartbeat.longest_pause,
            proven=silent is not None or Call.HUNG in watched.reported,
        )

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                await asyncio.sleep(TICK_SECONDS)
                self.tick()
        finally:
            for watched in self._watched.values():
                if watched.task is not None:
                    watched.task.cancel()

    def tick(self) -> None:
        """Have still jobs inspected when due."""
        now = self._clock()
        running = {job.id: job for job in self._jobs() if job.state is JobState.RUNNING and not job.succeeded}
        for job_id in self._watched.keys() - running.keys():
            self._forget(job_id)
        for job in running.values():
            watched = self._of(job)
            watched.heartbeat.tick(now)
            for ended in job.exits:
                watched.heartbeat.ended(ended.rank)
            if job.degraded or job.gang_lost or self._attend(job):  # a rank out of reach is not still
                watched.heartbeat.sign()
                watched.alive()
            elif watched.task is None or watched.task.done():
                look = self._examine if self._is_due(job, watched, now) else None
                if look is None and watched.heartbeat.silent and now >= watched.silent.due:
                    look = self._examine_silent
                if look is not None:
                    watched.task = asyncio.create_task(self._inspect(look, job, watched), name=f"health-{job.id}")

    def _of(self, job: Job) -> _Watched:
        watched = self._watched.get(job.id)
        if watched is None or watched.attempt != job.attempt_number:
            self._forget(job.id)
            heartbeat = Heartbeat(job.num_workers, self._clock())
            watched = self._watched[job.id] = _Watched(job.attempt_number, heartbeat)
        return watched

    def _forget(self, job_id: JobId) -> None:
        watched = self._watched.pop(job_id, None)
        if watched is not None and watched.task is not None:
            watched.task.cancel()

    def _is_due(self, job: Job, watched: _Watched, now: float) -> bool:
        due = watched.heartbeat.stopped_after
        limit = _limit(job, watched)
        if limit is not None:
            due = limit
        return now >= watched.again_at and watched.heartbeat.still_seconds >= due - BETWEEN_LOOKS

    async def _inspect(self, look: Callable[[Job, _Watched], Awaitable[None]], job: Job, watched: _Watched) -> None:
        try:
            await look(job, watched)
        except Exception:
            watched.again_at = watched.silent.due = self._clock() + LONGEST_AGAIN_SECONDS
            self._log.exception("job.examination_failed", job=job.id)

    async def _examine(self, job: Job, watched: _Watched) -> None:
        heartbeat, limit = watched.heartbeat, _limit(job, watched)
        ranks = _running(job)
        number, now = watched.number, self._clock()
        sets_up = heartbeat.locked_after is None and watched.idle and heartbeat.still_seconds >= SET_UP_SECONDS
        deep = limit is not None or ((heartbeat.locked_after is not None or sets_up) and now >= watched.stacks_at)
        before = await self._inspector.look(job, stacks=deep, ranks=ranks)
        await self._pause(BETWEEN_LOOKS)
        after = await self._inspector.look(job, stacks=deep, ranks=ranks)
        watched.again_at = self._clock() + (AGAIN_SECONDS if heartbeat.reports else UNREPORTED_SECONDS)
        if deep:
            watched.stacks_at = self._clock() + watched.stacks_again
            longest = LONGEST_AGAIN_SECONDS if heartbeat.locked_after is not None else SET_UP_AGAIN_SECONDS
            watched.stacks_again = min(2 * watched.stacks_again, longest)
        if watched.has_printed(after) and not heartbeat.reports:
            heartbeat.sign()
            watched.alive()
        if watched.number != number or not after:
            return
        finding = self._judge(job, watched, before, after, deep=deep)
        watched.seen, still = self._seen(job, watched, finding, before, after, deep=deep), heartbeat.still_seconds
        due = limit if limit is not None else heartbeat.stopped_after if finding.stopped else heartbeat.locked_after
        hung = finding.call is Call.HUNG if limit is None else len(after) == len(ranks)
        if hung and due is not None and still >= due:
            if Call.HUNG not in watched.reported:
                watched.reported.add(Call.HUNG)
                hang = Hang(seen=_beside(job, finding.seen), late=_lateness(heartbeat), attempt=job.attempt_number)
                await self._hung(job, watched, hang, after)
        elif heartbeat.reported_after is not None and still >= heartbeat.reported_after and deep:
            watched.reported.add(Call.SLOW)

    async def _examine_silent(self, job: Job, watched: _Watched) -> None:
        looks = await self._inspector.look(job, stacks=False, ranks=watched.heartbeat.silent)
        new = watched.silent.seen(looks, watched.heartbeat, watched.attempt, self._clock())
        if new and watched.silent.hang is not None:
            await self._hung(job, watched, watched.silent.hang, looks)

    def _seen(
        self,
        job: Job,
        watched: _Watched,
        finding: HangFinding,
        before: dict[int, RankLook],
        after: dict[int, RankLook],
        *,
        deep: bool,
    ) -> Stillness:
        """Return the facts of the stillness. An inspection without stacks keeps those of an earlier one.

        Before the first step the fact is what keeps the ranks from their process group.
        """
        pairs = {rank: (before[rank], after[rank]) for rank in before.keys() & after.keys()}
        watched.idle = any(standing(*pair) is not Standing.WORKS for pair in pairs.values())
        if deep:
            first_step = watched.heartbeat.locked_after is None
            return _beside(job, (gathering(pairs, job.num_workers) if first_step else None) or finding.seen)
        known = watched.seen
        return known if known is not None and finding.seen.sign is Sign.UNKNOWN else _beside(job, finding.seen)

    def _judge(
        self, job: Job, watched: _Watched, before: dict[int, RankLook], after: dict[int, RankLook], *, deep: bool
    ) -> HangFinding:
        heartbeat, ranks = watched.heartbeat, _running(job)
        how = Circumstances(
            still_seconds=heartbeat.still_seconds,
            usual_seconds=heartbeat.usual_seconds,
            certain=len(set(job.nodes)) == 1 and not job.spec.resources.resources_per_worker.gpu,
        )
        finding = judge({r: (before[r], after[r]) for r in before.keys() & after.keys()}, ranks, how)
        if deep and not watched.first:
            watched.first = before
        if finding.call is Call.HUNG and how.patient and not finding.stopped and watched.first:
            # Evidence from time alone must have been the same all the time.
            whole = {r: (watched.first[r], after[r]) for r in watched.first.keys() & after.keys()}
            return judge(whole, ranks, how)
        return finding

    async def _hung(self, job: Job, watched: _Watched, hang: Hang, looks: Mapping[int, RankLook]) -> None:
        """Write the stacks of all ranks to their logs, and act as the job file requires."""
        rank = hang.seen.rank
        if any(not look.threads for look in looks.values()):  # the stop was found without reading stacks
            looks = {**looks, **await self._inspector.look(job, stacks=True)}
        await self._inspector.note(job, {rank: report_lines(look) for rank, look in looks.items()})
        reports = (watched.heartbeat.reports or _has_reported(job)) and job.spec.health.progress is None
        action = job.spec.health.on_hang or ("restart" if reports else "notify")
        self._log.warning("job.hung", job=job.id, attempt=job.attempt_number, rank=rank, action=action)
        if action == "notify":
            return
        blamed = looks.get(rank) if rank is not None else None
        failure = ev.Failure(
            failure_class=FailureClass.HANG,
            cause=hang,
            rank=rank,
            log_tail=tuple(report_lines(blamed)) if blamed is not None else (),
        )
        began = clock.now() - hang.late.still_seconds
        await self._command(lambda: self._failed(job, failure, began))

    def _failed(self, job: Job, failure: ev.Failure, began: float) -> Sequence[ev.Event]:
        live = next((j for j in self._jobs() if j.id == job.id), None)
        if live is None or live.attempt_number != job.attempt_number:
            return []
        return declare_hung(live, failure, began, clock.now())


def _has_reported(job: Job) -> bool:
    """Whether any attempt has reported a step: then the script reports steps, even if its ranks now hang before their first one."""
    return any(attempt.first_step is not None for attempt in job.attempts)


def _running(job: Job) -> list[int]:
    ended = {e.rank for e in job.exits}
    return [rank for rank in range(job.num_workers) if rank not in ended]


def _beside(job: Job, seen: Stillness) -> Stillness:
    return structs.replace(seen, ended=tuple(sorted(e.rank for e in job.exits if e.ok)))


def _limit(job: Job, watched: _Watched) -> float | None:
    """Return the time without progress that the job file allows; None where it is learned."""
    limit = job.spec.health.heartbeat_timeout
    if not isinstance(limit, timedelta):
        return None
    seconds = limit.total_seconds()
    if watched.heartbeat.reports or any(watched.printed.values()):
        return seconds
    return max(seconds, job.spec.health.startup_timeout.total_seconds())


def _lateness(heartbeat: Heartbeat) -> Lateness:
    return Lateness(
        still_seconds=heartbeat.still_seconds, usual_seconds=heartbeat.usual_seconds, by_steps=heartbeat.reports
    )


IDLE_LIMIT = "interactive.idle_limit"


class Attendance:
    """Jobs in interactive use. ``jobs`` returns live jobs, ``terminals`` a job's terminals; ``spawn`` starts a task."""

    def __init__(
        self,
        *,
        jobs: Callable[[], Iterable[Job]],
        terminals: Callable[[Job], Mapping[int, TerminalSeen]],
        command: Callable[[Callable[[], Sequence[ev.Event]]], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        now: Callable[[], float],
    ) -> None:
        self._jobs, self._terminals, self._command, self._spawn, self._now = jobs, terminals, command, spawn, now
        self._ending: set[JobId] = set()

    def attend(self, job: Job) -> bool:
        """Return whether a running job is in interactive use, and so not late; cancel an idle interactive one."""
        terminals = self._terminals(job)
        if job.spec.interactive is None:
            return any(one.stopped_at is not None for one in terminals.values())
        idle = len(terminals) == job.num_workers and all(one.idle for one in terminals.values())
        if idle and job.id not in self._ending:
            self._ending.add(job.id)
            self._spawn(self._cancel(job.id))
        return True

    async def _cancel(self, job_id: JobId) -> None:
        def make() -> Sequence[ev.Event]:
            job = next((one for one in self._jobs() if one.id == job_id), None)
            return [] if job is None else request_stop(job, StopPurpose.CANCEL, ByLimit(key=IDLE_LIMIT), self._now())

        try:
            await self._command(make)
        finally:
            self._ending.discard(job_id)
