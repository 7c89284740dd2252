"""Past usage in decisions, and jobs that are refused because of their queue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orchestrator.api.errors import RefusedError
from orchestrator.core import events as ev
from orchestrator.core.facts.findings import GpusUnused
from orchestrator.core.scheduler.shares import Account, Sharing
from orchestrator.core.states import JobState
from orchestrator.daemon.sharing import SharingState, check_queue, sharing_of
from orchestrator.spec.model import AutoWorkers, ElasticWorkers, WorkerAdvice
from orchestrator.spec.queues import parse_queues
from orchestrator.spec.settings import Settings
from tests.support.records import replace
from tests.support.stores import new_store
from tests.unit.core.builders import (
    T0,
    chain,
    exited,
    finished,
    gone,
    make_spec,
    released,
    running,
    started,
    submission,
    up,
)


def test_the_terms_are_those_of_the_settings() -> None:
    settings = Settings.from_environ(
        {
            "HOME": "/h",
            "ORCH_QUEUES": "lab",
            "ORCH_AGEING": "2h",
            "ORCH_USER_MAX_GPUS": "4",
            "ORCH_RECLAIM_IDLE": "30m",
        }
    )
    sharing = sharing_of(settings)
    assert (sharing.queues, sharing.ageing, sharing.user_gpus) == (parse_queues("lab"), 7200.0, 4)
    assert sharing.reclaim_idle == 1800.0


def test_since_when_the_gpus_of_a_job_are_idle_is_known_also_to_the_next_daemon() -> None:
    idle = GpusUnused(gpus=2)
    job = running()
    opened = ev.FindingOpened(job_id=job.id, at=T0 + 100, attempt=1, finding=idle)
    closed = ev.FindingClosed(job_id=job.id, at=T0 + 200, attempt=1, finding=idle)
    later = replace(opened, at=T0 + 300)
    found = chain(job, opened, closed, later)
    book = SharingState()
    told = []
    for change in found:
        book.observe(change.after, change.event)
        told.append(dict(book.idle))
    assert told == [{job.id: T0 + 100}, {}, {job.id: T0 + 300}]
    again = SharingState()
    for change in found:  # the current record accompanies each of the events
        again.observe_idle(found[-1].after, change.event)
    assert again.idle == {job.id: T0 + 300}
    last = found[-1].after
    ended = chain(last, exited(last, rank=0, exit_code=1, at=T0 + 400), gone(last, at=T0 + 401))
    for change in ended:
        book.observe(change.after, change.event)
    assert book.idle == {}


def test_what_ended_jobs_used_counts_after_a_restart() -> None:
    async def run() -> None:
        store = new_store()
        job, _ = await store.submit(submission(make_spec(workers=2)))
        first = chain(job, started(job, at=T0 + 10))
        on = chain(first[-1].after, up(first[-1].after, at=T0 + 20))
        end = on[-1].after
        ends = chain(end, *(exited(end, rank=rank, exit_code=0, at=T0 + 100) for rank in range(2)))
        end = ends[-1].after
        last = chain(end, ev.AttemptSucceeded(job_id=job.id, at=T0 + 110, attempt=1))
        await store.append([*first, *on, *ends, *last])
        rest = chain(last[-1].after, released(last[-1].after, at=T0 + 110))
        rest += chain(rest[-1].after, finished(job, JobState.SUCCEEDED, at=T0 + 111))
        await store.append(rest)
        book = SharingState(Sharing(half_life=1e12))
        await book.load(store, [], T0 + 200)
        assert book.past.used[Account("default", "ada")].amounts.gpus == pytest.approx(200, rel=0.1)
        assert book.past is book.past, "made once for many decisions"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("keys", "terms", "told"),
    [
        ({"queue": "gone"}, {}, "there is no queue 'gone'; the queues are default, research, vision"),
        ({"queue": "lab"}, {}, "has queues below it: name one of vision"),
        ({"queue": "research", "workers": 3}, {}, "needs 3 GPUs, and queue research never holds more than 2"),
        ({"queue": "vision", "workers": 5}, {}, "queue lab never holds more than 4"),
        ({"workers": 5}, {"user_gpus": 4}, "the limit of a user is 4"),
    ],
)
def test_a_job_that_its_queue_never_takes_is_refused(keys: dict[str, Any], terms: dict[str, Any], told: str) -> None:
    sharing = Sharing(queues=parse_queues("lab maximum=4; vision parent=lab; research maximum=2"), **terms)
    with pytest.raises(RefusedError, match=told):
        check_queue(make_spec(**keys), sharing)


def test_a_job_that_can_keep_its_quota_is_taken() -> None:
    sharing = Sharing(queues=parse_queues("research maximum=2"), user_gpus=2)
    check_queue(make_spec(queue="research", workers=ElasticWorkers(min=2, max=8)), sharing)
    check_queue(make_spec(queue="research", workers="auto"), sharing)
    advised = AutoWorkers(advice=WorkerAdvice(ranks=2))
    check_queue(make_spec(queue="research", workers="auto", auto=advised), sharing)
    check_queue(make_spec(queue="research", workers=8, gpu=0), sharing)
    check_queue(make_spec(queue="default"), sharing)
    check_queue(make_spec(queue="anything"), Sharing())
