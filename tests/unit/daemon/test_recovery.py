"""A restarted daemon hears the history of its live jobs, and one unreadable history harms no other."""

from __future__ import annotations

import asyncio
from typing import Any

from orchestrator.daemon.nodes.quarantine import NodeQuarantine
from orchestrator.daemon.recovery import Recovery
from orchestrator.store.memory import MemoryStore
from orchestrator.store.port import StoredPlace
from tests.unit.core.builders import make_spec, submission
from tests.unit.daemon.parts import LOG, Rounds


class Noted:
    def __init__(self) -> None:
        self.did: list[str] = []

    async def at_start(self) -> None:
        self.did.append("tidy")

    async def resume(self) -> None:
        self.did.append("resume")


def test_history_is_told_of_every_live_job() -> None:
    async def run() -> None:
        store, quarantine, noted, told = MemoryStore(), NodeQuarantine(), Noted(), list[Any]()
        for job_id in ("one-aaaaaa", "two-bbbbbb"):
            await store.submit(submission(make_spec(), job_id=job_id))
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
            tidying=noted,  # type: ignore[arg-type]
            intake=noted,  # type: ignore[arg-type]
            quarantine=quarantine,
            history=(observe,),
            log=LOG,
        )
        await recovery.run()
        assert noted.did == ["tidy", "resume"]
        assert set(rounds.loop.jobs) == {"one-aaaaaa", "two-bbbbbb"}
        assert told == [("two-bbbbbb", "job_submitted")]
        assert quarantine.cordoned == {"a"}

    asyncio.run(run())
