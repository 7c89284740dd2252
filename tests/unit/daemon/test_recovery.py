"""A restarted daemon reads the history of its jobs that have run, and one unreadable history affects no other."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from orchestrator.core.lifecycle.fold import Change, fold
from orchestrator.daemon.daemon import Recovery
from orchestrator.daemon.nodes.quarantine import NodeQuarantine
from orchestrator.store.records import StoredPlace
from tests.support.stores import new_store
from tests.unit.core.builders import make_spec, started, submission
from tests.unit.daemon.parts import LOG, Rounds


class Noted:
    def __init__(self) -> None:
        self.did: list[str] = []

    async def resume(self) -> None:
        self.did.append("resume")


def test_history_is_told_of_every_live_job_that_has_had_an_attempt() -> None:
    async def run() -> None:
        store, quarantine, noted, told = new_store(), NodeQuarantine(), Noted(), list[Any]()
        for job_id in ("one-aaaaaa", "two-bbbbbb", "waits-cccccc"):
            job, _ = await store.submit(submission(make_spec(), job_id=job_id))
            if job_id != "waits-cccccc":
                event = started(job)
                await store.append([Change(job, event, fold(job, event))])
        body = {"node": "a", "host": "a", "cordoned_by": "ada", "forgiven_at": 0.0, "avoided": None, "strikes": []}
        await store.put_places([StoredPlace(kind="node", name="a", body=body)])

        def observe(job: Any, event: Any) -> None:
            if job.id == "one-aaaaaa":
                raise ValueError("a history of another kind")
            told.append((job.id, event.kind))

        rounds = Rounds(store)
        recovery = Recovery(
            rounds.loop,
            store,
            intake=noted,  # type: ignore[arg-type]
            quarantine=quarantine,
            history=(observe,),
            log=LOG,
        )
        await recovery.run()
        assert noted.did == ["resume"]
        assert set(rounds.loop.jobs) == {"one-aaaaaa", "two-bbbbbb", "waits-cccccc"}
        assert told == [("two-bbbbbb", "job_submitted"), ("two-bbbbbb", "attempt_started")]
        assert gc.isenabled()
        assert quarantine.cordoned == {"a"}

    asyncio.run(run())
