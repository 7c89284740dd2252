"""Spares, forked ahead of their request: which requests get one, what ends them, and that no request is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.runtime.spawn.client import SpawnRequest, Started
from tests.integration.forkserver_fixture import (
    BARE_PYTHON,
    ENVIRONMENT,
    RunningServer,
    alive,
    running_server,
    wait_until,
)
from tests.integration.forkserver_ranks import Rank, holding_spares, spare_keepers, start_rank, start_store


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server(str(BARE_PYTHON)) as running:  # without torch: warm at once
        yield running


def run(server: RunningServer, folder: Path, code: str, **fields: str) -> Rank:
    """Run one script to its end."""

    async def to_its_end() -> Rank:
        request = SpawnRequest(
            mode="script",
            target="code.py",
            cwd=str(folder),
            env=ENVIRONMENT | fields,
            exit_record=str(folder / "exit.json"),
        )
        return await (await start_rank(server.client, folder, request)).finish()

    (folder / "code.py").write_text(code)
    return asyncio.run(to_its_end())


def test_a_successor_is_a_spare_and_ends_like_any_process(server: RunningServer, tmp_path: Path) -> None:
    with holding_spares(server, 1, tmp_path) as spares:
        rank = run(server, tmp_path, "import os, sys\nprint(os.environ['WHO'])\nraise ValueError('boo')\n", WHO="me")
        assert {rank.keeper_pid} == spares
        assert (rank.exited.exit_code, rank.started.cold, rank.stdout) == (1, None, "me\n")
        assert rank.error is not None
        assert (rank.error.type, rank.error.message) == ("ValueError", "boo")
        wait_until(lambda: bool(spare_keepers(server) - spares), "the next spare")


def test_a_spare_can_be_a_store_or_start_a_fresh_interpreter(tmp_path: Path) -> None:
    async def store(server: RunningServer) -> Started:
        lifeline, _ = await start_store(server.client, tmp_path)
        started = await lifeline.next_event()
        lifeline.close()
        assert isinstance(started, Started)
        return started

    with running_server() as server, holding_spares(server, 2, tmp_path) as spares:
        children = {child.pid for pid in spares for child in psutil.Process(pid).children()}
        assert asyncio.run(store(server)).pid in children
        rank = run(server, tmp_path, "print('fresh')\n", PYTHONHASHSEED="7")
        assert rank.keeper_pid in spares
        assert (rank.started.cold, rank.stdout) == ("environment variable PYTHONHASHSEED", "fresh\n")


@pytest.mark.parametrize("who", ["keeper", "child"])
def test_a_spare_that_is_killed_is_replaced(server: RunningServer, tmp_path: Path, who: str) -> None:
    with holding_spares(server, 1, tmp_path) as spares:
        (spare,) = spares
        (child,) = psutil.Process(spare).children()
        os.kill(spare if who == "keeper" else child.pid, signal.SIGKILL)
        wait_until(lambda: not alive(spare) and not alive(child.pid), "both to end")
        assert run(server, tmp_path, "print('served')\n").stdout == "served\n"
        wait_until(lambda: len(spare_keepers(server)) == 1, "another spare")
        assert server.client.hello_sync().keepers == 1


def test_a_frozen_spare_is_passed_over(server: RunningServer, tmp_path: Path) -> None:
    """The request does not fit into the socket of the frozen spare: the spare is killed, and the next fork serves."""
    with holding_spares(server, 1, tmp_path) as spares:
        (spare,) = spares
        os.kill(spare, signal.SIGSTOP)
        rank = run(server, tmp_path, "print('served')\n", LARGE="x" * 120_000, LARGER="y" * 120_000, MORE="z" * 120_000)
        assert (rank.stdout, rank.keeper_pid in spares) == ("served\n", False)
        wait_until(lambda: not alive(spare), "the frozen one to end")


@pytest.mark.parametrize("end", ["killed", "shut down"])
def test_spares_end_with_their_server(server: RunningServer, tmp_path: Path, end: str) -> None:
    with holding_spares(server, 1, tmp_path) as spares:
        everyone = [*spares, *(child.pid for pid in spares for child in psutil.Process(pid).children())]
        if end == "killed":
            os.kill(server.started.pid, signal.SIGKILL)
        else:
            server.client.shutdown_sync()
        wait_until(lambda: not any(alive(pid) for pid in everyone), "the spares to end")


def test_spares_end_when_nothing_runs_that_could_need_them(server: RunningServer, tmp_path: Path) -> None:
    with holding_spares(server, 2, tmp_path):
        assert server.client.hello_sync().keepers == 2
    wait_until(lambda: psutil.Process(server.started.pid).children() == [], "the last to end")


def held(pid: int) -> list[str]:
    """Return the targets of a process's descriptors; sockets and pipes without their numbers."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(re.sub(r"(socket|pipe):.*", r"\1", os.readlink(f"/proc/{pid}/fd/{fd}")))
    return sorted(found)


def test_a_spare_holds_nothing_of_a_job(server: RunningServer, tmp_path: Path) -> None:
    with holding_spares(server, 1, tmp_path) as spares:
        (spare,) = spares
        (child,) = psutil.Process(spare).children()
        log = str(server.directory / "fork.log")
        waits_for = {spare: ["anon_inode:[pidfd]", "pipe", "socket", "socket"], child.pid: ["pipe", "socket"]}
        for pid, waits in waits_for.items():
            wanted = sorted(["/dev/null", log, log, *waits])
            wait_until(lambda pid=pid, wanted=wanted: held(pid) == wanted, "it waits, and holds nothing else")
            assert os.readlink(f"/proc/{pid}/cwd") == "/"
