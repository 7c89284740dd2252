"""A store of the last version with flat fields: one job for each shape of its fields. It opens, and its jobs continue."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core import events as ev
from orchestrator.core.facts.codec import fact_from
from orchestrator.core.lifecycle.effects import desired_effect
from orchestrator.core.scheduler.scheduler import State, decide
from orchestrator.core.stored.job_record import job_to_dict
from orchestrator.daemon.jobs.views import job_view
from orchestrator.store.port import JobFilter
from orchestrator.store.sql.schema import connect
from tests.unit.core.builders import T0
from tests.unit.store.lives import write

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.core.job.record import Job
    from orchestrator.store.sqlite import SqliteStore

    Run = Callable[..., Any]

DUMP = Path(__file__).with_name("flat_records.sql")
# For each job: its phase, the effect that its record requires, and the first event that follows from it after a day.
EXPECTED = {
    "queued": ("Pending", None, None),
    "starting": ("Starting", "Ensure", "attempt_failed"),
    "placed": ("Starting", "Ensure", "attempt_failed"),
    "running": ("Running", "Ensure", None),
    "degraded": ("Running", "Ensure", None),
    "lost": ("Running", None, "attempt_failed"),
    "vanished": ("Running", None, "attempt_failed"),
    "complete": ("Finishing", "ReleaseGang", None),
    "complete-free": ("Finishing", None, "job_finished"),
    "again": ("Restarting", "KillRanks", None),
    "again-quiet": ("Restarting", None, "attempt_started"),
    "elsewhere": ("Replacing", "ReleaseGang", None),
    "elsewhere-free": ("Replacing", None, "job_requeued"),
    "over": ("GivingUp", "ReleaseGang", None),
    "requeued": ("Pending", None, None),
    "second": ("Running", "Ensure", None),
    "pausing": ("Draining", "StopRanks", None),
    "pausing-quiet": ("Draining", "ReleaseGang", None),
    "stopped-late": ("Draining", None, "attempt_succeeded"),
    "stopped-again": ("Draining", "StopRanks", None),
    "resizing": ("Draining", None, "job_requeued"),
    "paused": ("Suspended", None, None),
    "paused-early": ("Suspended", None, None),
    "resumed": ("Pending", None, None),
    "won": ("Succeeded", None, None),
    "broken": ("Failed", None, None),
    "timeout": ("Failed", None, None),
    "unfit": ("Failed", None, None),
    "cancelled": ("Cancelled", None, None),
    "noted": ("Cancelled", None, None),
    "scripted": ("Running", "Ensure", None),
}
# Values that a phase does not have are dropped when a record is read; nothing reads them.
DROPPED = {"exits", "keep_gang", "not_before", "pids", "retry", "succeeded"}
ADDED = {"prerequisites"}  # added since then; empty


@pytest.fixture
def flat_store(path: Path, open_store: Callable[..., SqliteStore]) -> SqliteStore:
    """Open the store with this version."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(DUMP.read_text())
    path.chmod(0o600)
    return open_store()


def jobs(store: SqliteStore, run: Run) -> dict[str, Job]:
    """Return every job by its name."""
    return {job.name: job for job in run(store.jobs(JobFilter()))}


def test_its_record_verifies(flat_store: SqliteStore, run: Run) -> None:
    assert run(flat_store.verify()) == []
    assert all(job.unusable == () for job in jobs(flat_store, run).values())


def test_each_job_is_read_as_its_phase_and_goes_on(flat_store: SqliteStore, run: Run) -> None:
    found = {}
    for name, job in jobs(flat_store, run).items():
        effect = desired_effect(job)
        events = decide(State(jobs={job.id: job}, nodes={}), T0 + 86_400).events if not job.state.is_terminal else []
        required = None if effect is None else type(effect).__name__
        found[name] = (type(job.phase).__name__, required, events[0].kind if events else None)
    assert found == EXPECTED


def as_before(value: Any) -> Any:
    """Return a value with sentences in place of facts, as the version that wrote the store had it."""
    if isinstance(value, list):
        return [as_before(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("kind") == "legacy":
        return value["sentence"]
    plain = {key: as_before(item) for key, item in value.items()}
    if "failure_class" in value and "cause" in value:
        cause = value["cause"]
        assert (plain.pop("refusal"), plain.pop("policy_note"), plain.pop("step")) == (None, None, None)
        plain |= {"sentence": plain.pop("cause"), "code": cause["legacy_code"], "advice": cause.get("advice", "")}
    return plain | {"policy_note": plain["policy_note"] or ""} if "policy_note" in plain else plain


def test_it_says_of_each_job_what_the_earlier_version_said(flat_store: SqliteStore, path: Path, run: Run) -> None:
    with closing(connect(path)) as connection:
        stored = {
            name: json.loads(record) for name, record in connection.execute("SELECT name, record FROM jobs").fetchall()
        }
    assert set(stored) == set(EXPECTED)
    for name, job in jobs(flat_store, run).items():
        now = json.loads(json.dumps(job_to_dict(job)))
        now = as_before(now)
        assert now.pop("findings") == [], "there was no diagnosis"
        assert (now["spec"].pop("hold"), now["spec"].pop("start_at")) == (False, None), "keys of later versions"
        assert now["spec"].pop("interactive") is None, "a key of later versions"
        assert now["past"].pop("ran_seconds") >= 0, "a key of later versions"
        resources = now["spec"]["resources"]
        assert now["spec"].pop("reclaim_idle") is None, "a key of later versions"
        assert resources.pop("node_labels") == {}, "a key of later versions"
        assert (resources.pop("auto"), resources.pop("nodes")) == (None, []), "keys of later versions"
        differing = {key for key in now.keys() | stored[name].keys() if now.get(key) != stored[name].get(key)}
        assert differing <= DROPPED | ADDED, name
        assert job_view(job, None, None, "/logs").state == stored[name]["state"]
    found = jobs(flat_store, run)
    running, won = found["running"], found["won"]
    assert (running.checkpoints.step, running.checkpoints.durable_step, running.checkpoints.path) == (
        20,
        10,
        "/ckpt/10",
    )
    assert found["requeued"].checkpoints.step == 3, "what was in memory went with the actors"
    assert (found["elsewhere-free"].not_before, found["elsewhere-free"].fenced_until) == (T0 + 90, T0 + 90)
    assert (won.failure, won.exit_code, won.ended_at) == (None, 0, T0 + 30)
    assert found["again"].failure is not None
    assert found["degraded"].degraded


def test_a_job_is_written_on_and_the_store_still_verifies(flat_store: SqliteStore, run: Run) -> None:
    for name, job in jobs(flat_store, run).items():
        noted = ev.JobNoted(job_id=job.id, at=T0 + 99, note=fact_from("read by another version"))
        follows = [] if job.state.is_terminal else decide(State(jobs={job.id: job}, nodes={}), T0 + 86_400).events[:1]
        (after,) = run(write(flat_store, [noted, *follows]))
        assert after.version == job.version + 1 + len(follows), name
    assert run(flat_store.verify()) == []
