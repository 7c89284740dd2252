"""A rank's events are reported to its end, whatever its rank actor replies on the way."""

from __future__ import annotations

import asyncio
import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import structlog

from orchestrator.checkpoint.repository.persister import PersisterStatus
from orchestrator.core import events as ev
from orchestrator.core.codec import to_plain
from orchestrator.core.diagnosis.observation import StorageSeen, TerminalSeen
from orchestrator.core.events import Exit
from orchestrator.runtime import remote
from orchestrator.runtime.gangs.rank_rpc import Timeouts
from orchestrator.runtime.gangs.relay import EventRelay
from orchestrator.runtime.gangs.table import Gang
from orchestrator.runtime.ranks.rank_actor import FAILURES, RankActor
from orchestrator.runtime.ranks.rank_events import PollCursor, PollReply, RankEvent
from orchestrator.spec.paths import Paths
from orchestrator.train.script.progress_reading import CheckpointFacts, ProgressSnapshot
from tests.unit.core.builders import make_spec, pending, running

NOW = 1000.0
STARTED = RankEvent(number=1, kind="started", at=1.0, pid=7)
EXITED = RankEvent(number=2, kind="exited", at=2.0, exit=Exit(rank=0, at=2.0, exit_code=0, signal=None))
GONE = RankEvent(number=3, kind="gone", at=3.0)


class Actor:
    """A rank actor that returns these replies, one per call, and waits after the last one. Bytes are a reply as they are."""

    def __init__(self, *replies: PollReply | bytes) -> None:
        self._replies = list(replies)
        self.cursors: list[PollCursor] = []
        self.answer = SimpleNamespace(remote=self._answer)

    async def _answer(self, method: str, message: bytes) -> bytes:
        assert method == "poll"
        self.cursors.append(msgspec.convert(msgspec.msgpack.decode(message)["cursor"], PollCursor))
        if not self._replies:
            await asyncio.sleep(3600)
        reply = self._replies.pop(0)
        return reply if isinstance(reply, bytes) else msgspec.msgpack.encode({"value": to_plain(reply)})


class Watched:
    """A gang with one rank, and the events that its relay posted."""

    def __init__(self, *replies: PollReply | bytes, same_clock: bool = False) -> None:
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

    async def _check_head(self, *, node_lost: bool = False) -> None:  # as the cluster has it
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
        self.gang = Gang(number=1, actors=[remote.stub(RankActor, self.actor, failures=FAILURES)])

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


def changed(reply: PollReply, **values: Any) -> bytes:
    """Return the message of a reply with other values."""
    return msgspec.msgpack.encode({"value": to_plain(reply) | values})


def test_values_of_progress_that_do_not_fit_are_left_out_and_named() -> None:
    progress = {"step": 4, "epoch": math.inf, "checkpoint": {"saved_at": [1], "saved_step": 3}, "of_a_newer_version": 1}
    watched = Watched(changed(reply(1, STARTED), progress=progress), reply(3, EXITED, GONE))
    assert watched.run() == ["attempt_running", "rank_exited", "attempt_gone"]
    (taken,) = watched.progress
    assert (taken.step, taken.checkpoint) == (4, CheckpointFacts(saved_step=3))
    assert taken.unusable == ("epoch", "checkpoint.saved_at")


def test_parts_that_do_not_fit_do_not_hide_the_end() -> None:
    odd_end = to_plain(EXITED) | {"exit": {"rank": 0, "at": 2.0, "exit_code": "1", "signal": 9, "error_type": "E"}}
    watched = Watched(
        changed(reply(1, STARTED), progress="no snapshot"),
        changed(reply(1), progress="no snapshot"),
        changed(
            reply(3), events=[odd_end, to_plain(GONE), {"number": 4, "kind": "revived", "at": 4.0}, 5], persisted=5
        ),
    )
    told = watched.run()
    assert [kind for kind in told if kind != "job_noted"] == ["attempt_running", "rank_exited", "attempt_gone"]
    notes = [event.note.part for event in watched.events if isinstance(event, ev.JobNoted)]  # type: ignore[attr-defined]
    assert notes == ["progress", "events.exit.exit_code", "events.?", "persisted"], "each once"
    (end,) = [event.exit for event in watched.events if isinstance(event, ev.RankExited)]
    assert (end.exit_code, end.signal, end.error_type) == (None, 9, "E")


@pytest.mark.parametrize(
    "message",
    [b"", b"\x80", b"\xc1", pickle.dumps({"value": {}}), b'{"value": {"cursor": 5}}', b"\x91" * 5000],
    ids=["empty", "neither", "no_msgpack", "pickle", "no_cursor", "deep"],
)
def test_an_actor_that_answers_with_something_else_loses_its_gang(message: bytes) -> None:
    watched = Watched(reply(1, STARTED), message)
    assert watched.run() == ["attempt_running", "gang_lost"]


def test_a_watcher_that_fails_begins_anew() -> None:
    watched = Watched(reply(1, STARTED), reply(3, EXITED, GONE), reply(3, STARTED, EXITED, GONE))
    watched.failing = 1
    told = watched.run()
    assert told.count("rank_exited") == 1
    assert told[-1] == "attempt_gone"
    assert watched.actor.cursors[-1] == PollCursor()


def test_what_a_rank_meets_on_storage_is_kept_by_rank() -> None:
    met = StorageSeen(rank=9, failures=3, said="no space")
    watched = Watched(reply(1, STARTED, storage=met), reply(3, EXITED, GONE))
    watched.run()
    assert watched.gang.storage == {0: StorageSeen(rank=0, failures=3, said="no space")}
