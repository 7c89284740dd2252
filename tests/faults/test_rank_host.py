"""The supervisor of one rank under bad timing: requests that come early, late or twice, lost replies, callers that die."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from orchestrator.core.facts.faults import KernelMessage
from orchestrator.runtime.forkserver import wire
from orchestrator.runtime.ranks.launch_spec import RankPlan
from orchestrator.runtime.ranks.rank_actor import RankActor
from orchestrator.runtime.ranks.rank_events import PollCursor, PollReply, RankEvent
from orchestrator.runtime.ranks.rank_process import RankStarter
from orchestrator.runtime.spawn.client import ForkServerRefusedError
from orchestrator.runtime.spawn.rank_locks import rank_lock_path
from orchestrator.train.script.progress import ProgressPage
from tests.integration.forkserver_fixture import ENVIRONMENT, RunningServer, running_server
from tests.support.records import replace
from tests.support.stack import wait_until

SLEEPER = "import os, time; open('pid', 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


async def nobody_starts_one(_plan: RankPlan) -> None:
    await asyncio.sleep(0)


def make_host(tmp_path: Path, **changes: float) -> RankActor:
    return RankActor(
        job_id="job-aaaaaa",
        rank=0,
        node_dir=str(tmp_path / "node"),
        attempt=1,
        leased=False,
        start_fork_server=nobody_starts_one,
        **changes,
    )


def make_plan(server: RunningServer, tmp_path: Path, script: str = SLEEPER, attempt: int = 1) -> RankPlan:
    (tmp_path / "train.py").write_text(script)
    return RankPlan(
        job_id="job-aaaaaa",
        attempt=attempt,
        rank=0,
        mode="script",
        target="train.py",
        args=(),
        python_options=(),
        cwd=str(tmp_path),
        env=ENVIRONMENT,
        threads=1,
        cold=False,
        python=sys.executable,
        fork_socket=str(server.socket),
        log_dir=str(tmp_path / "logs"),
        exit_record=str(tmp_path / "exits" / f"attempt-{attempt}.json"),
        page=str(tmp_path / "page"),
        previous_step=0,
    )


async def story(host: RankActor, attempt: int) -> list[RankEvent]:
    """Return the attempt's events up to its last, ``gone``."""
    events: list[RankEvent] = []
    cursor = PollCursor()
    async with asyncio.timeout(300):
        while not events or events[-1].kind != "gone":
            reply = await host.poll(attempt, cursor, 5)
            cursor = reply.cursor
            events += reply.events
    return events


