"""A record stays small however often its job restarts, and its figures of all attempts stay correct."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from orchestrator.core import events as ev
from orchestrator.core.job.record import KEPT_ATTEMPTS, Job, Past, recovery_seconds
from orchestrator.core.stored import job_to_dict
from tests.unit.core.builders import (
    T0,
    after,
    checkpoint,
    exited,
    failed,
    failure,
    gone,
    make_spec,
    pending,
    seats,
    started,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

LINES = tuple(f"line {n} of what the script has printed before it died" for n in range(40))


def attempt(job: Job) -> Iterator[Job]:
    """Yield the records of one attempt that steps, saves and is killed."""
    number = job.attempt_number + 1
    at = T0 + 100.0 * number
    gang = job.gang if job.gang_open else job.gang + 1
    job = after(job, started(job, at=at, gang=gang))
    yield job
    for event in (
        ev.GangPlaced(job_id=job.id, at=at + 1, gang=gang, seats=seats(job, job.nodes)),
        ev.AttemptRunning(job_id=job.id, at=at + 2, attempt=number, pids=(1, 2)),
        ev.FirstStep(job_id=job.id, at=at + 3, attempt=number, step=number, step_at=at + 3, steps_lost=2),
        checkpoint(job, number, at=at + 4, path=f"/ckpt/{number}"),
        exited(job, 0, signal=9, at=at + 20, log_tail=LINES),
        failed(job, at=at + 21, failed_at=at + 20, failure=failure(rank=0, signal=9, log_tail=LINES)),
        gone(job, at=at + 22),
    ):
        job = after(job, event)
        yield job


def bytes_of(job: Job) -> int:
    """Return the number of bytes that a store writes for the record."""
    return len(json.dumps(job_to_dict(job), separators=(",", ":")))


def test_a_record_is_as_large_after_two_thousand_attempts_as_after_twenty() -> None:
    job, largest, written = pending(make_spec(workers="auto")), {}, {}
    for number in range(1, 2001):
        records = list(attempt(job))
        job = records[-1]
        if number in (20, 2000):
            sizes = [bytes_of(record) for record in records]
            largest[number], written[number] = max(sizes), sum(sizes)
    assert len(job.attempts) == KEPT_ATTEMPTS
    assert job.attempt_number == 2000
    # Numbers, times and counters grow by digits.
    assert largest[2000] < largest[20] + 200
    assert written[2000] < written[20] + 8 * 200
    assert largest[2000] < 20_000


def test_what_a_record_says_of_all_attempts_is_the_same_with_and_without_a_list_of_them() -> None:
    job, every = pending(make_spec(workers="auto")), {}
    for _ in range(3 * KEPT_ATTEMPTS):
        *_, job = attempt(job)
        every.update({a.number: a for a in job.attempts})
    whole = tuple(every[number] for number in sorted(every))
    assert len(whole) == 3 * KEPT_ATTEMPTS
    assert [a.number for a in job.attempts] == [a.number for a in whole[-KEPT_ATTEMPTS:]]
    assert job.past.attempts == len(whole) - KEPT_ATTEMPTS
    assert job.whole == Past().add_all(whole)
    assert job.whole.recoveries == len(whole) - 1
    assert job.whole.steps_lost == 2 * len(whole)
    assert job.started_at == whole[0].running_at
    assert job.whole.ordered_at == whole[0].started_at
    assert job.whole.first_step_at == whole[0].first_step_at
    assert recovery_seconds(whole[0], whole[1]) == 83.0
