"""The seeded bugs: each replaces one text of one file with another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Mutant:
    """``old`` occurs once in the file below ``orchestrator``; ``new`` is the bug that ``name`` describes."""

    name: str
    path: str
    old: str
    new: str


FOLD: Final = "core/lifecycle/fold.py"
FOLLOWING: Final = "core/lifecycle/fold.py"
ADVANCE: Final = "core/lifecycle/advance.py"
FAILURE: Final = "core/lifecycle/failure.py"
SAVED: Final = "core/lifecycle/fold.py"
EFFECTS: Final = "core/lifecycle/advance.py"
LOOP: Final = "daemon/loop.py"
SQL: Final = "store/sql/requests.py"
GANGS: Final = "runtime/memory/gangs.py"
SCHEDULER: Final = "core/scheduler/scheduler.py"
PLACEMENT: Final = "core/scheduler/placement.py"
PREEMPTION: Final = "core/scheduler/preemption.py"
LIVE_JOBS: Final = "core/scheduler/live_jobs.py"
RESOURCES: Final = "core/scheduler/placement.py"
RESERVATIONS: Final = "core/scheduler/placement.py"

TESTS: Final = {
    "core/lifecycle": ("tests/unit/core/lifecycle", "tests/unit/core/job", "tests/unit/core/scheduler"),
    "core/scheduler": ("tests/unit/core/scheduler",),
    "daemon": ("tests/unit/daemon/test_loop.py", "tests/unit/daemon/test_recovery.py", "tests/unit/daemon/requests"),
    "store": ("tests/unit/store",),
    "runtime/memory": ("tests/contract/test_memory.py", "tests/unit/runtime/memory"),
}
"""The tests of the part that a file belongs to."""

MUTANTS: Final = (
    # -- the fold
    Mutant(
        "a job that has ended goes on with a late fact",
        FOLD,
        "if job.state.is_terminal and not isinstance(event, ev.JobNoted):",
        "if job.state.is_terminal and isinstance(event, ev.JobNoted):",
    ),
    Mutant("a version is left out", FOLD, "version=job.version + 1", "version=job.version + 2"),
    Mutant("an attempt is started twice", FOLD, "if event.attempt <= job.attempt_number:", "if event.attempt < job.attempt_number:"),
    Mutant("a restart is charged to no budget", FOLD, "restarts.get(failure_class.value, 0) + 1", "restarts.get(failure_class.value, 0)"),
    Mutant(
        "restarts without progress are not counted",
        FOLD,
        "no_progress=(0 if progressed else job.no_progress) + int(event.retry and not preempted),",
        "no_progress=0 if progressed else job.no_progress,",
    ),
    Mutant("a job that is given up is tried again", FOLLOWING, "if not event.retry:", "if not event.retry and event.keep_gang:"),
    Mutant(
        "the exit of an earlier attempt ends this one",
        FOLD,
        "phase.gang is None or not _current(job, event.attempt):",
        "phase.gang is None:",
    ),
    Mutant("the exit of a rank is taken twice", FOLD, "if phase.exits.has(event.exit.rank):", "if phase.exits.has(-1):"),
    Mutant(
        "a weaker stop takes the place of a stronger one",
        FOLD,
        "if not sooner and not event.purpose.overrides(before.purpose):",
        "if event.purpose.overrides(before.purpose):",
    ),
    Mutant(
        "a job that has succeeded is stopped",
        FOLD,
        "if job.succeeded or isinstance(job.phase, GivingUp):",
        "if isinstance(job.phase, GivingUp):",
    ),
    Mutant(
        "the release of an earlier gang releases this one",
        FOLD,
        "if event.gang != job.gang or not job.gang_open:",
        "if not job.gang_open:",
    ),
    Mutant(
        "a checkpoint in the memory of dead actors counts",
        FOLD,
        "checkpoints=job.checkpoints.without_memory)",
        "checkpoints=job.checkpoints)",
    ),
    Mutant(
        "a job goes back to the queue in spite of its fence",
        FOLD,
        "phase = Pending(not_before=max(event.not_before, job.fenced_until), failure=job.failure)",
        "phase = Pending(not_before=event.not_before, failure=job.failure)",
    ),
    Mutant(
        "a new gang is made in spite of the fence",
        FOLLOWING,
        "not_before = max(event.not_before, fenced_until)\n    if not event.retry",
        "not_before = event.not_before\n    if not event.retry",
    ),
    Mutant("ranks that succeeded have processes", FOLD, "replace(phase.gang, pids=None)\n    if isinstance(phase, Draining)", "phase.gang\n    if isinstance(phase, Draining)"),
    Mutant(
        "the loss of an earlier gang loses this one",
        FOLD,
        "phase.gang is None or event.gang != job.gang:\n        return job\n    known",
        "phase.gang is None:\n        return job\n    known",
    ),
    Mutant("an attempt restarts in a gang that is lost", FOLLOWING, "if event.keep_gang and isinstance(gang, Gang):", "if event.keep_gang and gang is not None:"),
    # -- events that follow from a record
    Mutant("a job succeeds with its first rank", ADVANCE, "phase.ended_well(job.num_workers)", "phase.ended_well(min(1, job.num_workers))"),
    Mutant(
        "an attempt restarts beside processes of the last",
        ADVANCE,
        "if phase.gang.pids is not None:\n        return _NOTHING\n    if now",
        "if phase.gang.pids is not None and now < 0:\n        return _NOTHING\n    if now",
    ),
    Mutant("a restart does not wait for its time", ADVANCE, "if now < phase.not_before:", "if now < phase.not_before - 3600:"),
    Mutant(
        "a stopped job ends before its gang is gone",
        ADVANCE,
        "if phase.gang is not None:\n        return _NOTHING\n    if job.succeeded:",
        "if phase.gang is not None and job.succeeded:\n        return _NOTHING\n    if job.succeeded:",
    ),
    Mutant(
        "a failed job ends before its gang is gone",
        ADVANCE,
        "if phase.gang is not None or returns(job, now):",
        "if returns(job, now):",
    ),
    Mutant(
        "a paused job goes back to the queue",
        ADVANCE,
        "case StopPurpose.PAUSE:\n            return ev.JobSuspended(job_id=job.id, at=now, by=by)",
        "case StopPurpose.PAUSE:\n            return ev.JobRequeued(job_id=job.id, at=now, reason=MadeRoom(by=by), not_before=0.0)",
    ),
    Mutant(
        "ranks that exit with 0 when they are stopped have succeeded",
        ADVANCE,
        "return job.ended_well and job.attempts[-1].failure is None and all(e.ordered is None for e in job.exits)",
        "return bool(job.exits) and all(e.exit_code == 0 for e in job.exits)",
    ),
    Mutant(
        "max_duration is never reached",
        ADVANCE,
        "if now >= limit:\n            return Step(tuple(request_stop(",
        "if now >= limit + 1e9:\n            return Step(tuple(request_stop(",
    ),
    Mutant("startup_timeout is never reached", ADVANCE, "if now >= limit:\n            failure", "if now >= limit + 1e9:\n            failure"),
    Mutant(
        "nothing wakes the loop for max_duration",
        ADVANCE,
        "wake_at = _sooner(wake_at, limit)\n    return",
        "limit = 0.0\n    return",
    ),
    Mutant(
        "a waiting job is not cancelled",
        ADVANCE,
        "return [ev.JobFinished(job_id=job.id, at=now, state=JobState.CANCELLED, reason=Cancelled(by=by))]",
        "return []",
    ),
    # -- failures
    Mutant("one restart more than the budget", FAILURE, "budget is not None and used >= budget:", "budget is not None and used > budget:"),
    Mutant(
        "one restart more without progress",
        FAILURE,
        "without_progress >= job.spec.retry.max_no_progress:",
        "without_progress > job.spec.retry.max_no_progress:",
    ),
    Mutant("hangs are charged to another budget", FAILURE, "return limits.hang", "return limits.infra"),
    Mutant(
        "a survivor's error hides the rank that failed first",
        FAILURE,
        "key=lambda e: (is_collateral(e), e.failed_at)",
        "key=lambda e: (not is_collateral(e), e.failed_at)",
    ),
    Mutant("a collateral error is judged at once", FAILURE, "if now < settled_at:", "if now < settled_at - 60:"),
    Mutant("ranks that were asked to leave are not looked at", FAILURE, "if left and not any(", "if left and now < 0 and not any("),
    # -- checkpoints
    Mutant("an earlier attempt's checkpoint counts", SAVED, "if event.attempt != job.attempt_number:", "if event.attempt > job.attempt_number:"),
    Mutant("an older checkpoint takes the place of a newer", SAVED, "event.step <= before.newest.step:", "event.step < 0:"),
    Mutant(
        "an older durable checkpoint takes the place of a newer",
        SAVED,
        "(known is not None and event.step <= known.step)",
        "(known is not None and event.step < 0)",
    ),
    Mutant(
        "a checkpoint in memory counts without its gang",
        SAVED,
        "if not event.path and not job.gang_open:",
        "if not event.path and job.attempt_number < 0:",
    ),
    # -- effects
    Mutant("ranks are killed before they can save", EFFECTS, "p.Draining: {**_ENDING, Hold.PROCESSES: StopRanks}", "p.Draining: _ENDING"),
    Mutant("failed ranks are not killed", EFFECTS, "p.Restarting: {Hold.PROCESSES: KillRanks,", "p.Restarting: {Hold.PROCESSES: Ensure,"),
    Mutant("a lost gang is never released", EFFECTS, "    Hold.LOST: ReleaseGang,\n    Hold.FILES", "    Hold.LOST: None,\n    Hold.FILES"),
    # -- the loop
    Mutant(
        "effects are ordered before they are written",
        LOOP,
        "        wake_at = self._decide(batch)\n        if batch or",
        "        wake_at = self._decide(batch)\n        runtime = self._runtime()\n"
        "        for job in self.decided.active.values():\n            runtime and runtime.apply(job, desired_effect(job))\n        if batch or",
    ),
    Mutant("what a full disk did not take is forgotten", LOOP, "await self._pause(WRITE_RETRY_SECONDS)", "return"),
    Mutant("jobs that have ended stay", LOOP, "del self.jobs[job_id], self.decided[job_id]", "del self.jobs[job_id]"),
    Mutant("only jobs that change have their effects", LOOP, "for job_id in {**before, **self.decided.active}:", "for job_id in before:"),
    Mutant("facts are not checked", LOOP, "unusable = misfits(event)", "unusable: tuple[str, ...] = ()"),
    Mutant("the nodes are looked at once", LOOP, "if nodes != self.nodes:", "if not self.nodes:"),
    Mutant(
        "a fact is folded from what is written, not from what was decided",
        LOOP,
        "job = self.decided.get(event.job_id)\n        if job is None:\n            return\n        change",
        "job = self.jobs.get(event.job_id)\n        if job is None:\n            return\n        change",
    ),
    # -- the store
    Mutant(
        "a repeated request submits twice (SQLite)",
        SQL,
        "[None if row is None else job_of(row[2], row[0]) for row in rows]",
        "[None for _ in rows]",
    ),
    Mutant("the first event is not kept (SQLite)", SQL, "for c in of_job.changes]\n        connection", "for c in of_job.changes[1:]]\n        connection"),
    Mutant("jobs that ended are not tidied (SQLite)", SQL, 'connection.execute(STATEMENTS["insert_untidied"], (after.submission.sequence,))', "pass"),
    Mutant(
        "an end is counted twice (SQLite)",
        SQL,
        'connection.execute(STATEMENTS["count_finished"], totals)',
        'connection.executemany(STATEMENTS["count_finished"], [totals, totals])',
    ),
    # -- gangs
    Mutant("a node that was cut off needs no fence", GANGS, "not_before = now + FENCE_SECONDS if lost.node_lost else 0.0", "not_before = 0.0"),
    Mutant(
        "a gang is released before its processes are gone",
        GANGS,
        "if gang is None or len(gang.gone) < job.num_workers:",
        "if gang is not None and len(gang.gone) < 0:",
    ),
    Mutant("ranks are launched again after a restart of the daemon", GANGS, "if greeting.launched < attempt", "if greeting.launched <= attempt"),
    Mutant(
        "a rank that has ended is run again",
        GANGS,
        "_refuse_to_repeat(job.attempt_number, waiting, self._cluster.processes.records.get(job.id, {}))",
        "pass",
    ),
    Mutant("an answer that comes twice is followed twice", GANGS, "if gang.cursors.get(actor.rank, 0) == cursor:", "if cursor >= 0:"),
    Mutant(
        "a job runs with its first rank",
        GANGS,
        "if len(gang.started) == len(gang.actors):\n                    pids = tuple(gang.started[r] for r in range(len(gang.actors)))",
        "if gang.started:\n                    pids = tuple(gang.started.values())",
    ),
    Mutant("an attempt is gone with its first rank", GANGS, "if len(gang.gone) == len(gang.actors):", "if gang.gone:"),
    Mutant("an earlier gang is taken for the job's", GANGS, "if gang is None or gang.number != job.gang:", "if gang is None:"),
    Mutant("the last words of ranks are lost", GANGS, "self._post([*([] if restored else self._recorded_exits(job_id, attempt, ranks)), event])", "self._post([event])"),
    # -- the scheduler
    Mutant(
        "the GPUs of a starting gang are free",
        RESOURCES,
        "[job for job in jobs if job.gang_open]",
        "[job for job in jobs if job.gang_open and job.seats]",
    ),
    Mutant("STRICT_SPREAD puts two ranks on a node", PLACEMENT, 'or (strategy == "STRICT_SPREAD" and not several)', 'or (strategy == "SPREADED" and not several)'),
    Mutant("STRICT_PACK takes two nodes", PLACEMENT, 'if strategy == "STRICT_PACK" or', 'if strategy == "PACKED" or'),
    Mutant("a shared GPU is taken for another", RESOURCES, "free[node_id].take(*size, gpu=gpu)\n    return free", "free[node_id].take(*size)\n    return free"),
    Mutant(
        "what an ended job held is never free",
        LIVE_JOBS,
        "self._changed.update(job.nodes)\n        if self._accounts is not None:\n            self._accounts.count(job, -1)",
        "if self._accounts is not None:\n            self._accounts.count(job, -1)",
    ),
    Mutant("a gang's first record is kept", LIVE_JOBS, "held.held is not job.held or held.attempts is not job.attempts:", "held.attempts is not job.attempts:"),
    Mutant("jobs that must not be preempted are", LIVE_JOBS, "job.state is JobState.RUNNING and job.spec.preemptible and not", "job.state is JobState.RUNNING and not"),
    Mutant("a back-off is not waited for", SCHEDULER, "if job.not_before > self._now:\n            self._commands.ask_again(job.not_before)", "if job.not_before > self._now + 1e9:\n            self._commands.ask_again(job.not_before)"),
    Mutant("a job that waits longest claims nothing", SCHEDULER, "full = self._claim(job, closed)", "full = job is None"),
    Mutant("a new gang has the number of the last", SCHEDULER, "number, gang = job.next_attempt, job.next_gang", "number, gang = job.next_attempt, job.gang"),
    Mutant("nothing wakes the loop for a back-off", SCHEDULER, "commands.ask_again(jobs.next_due() if", "commands.ask_again(None if"),
    # -- time sharing
    Mutant("a job that has not saved shares its time", PREEMPTION, "if saved is None or saved < began or stops_at > now:", "if saved is None or stops_at > now:"),
    Mutant("work of more than a minute is repeated", PREEMPTION, "now - saved <= REPEATED_SECONDS", "now - saved <= 9 * REPEATED_SECONDS"),
    Mutant("a job of higher priority shares its time", PREEMPTION, "if other.priority > job.priority or self", "if self"),
    Mutant("a job of a smaller share gives way", PREEMPTION, "self._shares.user_share(queue, user) > share", "self._shares.user_share(queue, user) >= 0 * share"),
    Mutant("what stops for a job is not kept for it", SCHEDULER, "if self._has_turn(job) or self._bounded", "if self._bounded"),
    # -- labels, reservations, idle GPUs
    Mutant("labels of nodes are not asked for", PLACEMENT, "for key, value in shape.labels):", "for key, value in shape.labels[1:]):"),
    Mutant("a node is open while it is reserved", RESERVATIONS, "[r for r in there if r.start <= at < r.end]", "[r for r in there if r.end <= at < r.end]"),
    Mutant("a job starts that still runs when its node is reserved", RESERVATIONS, "one.start < end and one.end > start for", "one.start < start and one.end > start for"),
    Mutant("an idle job stops before its limit", PREEMPTION, "at = max(since + limit, stops_at)", "at = max(since, stops_at)"),
    Mutant("a cordoned node is not named", SCHEDULER, "for node in nodes.values() if not node.schedulable]", "for node in nodes.values() if not node.alive]"),
)  # fmt: skip
