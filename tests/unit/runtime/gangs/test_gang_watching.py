"""A rank's events are reported to its end, whatever its rank actor replies on the way."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog

from orchestrator.checkpoint.repository.persister import PersisterStatus
from orchestrator.core import events as ev
from orchestrator.core.conformance import unchecked
from orchestrator.core.diagnosis.observation import StorageSeen, TerminalSeen
from orchestrator.core.events import Exit
from orchestrator.runtime.gangs.rank_rpc import Timeouts
from orchestrator.runtime.gangs.relay import EventRelay
from orchestrator.runtime.gangs.table import Gang
from orchestrator.runtime.ranks.rank_events import PollCursor, PollReply, RankEvent
from orchestrator.runtime.spawn.client import Ending, ErrorRaised, Exited, ExitRecord, Gone, Started
from orchestrator.spec.paths import Paths
from orchestrator.train.script.progress import CheckpointFacts, ProgressSnapshot
from tests.unit.core.builders import make_spec, pending, running

NOW = 1000.0
STARTED = RankEvent(number=1, kind="started", at=1.0, pid=7)
EXITED = RankEvent(number=2, kind="exited", at=2.0, exit=Exit(rank=0, at=2.0, exit_code=0, signal=None))
GONE = RankEvent(number=3, kind="gone", at=3.0)


class Actor:
    """A rank actor that returns these replies, one per call, and waits after the last one."""

    def __init__(self, *replies: PollReply) -> None:
        self._replies = list(replies)
        self.cursors: list[PollCursor] = []
        self.poll = SimpleNamespace(remote=self._poll)

    async def _poll(self, _attempt: int, cursor: PollCursor, _seconds: float) -> PollReply:
        self.cursors.append(cursor)
        if not self._replies:
            await asyncio.sleep(3600)
        return self._replies.pop(0)


class Watched:
    """A gang with one rank, and the events that its relay posted."""

    def __init__(self, *replies: PollReply, same_clock: bool = False) -> None:
        self.events: list[ev.Event] = []
        self.progress: list[ProgressSnapshot] = []
        self.failing = 0
        self.head_ends = False
        self.checked: list[int] = []
        self.actor = Actor(*replies)
        self.job = running(pending(make_spec(workers=1)))
        unused = cast("Any", None)
        self.relay = EventRelay(
            unused,
            unused,
            Paths(home=Path("/none"), socket=Path("/none/s")),
            reports=unused,
            gpu_evidence=unused,
            check_head=self._check_head,
            post=self._post,
            progress=lambda *taken: self.progress.append(taken[-1]),
            log=structlog.get_logger(),
            same_clock=same_clock,
            timeouts=Timeouts(retry_seconds=0.0),
            now=lambda: NOW,
        )

    async def _check_head(self) -> None:
        self.checked.append(len(self.events))
        if self.head_ends:
            raise asyncio.CancelledError  # as every watcher is when the head is lost

    def _post(self, events: Any) -> None:
        if self.failing and any(event.kind == "rank_exited" for event in events):
            self.failing -= 1
            raise ZeroDivisionError
        self.events += events

    def run(self) -> list[str]:
        """Follow the rank to its end; return the kinds of the posted events."""
        self.gang = Gang(number=1, actors=[self.actor])

        async def follow() -> None:
            async with asyncio.timeout(300):
                await self.relay.follow(self.job, self.gang, self.job.attempt_number, 0)

        asyncio.run(follow())
        return [event.kind for event in self.events]


def reply(number: int, *events: RankEvent, **more: Any) -> PollReply:
    return PollReply(cursor=PollCursor(event=number), events=events, **more)


def test_the_end_of_a_rank_is_reported_once_the_head_is_known_to_stand() -> None:
    """The cause of the rank's end may end the head as well: the next attempt must not be started there."""
    watched = Watched(reply(1, STARTED), reply(3, EXITED, GONE))
    assert watched.run() == ["attempt_running", "rank_exited", "attempt_gone"]
    assert watched.checked == [1]
    watched = Watched(reply(1, STARTED), reply(3, EXITED, GONE))
    watched.head_ends = True
    with pytest.raises(asyncio.CancelledError):
        watched.run()
    assert [event.kind for event in watched.events] == ["attempt_running"]


