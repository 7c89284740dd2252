"""A process's end is reported whatever fails before it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrator.core.events import Exit
from orchestrator.runtime.ranks.rank_events import EventLog
from orchestrator.runtime.ranks.rank_process import RankProcess
from orchestrator.runtime.spawn.client import Exited, Gone, Started

STARTED = Started(pid=2**22 + 1, at=1.0, cold=False)
EXITED = Exited(exit_code=3, signal=None, cause=None, record_error=None, at=2.0)


class Scene:
    """A process with a keeper that sends these messages; an exception among them is raised."""

    def __init__(self, *says: Any, exits_fail: bool = False) -> None:
        self.says, self.did, self.exits_fail = list(says), list[str](), exits_fail
        self.error: Any = None
        self.log = EventLog()
        self.output = SimpleNamespace(close=self._closed, end_lines=self._lines_ended)
        self.evidence = SimpleNamespace(started=lambda _pid: None, close=lambda: self.did.append("evidence closed"))

    async def next_event(self) -> Any:
        said = self.says.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    async def report(self, event: Exited) -> None:
        if self.exits_fail:
            raise OSError("the log cannot be read")
        self.log.add(
            kind="exited",
            at=event.at,
            exit=Exit(rank=0, at=event.at, exit_code=event.exit_code, signal=event.signal),
        )

    def kill(self) -> None:
        self.did.append("kill")

    def close(self) -> None:
        self.did.append("lifeline closed")

    async def _closed(self) -> None:
        self.did.append("output closed")

    def _lines_ended(self) -> None:
        assert not self.log.after(2), "the actor may be ended as soon as the end of the tree is reported"
        self.did.append("lines ended")

    async def _sessions_ended(self) -> None:
        assert "gone" not in [event.kind for event in self.log.after(0)]
        self.did.append("sessions ended")

    def run(self) -> list[tuple[str, int | None, int | None]]:
        async def follow() -> None:
            process = RankProcess(
                self,  # type: ignore[arg-type]
                2**22 + 2,
                Path("/nowhere/lock"),
                log=self.log,
                output=self.output,  # type: ignore[arg-type]
                evidence=self.evidence,  # type: ignore[arg-type]
                exits=self,  # type: ignore[arg-type]
                before_gone=self._sessions_ended,
            )
            async with asyncio.timeout(300):
                await process.end()

        asyncio.run(follow())
        ends = [(event.kind, event.exit) for event in self.log.after(0)]
        return [(kind, end and end.exit_code, end and end.signal) for kind, end in ends]


def test_the_story_of_a_process_is_told_in_order() -> None:
    scene = Scene(STARTED, EXITED, Gone(at=3.0))
    assert scene.run() == [("started", None, None), ("exited", 3, None), ("gone", None, None)]
    assert scene.did == ["kill", "sessions ended", "lines ended", "evidence closed", "output closed", "lifeline closed"]


def test_a_message_that_is_none_is_left_out() -> None:
    scene = Scene(STARTED, ValueError("not a message"), EXITED, Gone(at=3.0))
    assert [kind for kind, *_ in scene.run()] == ["started", "exited", "gone"]


def test_an_end_without_an_exit_is_a_kill() -> None:
    assert Scene(STARTED, Gone(at=3.0)).run()[1:] == [("exited", None, 9), ("gone", None, None)]