def run(make: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(300):
            await make()

    asyncio.run(within())


@pytest.mark.parametrize("order", ["stop", "kill"])
def test_an_attempt_that_is_ended_before_its_launch_is_gone_and_never_starts(
    server: RunningServer, tmp_path: Path, order: str
) -> None:
    async def case() -> None:
        host = make_host(tmp_path)
        await host.prepare(1, None)
        await (host.stop(1, 5.0) if order == "stop" else host.kill(1))
        assert [e.kind for e in await story(host, 1)] == ["gone"]
        await host.launch(make_plan(server, tmp_path))
        assert host._fence.launched == 1
        assert not (tmp_path / "pid").exists()
        assert [e.kind for e in await story(host, 1)] == ["gone"], "nothing more is told"

    run(case)


@pytest.mark.rare
def test_an_attempt_that_was_not_even_prepared_can_be_ended(server: RunningServer, tmp_path: Path) -> None:
    async def case() -> None:
        host = make_host(tmp_path)
        await host.prepare(1, None)
        await host.launch(make_plan(server, tmp_path, "raise SystemExit(3)"))
        assert [e.kind for e in await story(host, 1)] == ["started", "exited", "gone"]
        await host.kill(2)
        assert [e.kind for e in await story(host, 2)] == ["gone"], "the first attempt's end is not the second's"

    run(case)


@pytest.mark.rare
def test_nothing_is_told_of_an_attempt_before_it_is_prepared(server: RunningServer, tmp_path: Path) -> None:
    async def case() -> None:
        host = make_host(tmp_path)
        await host.prepare(1, None)
        plan = make_plan(server, tmp_path, "raise SystemExit(3)")
        await host.launch(plan)
        await story(host, 1)
        early = await host.poll(2, PollCursor(), 0.05)
        assert early == PollReply(cursor=PollCursor(), sent_at=early.sent_at)
        await host.prepare(2, None)
        await host.launch(make_plan(server, tmp_path, "raise SystemExit(0)", attempt=2))
        assert [e.exit.exit_code for e in await story(host, 2) if e.exit] == [0]

    run(case)


@pytest.mark.rare
def test_an_end_that_comes_in_the_middle_of_a_launch_wins(server: RunningServer, tmp_path: Path) -> None:
    async def case() -> None:
        host = make_host(tmp_path)
        await host.prepare(1, None)
        path = rank_lock_path(tmp_path / "node", "job-aaaaaa", 0)
        path.parent.mkdir(parents=True)
        blocking = os.open(path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(blocking, fcntl.LOCK_EX)
        launch = asyncio.create_task(host.launch(make_plan(server, tmp_path)))
        await asyncio.to_thread(wait_until, "its own handle of the lock", lambda: openings(path) == 2)
        assert not launch.done(), "it waits for the tree before it"
        await host.kill(1)
        await launch
        os.close(blocking)
        assert [e.kind for e in await story(host, 1)] == ["gone"]
        assert not (tmp_path / "pid").exists()

    run(case)


def test_an_end_right_after_the_launch_finds_the_process(server: RunningServer, tmp_path: Path) -> None:
    async def case() -> None:
        host = make_host(tmp_path)
        for attempt in range(1, 6):
            await host.prepare(attempt, None)
            plan = make_plan(server, tmp_path, attempt=attempt)
            await asyncio.gather(host.launch(plan), host.kill(attempt))
            assert (await story(host, attempt))[-1].kind == "gone"

    run(case)


@pytest.mark.rare
def test_an_asker_that_died_takes_no_news_along(server: RunningServer, tmp_path: Path) -> None:
    script = """
import os
from orchestrator.train.script.progress import ProgressPage
page = ProgressPage.open("page")
page.claim()
page.write(step=7)
"""

    async def case() -> None:
        host = make_host(tmp_path)
        await host.prepare(1, None)
        await host.launch(make_plan(server, tmp_path, script))

        async def last_progress() -> tuple[int | None, list[str]]:
            cursor, kinds, step = PollCursor(), [], None
            while "gone" not in kinds:
                reply = await host.poll(1, cursor, 5)
                cursor = reply.cursor
                kinds += [e.kind for e in reply.events]
                step = reply.progress.step if reply.progress is not None else step
            return step, kinds

        answers = await asyncio.gather(last_progress(), last_progress())
        assert answers == [(7, ["started", "exited", "gone"])] * 2
        assert await last_progress() == answers[0], "also to one who asks from the beginning, when all is over"

    run(case)


def test_a_new_attempt_starts_with_a_blank_page(server: RunningServer, tmp_path: Path) -> None:
    async def case() -> None:
        host = make_host(tmp_path)
        await host.prepare(1, None)
        await host.launch(make_plan(server, tmp_path, "raise SystemExit(1)"))
        await story(host, 1)
        with_step = ProgressPage.open(tmp_path / "page")
        with_step.write(step=9)
        with_step.close()
        await host.prepare(2, None)
        assert (await host.poll(2, PollCursor(), 0.01)).progress is None
        await host.launch(make_plan(server, tmp_path, "raise SystemExit(1)", attempt=2))
        reply = await host.poll(2, PollCursor(), 5)
        while reply.progress is None:  # a reply is sent at each event, and the page is read once a second
            reply = await host.poll(2, reply.cursor, 5)
        assert reply.progress.step is None

    run(case)


class LossyServer:
    """Proxy of a fork server that loses its first replies: the process is started, but the client is not told."""

    def __init__(self, server: RunningServer, path: Path, losses: int) -> None:
        self.losses = losses
        self._server = server
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(self._listener)
            with client:
                client.setblocking(True)
                await asyncio.to_thread(self._forward, client)

    def _forward(self, client: socket.socket) -> None:
        header, fds, _, _ = socket.recv_fds(client, wire.HEADER.size, 16)
        with client.makefile("rb") as stream, socket.socket(socket.AF_UNIX) as server:
            body = stream.read(wire.body_length(header))
            server.connect(str(self._server.socket))
            socket.send_fds(server, [header], fds)
            for fd in fds:
                os.close(fd)
            server.sendall(body)
            with server.makefile("rb") as answers:
                head = answers.read(wire.HEADER.size)
                answer = head + answers.read(wire.body_length(head))
        if self.losses:
            self.losses -= 1
        else:
            client.sendall(answer)

    def close(self) -> None:
        self._listener.close()


def test_a_lost_answer_never_makes_two_process_trees(server: RunningServer, tmp_path: Path) -> None:
    # It writes for as long as it lives, so the lines of two at a time would be mixed.
    script = """
import os, time
handle = os.open("times", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
until = time.monotonic() + 0.5
while time.monotonic() < until:
    os.write(handle, f"{os.getpid()}\\n".encode())
"""

    async def case() -> None:
        path = tmp_path / "lossy"
        lossy = LossyServer(server, path, losses=3)
        serving = asyncio.create_task(lossy.serve())
        host = make_host(tmp_path)
        await host.prepare(1, None)
        await host.launch(replace(make_plan(server, tmp_path, script), fork_socket=str(path)))
        assert [e.kind for e in await story(host, 1)] == ["started", "exited", "gone"]
        serving.cancel()
        lossy.close()
        assert lossy.losses == 0, "the fault took place"
        pids = (tmp_path / "times").read_text().splitlines()
        changes = sum(a != b for a, b in pairwise(pids))
        assert changes == len(set(pids)) - 1, "one tree after the other, never two at a time"

    run(case)


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK | os.W_OK), reason="the kernel's log is not ours to write")
def test_what_the_kernel_said_of_a_rank_that_died_at_once_is_heard(server: RunningServer, tmp_path: Path) -> None:
    script = """
import os, signal
with open("/dev/kmsg", "w") as log:
    print(f"orch test: Killed process {os.getpid()} (not really)", file=log)
os.kill(os.getpid(), signal.SIGKILL)
"""

    async def case() -> None:
        host = make_host(tmp_path)
        await host.prepare(1, None)
        plan = make_plan(server, tmp_path, script)
        await host.launch(plan)
        wait_until("it is dead before the host has heard of its start", Path(plan.exit_record).exists)  # in one turn
        started, exited, _ = await story(host, 1)
        assert exited.exit.evidence == (KernelMessage(said=f"orch test: Killed process {started.pid} (not really)"),)

    run(case)


