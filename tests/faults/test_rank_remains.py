"""A rank whose keeper, fork server, or both are killed or stopped leaves nothing behind when the next attempt starts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.core.states import OutOf
from orchestrator.runtime.forkserver import cgroups
from orchestrator.runtime.forkserver.holder import MARK
from orchestrator.runtime.ranks.launch_spec import RankPlan
from orchestrator.runtime.ranks.rank_actor import RankActor
from orchestrator.runtime.spawn.rank_locks import rank_lock_path, read_holder, tree_mark
from tests.faults.test_rank_host import make_host, make_plan, run, story
from tests.integration.forkserver_fixture import BARE_PYTHON, RunningServer, running_server
from tests.support.processes import kill_each
from tests.support.records import replace
from tests.support.stack import process_gone, wait_until

# Children of every kind: a fork and a started program, each also in a session of its own without a parent.
FAMILY = """
import os, subprocess, sys, time
def note(): open("pids", "a").write(f"{os.getpid()}\\n")
def child(start, alone):
    if os.fork() == 0:
        if alone:
            os.setsid()
            if os.fork(): os._exit(0)
        start()
def forked(): note(); time.sleep(600)
def executed(): os.execv(sys.executable, [sys.executable, "-c", "import os, time; open('pids', 'a').write(f'{os.getpid()}\\\\n'); time.sleep(600)"])
for start in (forked, executed):
    for alone in (False, True):
        child(start, alone)
note()
time.sleep(600)
"""
BALLAST = """
import os, time
held = bytearray(2 << 30)
for at in range(0, len(held), 4096): held[at] = 1
open("pid", "w").write(str(os.getpid()))
os.rename("pid", "ready")
time.sleep(600)
"""
EATER = """
held = []
while True: held.append(bytearray(b"x" * (16 << 20)))
"""


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server(str(BARE_PYTHON)) as running:
        yield running


def family(tmp_path: Path) -> list[int]:
    def told() -> list[int]:
        path = tmp_path / "pids"
        found = [int(line) for line in path.read_text().split()] if path.exists() else []
        return found if len(found) == 5 else []

    return wait_until("the tree has grown", told)


def marked_plan(server: RunningServer, tmp_path: Path, script: str, attempt: int = 1) -> RankPlan:
    plan = make_plan(server, tmp_path, script, attempt)
    return replace(plan, env={**plan.env, MARK: tree_mark(tmp_path / "node", plan.job_id, plan.rank)})


async def started(host: RankActor, plan: RankPlan) -> None:
    await host.prepare(plan.attempt, None)
    await host.launch(plan)


def keeper_of(tmp_path: Path) -> int:
    found = read_holder(rank_lock_path(tmp_path / "node", "job-aaaaaa", 0))
    assert found is not None
    return found.keeper.pid


@pytest.mark.parametrize("groups", [True, False], ids=["with-groups", "without"])
@pytest.mark.parametrize("order", ["keeper-first", "server-first", "together"])
def test_nothing_outlives_a_keeper_and_its_fork_server(tmp_path: Path, order: str, groups: bool) -> None:
    async def case() -> None:
        with running_server(str(BARE_PYTHON)) as server:
            host = make_host(tmp_path)
            await started(host, marked_plan(server, tmp_path, FAMILY))
            pids = await asyncio.to_thread(family, tmp_path)
            if not groups:
                leave_group(pids)
            victims = [keeper_of(tmp_path), server.started.pid]
            if order == "server-first":
                victims.reverse()
            for pid in victims:
                kill_each(pid)
                if order != "together":
                    await asyncio.to_thread(wait_until, "it is dead", lambda pid=pid: process_gone(pid))
            assert [e.kind for e in await story(host, 1)][-2:] == ["exited", "gone"]
            assert [pid for pid in pids if not process_gone(pid)] == [], "all are gone when that is told"
            assert not rank_lock_path(tmp_path / "node", "job-aaaaaa", 0).read_bytes()

    run(case)


def leave_group(pids: list[int]) -> None:
    """Move the processes to the control group above theirs, as if theirs had never existed."""
    place = cgroups.find_place()
    if place is not None:
        for pid in pids:
            (Path(place.path) / "cgroup.procs").write_text(str(pid))


@pytest.mark.rare
def test_the_next_attempt_starts_when_the_memory_of_the_one_before_is_free(
    server: RunningServer, tmp_path: Path
) -> None:
    script = """
import pathlib
pid = pathlib.Path("ready").read_text()
try:
    state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
except OSError:
    state = "gone"
pathlib.Path("found").write_text(state)
"""

    async def case() -> None:
        host = make_host(tmp_path)
        await started(host, marked_plan(server, tmp_path, BALLAST))
        await asyncio.to_thread(wait_until, "2 GiB are held", (tmp_path / "ready").exists)
        os.kill(keeper_of(tmp_path), signal.SIGKILL)
        # An actor that has no record of the process, as after the loss of a gang.
        other = make_host(tmp_path)
        await started(other, marked_plan(server, tmp_path, script, attempt=2))
        await story(other, 2)
        assert (tmp_path / "found").read_text() in ("gone", "Z")

    run(case)


def test_a_rank_is_the_kernels_first_victim_and_its_keeper_is_not(server: RunningServer, tmp_path: Path) -> None:
    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    async def case() -> None:
        host = make_host(tmp_path)
        await started(host, marked_plan(server, tmp_path, FAMILY))
        pids = await asyncio.to_thread(family, tmp_path)
        assert {score(pid) for pid in pids} == {1000}
        assert score(keeper_of(tmp_path)) < 1000
        assert score(server.started.pid) < 1000
        await host.kill(1)
        await story(host, 1)

    run(case)


@pytest.mark.skipif(
    (place := cgroups.find_place()) is None or not place.has_memory, reason="control groups cannot be made here"
)
def test_a_rank_that_reaches_its_limit_is_killed_alone_and_says_so(server: RunningServer, tmp_path: Path) -> None:
    limit = 256 << 20

    async def case() -> None:
        host = make_host(tmp_path)
        plan = replace(marked_plan(server, tmp_path, EATER, attempt=2), memory_bytes=limit)
        await started(host, plan)
        exited = next(e.exit for e in await story(host, 2) if e.exit)
        assert (exited.exit_code, exited.signal) == (None, signal.SIGKILL)
        assert exited.memory is not None
        assert (exited.memory.killed, exited.memory.limit_bytes) == (OutOf.LIMIT, limit)
        assert limit * 0.9 <= exited.memory.used_bytes <= limit * 1.1

    run(case)
    assert place is not None
    assert not list(Path(place.path).glob(f"{cgroups.PREFIX}*{os.getpid()}*"))


def test_a_group_is_removed_with_its_process(server: RunningServer, tmp_path: Path) -> None:
    async def case() -> None:
        host = make_host(tmp_path)
        await started(host, marked_plan(server, tmp_path, FAMILY))
        await asyncio.to_thread(family, tmp_path)
        found = read_holder(rank_lock_path(tmp_path / "node", "job-aaaaaa", 0))
        assert found is not None
        if found.group is None:
            pytest.skip("control groups cannot be made here")
        assert Path(found.group).is_dir()
        await host.kill(1)
        await story(host, 1)
        assert not Path(found.group).exists()

    run(case)
