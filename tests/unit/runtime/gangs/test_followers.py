"""A rank is followed to its end, whatever fails on the way; an actor that does not answer is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from orchestrator.core import events as ev
from orchestrator.core.events import Exit
from orchestrator.core.facts.notes import StartedCold
from orchestrator.runtime.gangs.ending import Ender
from orchestrator.runtime.gangs.rank_rpc import GangCalls, Timeouts
from orchestrator.runtime.gangs.relay import LATE_ANSWERS, EventRelay, facts_of
from orchestrator.runtime.gangs.table import Gang, GangTable
from orchestrator.runtime.nodes.control_plane import end_worker
from orchestrator.runtime.ranks.rank_events import AS_ASKED, PollCursor, PollReply, RankEvent, RankGreeting
from orchestrator.spec.paths import Paths
from orchestrator.train.script.progress_reading import ProgressSnapshot
from tests.unit.core.builders import make_spec, pending, running

JOB = running(pending(make_spec(workers=1)))
SHORT = Timeouts(order_seconds=0.05, poll_seconds=0.0, retry_seconds=0.0)
STORY = (
    RankEvent(number=1, kind="started", at=1.0, pid=7),
    RankEvent(number=2, kind="exited", at=2.0, exit=Exit(rank=0, at=2.0, exit_code=0, signal=None)),
    RankEvent(number=3, kind="gone", at=3.0),
)


@pytest.mark.parametrize(
    ("cold", "attempt", "rank", "told"),
    [
        ("environment variable PYTHONHOME", 1, 0, ["environment variable PYTHONHOME"]),
        ("environment variable PYTHONHOME", 2, 0, []),
        ("environment variable PYTHONHOME", 1, 1, []),
        (AS_ASKED, 1, 0, ["environment variable MKL_CBWR"]),
        (None, 1, 0, []),
    ],
)
def test_a_start_in_a_fresh_interpreter_is_told_once_with_its_reason(
    cold: str | None, attempt: int, rank: int, told: list[str]
) -> None:
    job, gang = running(pending(make_spec(workers=2, env={"MKL_CBWR": "AVX2"}))), Gang(number=1, actors=[])
    facts = facts_of(job, gang, attempt, rank, [RankEvent(number=1, kind="started", at=1.0, pid=7, cold=cold)], 2.0)
    notes = [fact.note for fact in facts if isinstance(fact, ev.JobNoted)]
    assert [note.said for note in notes if isinstance(note, StartedCold)] == told


def test_a_job_that_asks_for_a_fresh_interpreter_is_not_told_of_it() -> None:
    gang, started = Gang(number=1, actors=[]), RankEvent(number=1, kind="started", at=1.0, pid=7, cold=AS_ASKED)
    assert [type(fact) for fact in facts_of(JOB, gang, 1, 0, [started], 2.0)] == [ev.AttemptRunning]


class Remote:
    """A method of an actor: ``answers`` are awaited one after the other, the last one repeatedly."""

    def __init__(self, *answers: Callable[..., Awaitable[Any]]) -> None:
        self.answers, self.calls = list(answers), 0

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = self.answers[min(self.calls, len(self.answers) - 1)]
        self.calls += 1
        return await answer(*args, **kwargs)


async def never(*_args: Any, **_kwargs: Any) -> None:
    await asyncio.Event().wait()


def says(value: Any) -> Callable[..., Awaitable[Any]]:
    async def answer(*_args: Any, **_kwargs: Any) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    return answer


class Scene:
    """A gang of one rank with an actor that gives set answers, the posted events, and the actors that were ended."""

    def __init__(self, tmp_path: Path, poll: Remote, *, timeouts: Timeouts = SHORT, **options: Any) -> None:
        self.posted: list[ev.Event] = []
        self.ended: list[Any] = []
        nodes: Any = SimpleNamespace(silent={})
        ray: Any = SimpleNamespace(call=self._call)
        files: Any = SimpleNamespace(follow=lambda _job: None, bring_ends=says(OSError("no such node")))
        options = {"progress": lambda *_: None, "gpu_evidence": says(()), "check_head": says(None), **options}
        common: Any = {"post": self.posted.extend, "log": structlog.get_logger(), "timeouts": timeouts}
        self.table = GangTable(ray, ray.call)
        self.calls = GangCalls(ray, nodes, self.table, **common)
        paths = Paths(home=tmp_path, socket=tmp_path / "socket")
        self.relay = EventRelay(self.calls, files, paths, reports=dict, **options, **common)
        self.ender = Ender(
            self.table, self.calls, self.relay, nodes, files, until_connected=never, post=self.posted.extend
        )
        self.actor = SimpleNamespace(poll=poll, kill=Remote(never), stop=Remote(never))
        greeting = RankGreeting(node_id="a", pid=4711, address="::1", gpu_ids=(), launched=1, port=None, highest_step=0)
        self.gang = Gang(number=JOB.gang, actors=[self.actor], greetings=[greeting])
        self.table._gangs[JOB.id] = self.gang

    async def _call(self, function: Any, actor: Any, *, restart: bool) -> None:
        assert function is end_worker
        assert not restart
        self.ended.append(actor)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.posted]

    async def follow(self) -> None:
        self.relay.watch(JOB, self.gang, 1)
        async with asyncio.timeout(300):
            await asyncio.gather(*self.gang.watchers)


def no_progress(*_: Any) -> None:
    raise ValueError("saved_at is a list")


@pytest.mark.parametrize(
    "options", [{"progress": no_progress}, {"gpu_evidence": says(RuntimeError("no driver"))}], ids=["progress", "gpus"]
)
def test_the_end_of_a_rank_is_told_whatever_cannot_be_taken_of_it(tmp_path: Path, options: dict[str, Any]) -> None:
    reply = PollReply(
        cursor=PollCursor(event=3, progress=1), events=(*STORY[:1], STORY[1], STORY[2]), progress=ProgressSnapshot()
    )
    scene = Scene(tmp_path, Remote(says(reply)), **options)
    asyncio.run(scene.follow())
    told = [kind for kind in scene.kinds() if kind != "job_noted"]  # notes report values that could not be taken
    assert told == ["attempt_running", "rank_exited", "attempt_gone"]


def test_a_reply_that_could_not_be_taken_is_not_taken_again(tmp_path: Path) -> None:
    cursors: list[PollCursor] = []
    replies = iter(
        [
            PollReply(cursor=PollCursor(progress=1), progress=ProgressSnapshot()),
            PollReply(cursor=PollCursor(event=3, progress=1), events=STORY),
        ]
    )

    async def poll(_attempt: int, cursor: PollCursor, _seconds: float) -> PollReply:
        cursors.append(cursor)
        return next(replies)

    scene = Scene(tmp_path, Remote(poll), progress=no_progress)
    asyncio.run(scene.follow())
    assert cursors == [PollCursor(), PollCursor(progress=1)]
    assert scene.kinds()[-1] == "attempt_gone"


@pytest.mark.parametrize(("why", "node_lost"), [("its node has died", True), ("its process has died", False)])
def test_a_lost_actor_is_told_though_the_ends_cannot_be_fetched(tmp_path: Path, why: str, node_lost: bool) -> None:
    from ray.core.generated.common_pb2 import ActorDiedErrorContext
    from ray.exceptions import ActorDiedError

    asked: list[bool] = []

    async def check_head(*, node_lost: bool = False) -> None:
        asked.append(node_lost)

    died = ActorDiedError(ActorDiedErrorContext(error_message=why, actor_id=bytes(16)))
    scene = Scene(tmp_path, Remote(says(died)), check_head=check_head)
    asyncio.run(scene.follow())
    assert scene.kinds() == ["gang_lost"]
    assert asked == [node_lost], "an embedded head may have gone with its node"


def test_an_actor_that_answers_no_poll_is_ended(tmp_path: Path) -> None:
    from ray.exceptions import ActorDiedError

    scene = Scene(tmp_path, Remote(*[never] * LATE_ANSWERS, says(ActorDiedError())))
    asyncio.run(scene.follow())
    assert scene.ended == [scene.actor]
    assert scene.kinds()[-1] == "gang_lost"


def test_an_actor_that_takes_no_order_is_ended(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Remote(never), timeouts=Timeouts(order_seconds=0.05))

    async def kill() -> None:
        with pytest.raises(TimeoutError):
            await scene.ender.kill(JOB)
        for task in scene.gang.watchers:
            task.cancel()

    asyncio.run(kill())
    assert scene.ended == [scene.actor]