def test_times_of_a_host_whose_clock_is_behind_are_the_daemons() -> None:
    saved = PersisterStatus(step=4, attempt=1, path="/c/step-000000000004-a1", at=2.0)
    page = ProgressSnapshot(step=4, last_step_at=2.0, checkpoint=CheckpointFacts(saved_step=4, saved_at=2.0))
    storage, terminal = StorageSeen(rank=0, failing_since=2.0), TerminalSeen(rank=0, stopped_at=2.0)
    told = reply(
        3, STARTED, EXITED, GONE, sent_at=NOW - 600, progress=page, persisted=saved, storage=storage, terminal=terminal
    )
    watched = Watched(told)
    assert watched.run() == ["checkpoint_saved", "attempt_running", "rank_exited", "attempt_gone"]
    assert [event.at for event in watched.events[:3]] == [602.0, NOW, NOW], (
        "what the daemon decides by, it has by its own clock"
    )
    assert [event.exit.at for event in watched.events if isinstance(event, ev.RankExited)] == [602.0]
    assert watched.progress[0].last_step_at == 602.0
    assert watched.progress[0].checkpoint.saved_at == 602.0
    assert (watched.gang.storage[0].failing_since, watched.gang.terminals[0].stopped_at) == (602.0, 602.0)


def test_a_late_reply_of_the_daemons_own_machine_moves_no_time() -> None:
    watched = Watched(reply(3, STARTED, EXITED, GONE, sent_at=NOW - 30), same_clock=True)
    watched.run()
    assert [event.exit.at for event in watched.events if isinstance(event, ev.RankExited)] == [2.0]


def test_progress_of_an_older_host_is_checked() -> None:
    """It does not mark unusable values, and its reports lack the fields that were added since."""
    facts = CheckpointFacts(saved_at=cast("Any", [1]), saved_step=3)
    old = object.__new__(ProgressSnapshot)
    for field in dataclasses.fields(ProgressSnapshot):
        if field.name not in ("unusable", "stop_seen"):
            object.__setattr__(old, field.name, getattr(ProgressSnapshot(step=4, checkpoint=facts), field.name))
    watched = Watched(reply(1, STARTED, progress=old), reply(3, EXITED, GONE))
    assert watched.run() == ["attempt_running", "rank_exited", "attempt_gone"]
    (taken,) = watched.progress
    assert (taken.step, taken.checkpoint, taken.stop_seen) == (4, CheckpointFacts(), False)
    assert "checkpoint" in taken.unusable


def test_progress_that_cannot_be_taken_does_not_hide_the_end() -> None:
    watched = Watched(
        reply(1, STARTED, progress=cast("Any", "no snapshot")),
        reply(1, progress=cast("Any", "no snapshot")),
        reply(3, EXITED, GONE, persisted=cast("Any", 5)),
    )
    told = watched.run()
    assert [kind for kind in told if kind != "job_noted"] == ["attempt_running", "rank_exited", "attempt_gone"]
    assert told.count("job_noted") == 2, "each once"


def test_a_watcher_that_fails_begins_anew() -> None:
    watched = Watched(reply(1, STARTED), reply(3, EXITED, GONE), reply(3, STARTED, EXITED, GONE))
    watched.failing = 1
    told = watched.run()
    assert told.count("rank_exited") == 1
    assert told[-1] == "attempt_gone"
    assert watched.actor.cursors[-1] == PollCursor()


CHECKED = (RankEvent, ProgressSnapshot, CheckpointFacts, PersisterStatus)


@pytest.mark.parametrize("record", [*CHECKED, ExitRecord, Started, ErrorRaised, Exited, Gone, Ending])
def test_every_field_of_a_record_that_is_checked_has_a_type_that_is_known(record: type[Any]) -> None:
    """A type that its module imports for annotations alone cannot be looked up, and would leave the field unchecked."""
    assert unchecked(record) == ()


def test_what_a_rank_meets_on_storage_is_checked_and_kept_by_rank() -> None:
    met = StorageSeen(rank=9, failures=3, said="no space", seconds=cast("Any", "long"))
    watched = Watched(reply(1, STARTED, storage=met), reply(3, EXITED, GONE))
    watched.run()
    assert watched.gang.storage == {0: StorageSeen(rank=0, failures=3, said="no space")}


def test_the_next_poll_has_the_cursor_of_the_reply() -> None:
    cursor = PollCursor(event=1, progress=2, persisted=3, processes=4, terminal=5)
    watched = Watched(PollReply(cursor=cursor, events=(STARTED,)), reply(3, EXITED, GONE))
    watched.run()
    assert watched.actor.cursors == [PollCursor(), cursor]
