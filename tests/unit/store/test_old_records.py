"""Stores that earlier versions wrote open, and their jobs continue.

``old_store.sql`` has schema 4, where records list every attempt. ``released_store.sql`` is of version 0.1.0: a job in each state,
and one with every key of job.yaml and every part of a record.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core.events import JobSubmitted, LeftOut, MemoryUse
from orchestrator.core.facts.fact import Legacy
from orchestrator.core.job.past_attempts import KEPT_ATTEMPTS
from orchestrator.core.states import JobState, OutOf, StopScope
from orchestrator.daemon.jobs.event_views import event_view
from orchestrator.daemon.jobs.views import job_view
from orchestrator.daemon.nodes.quarantine import NodeQuarantine
from orchestrator.spec.model import Backoff, ElasticWorkers, LogPolicy, MaxRestarts, NotifySpec
from tests.unit.core.builders import T0, failed, gone, node, started
from tests.unit.store.lives import write

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.core.job.record import Job
    from orchestrator.store.sqlite import SqliteStore

    Run = Callable[..., Any]

DUMP = Path(__file__).with_name("old_store.sql")
RELEASED = Path(__file__).with_name("released_store.sql")


@pytest.fixture
def old_store(path: Path, open_store: Callable[..., SqliteStore]) -> SqliteStore:
    """Open the old store with this version: a job in its 26th attempt, one in its second, one that ended in its 15th."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(DUMP.read_text())
    path.chmod(0o600)
    return open_store()


def job(store: SqliteStore, run: Run, name: str) -> Job:
    """Return the job of a name."""
    found: Job = run(store.find(name)).job
    return found


def test_its_jobs_are_read_and_its_record_verifies(old_store: SqliteStore, run: Run) -> None:
    assert run(old_store.verify()) == []
    live, short, ended = (job(old_store, run, name) for name in ("live", "short", "ended"))
    assert (live.attempt_number, len(live.attempts), live.past.attempts) == (26, KEPT_ATTEMPTS, 16)
    assert (short.attempt_number, len(short.attempts), short.past.attempts) == (2, 2, 0)
    assert (ended.attempt_number, len(ended.attempts), ended.past.attempts) == (15, KEPT_ATTEMPTS, 5)
    assert [found.id for found in run(old_store.load_live())] == [live.id, short.id]


def test_what_it_says_of_all_attempts_is_what_the_earlier_version_said(old_store: SqliteStore, run: Run) -> None:
    live = job(old_store, run, "live")
    view = job_view(live, None, None, "/logs")
    assert view.started_at == T0 + 102
    assert view.timings.queued_seconds == 100.0
    assert view.timings.submit_to_first_step_seconds == 103.25
    assert view.timings.steps_lost == sum(number % 3 for number in range(1, 27) if number != 2)
    # The second attempt failed at 204 s without a step; its successor's first new step was at 303.25 s.
    assert view.timings.recoveries == 24
    assert view.timings.recovery_seconds_total == pytest.approx(23 * 83.25 + 99.25)
    assert (live.size.least, live.size.most) == (1, 1)
    assert view.restarts == 25


def test_its_jobs_go_on(old_store: SqliteStore, open_store: Callable[..., SqliteStore], run: Run) -> None:
    live = job(old_store, run, "live")
    (live,) = run(write(old_store, [failed(live, at=T0 + 2700, failed_at=T0 + 2700), gone(live, at=T0 + 2701)]))
    (live,) = run(write(old_store, [started(live, at=T0 + 2702, gang=live.gang, nodes=live.nodes)]))
    assert (live.attempt_number, len(live.attempts), live.past.attempts) == (27, KEPT_ATTEMPTS, 17)
    assert run(old_store.verify()) == []
    old_store.close()
    assert job(open_store(), run, "live") == live


def test_what_ended_before_there_was_an_account_of_tidying_is_tidied(old_store: SqliteStore, run: Run) -> None:
    assert run(old_store.untidied()) == [job(old_store, run, "ended").id]