def stores(server: RunningServer) -> set[int]:
    """Return the process ids of the rendezvous stores below the server."""
    processes = psutil.Process(server.started.pid).children(recursive=True)
    return {process.pid for process in processes if process.name() == "orch-store"}


@pytest.mark.rare
def test_a_launch_that_failed_at_the_store_is_completed_by_the_next_one(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_store = RankStarter.store

    async def fails_once(*_args: object) -> None:
        monkeypatch.setattr(RankStarter, "store", serve_store)
        raise ForkServerRefusedError("fork", "cannot fork: no memory")

    async def case() -> None:
        monkeypatch.setattr(RankStarter, "store", fails_once)
        host = make_host(tmp_path)
        await host.prepare(1, "127.0.0.1")
        with pytest.raises(ForkServerRefusedError):
            await host.launch(make_plan(server, tmp_path))
        assert (host._fence.launched, stores(server)) == (1, set())
        await host.launch(make_plan(server, tmp_path))
        await asyncio.to_thread(wait_until, "the store", lambda: len(stores(server)) == 1)
        pids = tmp_path / "pid"
        await asyncio.to_thread(wait_until, "the rank has written", lambda: pids.exists() and pids.read_text() != "")
        await host.launch(make_plan(server, tmp_path))
        await host.prepare(2, None)
        await asyncio.to_thread(wait_until, "the store's end", lambda: not stores(server))
        assert len(pids.read_text().split()) == 1, "one process, however often it was asked for"

    run(case)


def test_each_attempt_has_a_store_of_its_own_and_the_old_one_ends(server: RunningServer, tmp_path: Path) -> None:
    async def case() -> None:
        host = make_host(tmp_path)
        first = await host.prepare(1, "127.0.0.1")
        await host.launch(make_plan(server, tmp_path))
        await asyncio.to_thread(wait_until, "the store", lambda: len(stores(server)) == 1)
        old = stores(server)
        assert await host.prepare(2, "127.0.0.1") != first
        await host.launch(make_plan(server, tmp_path, attempt=2))
        await asyncio.to_thread(wait_until, "both", lambda: len(stores(server) - old) == 1 and not stores(server) & old)
        await host.prepare(3, None)
        await asyncio.to_thread(wait_until, "the end of the last", lambda: not stores(server))

    run(case)


def openings(path: Path) -> int:
    """Return how many descriptors of the file this process has."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += link.readlink() == path
    return found