@pytest.fixture
def released_store(path: Path, open_store: Callable[..., SqliteStore]) -> SqliteStore:
    """Open the store of version 0.1.0 with this version."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(RELEASED.read_text())
    path.chmod(0o600)
    return open_store()


def test_a_job_of_every_state_is_read_and_its_record_verifies(released_store: SqliteStore, run: Run) -> None:
    assert run(released_store.verify()) == []
    for state in JobState:
        assert job(released_store, run, state.value.lower()).state is state
    assert all(found.unusable == () for found in run(released_store.load_live()))


def test_every_key_of_a_released_job_is_read(released_store: SqliteStore, run: Run) -> None:
    found = job(released_store, run, "everything")
    spec = found.spec
    assert spec.resources.num_workers == ElasticWorkers(min=1, max=4, grow_after=timedelta(seconds=90))
    assert (spec.resources.resources_per_worker.gpu, spec.resources.resources_per_worker.memory_bytes) == (0.5, 8 << 30)
    assert (spec.stop_duration, spec.max_duration) == (timedelta(seconds=90), timedelta(days=1))
    assert spec.retry.max_restarts == MaxRestarts(user=1, infra=3, hang=2, preemption=7)
    assert spec.retry.backoff == Backoff(initial=timedelta(milliseconds=500))
    assert spec.retry.log_policies == (LogPolicy(pattern="NCCL.*timeout", action="restart"),)
    assert (spec.checkpoint.interval, spec.checkpoint.watch) == (100, "ckpt/*")
    assert spec.notify == (NotifySpec(url="https://example.com/hook", on=("FAILED", "SUCCEEDED")),)
    assert (dict(spec.trainer), dict(spec.env), spec.secrets) == (
        {"batch_size": 64, "precision": "bf16", "timeout": "10m"},
        {"A": "1"},
        ("TOKEN",),
    )
    (ended,) = found.exits
    assert (ended.stop_scope, ended.memory) == (
        StopScope.RANK,
        MemoryUse(used_bytes=5, limit_bytes=6, killed=OutOf.LIMIT),
    )
    assert ended.error_message == "grüße \ud800"


def test_every_event_of_a_released_job_is_read_again(released_store: SqliteStore, run: Run) -> None:
    first, *others = [stored.event for stored in run(released_store.events(job(released_store, run, "everything").id))]
    assert isinstance(first, JobSubmitted)
    assert first.spec == job(released_store, run, "everything").spec
    assert first.left_out == LeftOut(files=3, size_bytes=100, by=(".gitignore",), largest=("data.bin",))
    assert len(others) == 8


def test_a_released_store_s_cordon_is_known(released_store: SqliteStore, run: Run) -> None:
    places = run(released_store.places())
    quarantine = NodeQuarantine(lambda: T0 + 1)
    quarantine.restore(places)
    assert quarantine.unsaved() == []
    marked = quarantine.mark({"a": node("a")})["a"]
    assert (marked.cordoned, marked.quarantined) == (True, Legacy(sentence="r"))


def test_its_sentences_are_shown_as_they_are_and_never_looked_into(released_store: SqliteStore, run: Run) -> None:
    ended = job(released_store, run, "failed")
    view = job_view(ended, None, None, "/logs")
    assert view.failure is not None
    assert view.fact is not None
    assert view.fact["kind"] == "legacy"
    assert view.reason == view.fact["sentence"]
    assert view.failure.fact is not None
    assert view.failure.fact["sentence"] == view.failure.sentence
    assert view.failure.fact["legacy_code"] == view.failure.code != ""
    told = [event_view(stored) for stored in run(released_store.events(ended.id))]
    (failed_event, *_) = [event for event in told if event.kind == "attempt_failed"]
    failure = failed_event.body["failure"]
    assert (failure["code"], failure["sentence"]) == (view.failure.code, view.failure.sentence)
    assert view.failure.sentence in failed_event.summary
