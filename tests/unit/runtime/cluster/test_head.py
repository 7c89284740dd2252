"""The embedded head: started in several tries, found again, recognised when it is ending, and ended without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from structlog.testing import capture_logs

from orchestrator.durable_files import write_whole
from orchestrator.runtime.cluster.cluster import Cluster, ClusterOptions
from orchestrator.runtime.cluster.head import (
    START_TRIES,
    ClusterError,
    EmbeddedHead,
    Head,
    idle_workers,
    kill_head,
    of_session,
    ray_environment,
    read_head,
    write_head,
)
from orchestrator.runtime.nodes import control_plane
from orchestrator.runtime.nodes.control_plane import RayNode
from orchestrator.runtime.nodes.directories import Site
from orchestrator.spec.settings import Settings
from orchestrator.spec.token_file import TokenFileError
from tests.support.processes import all_gone
from tests.support.stack import wait_until

OWN = {"raylet": (os.getpid(), psutil.Process().create_time())}


@pytest.fixture
def port() -> Iterator[socket.socket]:
    listening = socket.create_server(("127.0.0.1", 0))
    yield listening
    listening.close()


def cluster_on(home: Path, port: socket.socket, lost: list[str]) -> Cluster:
    """Return a connected cluster with a control plane on ``port``."""
    paths = Settings.from_environ({"ORCH_HOME": str(home)}).paths
    cluster = Cluster(paths, ClusterOptions(), on_lost=lambda: lost.append("lost"))
    assert cluster._head is not None
    cluster._head._head = Head(gcs_address=f"127.0.0.1:{port.getsockname()[1]}", session=0, pids={})
    cluster.ray.opened()
    return cluster


def test_a_head_is_ending_when_nothing_listens_at_its_address(port: socket.socket) -> None:
    head = EmbeddedHead(Mock(), num_cpus=None, simulate_gpus=0, on_died=lambda: None)
    assert not asyncio.run(head.is_ending()), "there is none"
    head._head = Head(gcs_address=f"127.0.0.1:{port.getsockname()[1]}", session=0, pids={})
    assert not asyncio.run(head.is_ending())
    port.close()
    assert asyncio.run(head.is_ending())


def test_the_loss_of_a_head_that_is_ending_is_reported_once(tmp_path: Path, port: socket.socket) -> None:
    async def run() -> None:
        lost: list[str] = []
        cluster = cluster_on(tmp_path, port, lost)
        await cluster.check_head()
        assert (lost, cluster.connected) == ([], True)
        port.close()
        await asyncio.gather(*(cluster.check_head() for _ in range(3)))
        assert (lost, cluster.connected, cluster.ray.epoch) == (["lost"], False, 1)

    asyncio.run(run())


@pytest.mark.parametrize(("state", "lost_then"), [("dead", ["lost"]), ("alive", []), ("unknown", [])])
def test_an_embedded_head_whose_node_ray_has_given_up_is_lost_with_an_actor(
    tmp_path: Path, port: socket.socket, monkeypatch: pytest.MonkeyPatch, state: str, lost_then: list[str]
) -> None:
    """Ray gives up a terminated raylet at once, and the raylet ends ten seconds later."""

    def listed() -> dict[str, RayNode]:
        if state == "unknown":
            raise ConnectionError("no answer")
        return {"n1": RayNode(id="n1", alive=state == "alive", hostname="h", address="", port=1, total={})}

    async def run() -> None:
        lost: list[str] = []
        monkeypatch.setattr(control_plane, "nodes", listed)
        cluster = cluster_on(tmp_path, port, lost)
        await cluster.check_head()
        assert lost == []
        await cluster.check_head(node_lost=True)
        assert lost == lost_then

    asyncio.run(run())


def test_an_existing_cluster_is_left_to_ray(tmp_path: Path) -> None:
    async def run() -> None:
        lost: list[str] = []
        paths = Settings.from_environ({"ORCH_HOME": str(tmp_path)}).paths
        cluster = Cluster(paths, ClusterOptions(address="127.0.0.1:1"), on_lost=lambda: lost.append("lost"))
        cluster.ray.opened()
        await cluster.check_head()
        assert (lost, cluster.connected) == ([], True)

    asyncio.run(run())


def test_a_head_of_an_earlier_daemon_that_is_ending_is_ended_and_not_taken(tmp_path: Path, port: socket.socket) -> None:
    raylet = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        site = Mock(head_file=tmp_path / "head.json", paths=Mock(ray=tmp_path))
        pids = {"raylet": (raylet.pid, psutil.Process(raylet.pid).create_time())}
        address = f"127.0.0.1:{port.getsockname()[1]}"
        write_head(site.head_file, Head(gcs_address=address, session=raylet.pid, pids=pids))
        head = EmbeddedHead(site, num_cpus=None, simulate_gpus=0, on_died=lambda: None)
        assert asyncio.run(head._find()) is not None
        port.close()
        assert asyncio.run(head._find()) is None
        wait_until("it has ended", lambda: raylet.poll() is not None)
    finally:
        raylet.kill()
        raylet.wait()


# -- the number of idle workers that it is requested to keep


def test_the_raylet_is_no_idle_worker_though_its_command_line_has_that_of_workers() -> None:
    script = "import subprocess, sys; child = subprocess.Popen(['sleep', '1000']); print(child.pid, flush=True); sys.stdin.read()"
    raylet = subprocess.Popen(
        [sys.executable, "-c", script, "--python_worker_command=default_worker.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert raylet.stdout is not None
        child = int(raylet.stdout.readline())
        assert idle_workers(raylet.pid) == 0
        assert {process.pid for process in of_session(raylet.pid)} == {raylet.pid, child}
    finally:
        os.killpg(raylet.pid, signal.SIGKILL)
        raylet.communicate()
    assert idle_workers(raylet.pid) == 0


# -- its token


@pytest.mark.parametrize("torn", [b"", b"\0" * 64, b"0123abc"], ids=["empty", "zeros", "half"])
def test_a_torn_token_is_made_anew_where_no_head_can_be_using_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    site = Site(Settings.from_environ({"ORCH_HOME": str(tmp_path)}).paths, None)
    path = site.paths.ray / "token"
    path.parent.mkdir()
    write_whole(path, torn)
    head = EmbeddedHead(site, num_cpus=None, simulate_gpus=0, on_died=lambda: None)
    write_head(site.head_file, Head(gcs_address="127.0.0.1:1", session=0, pids=OWN))
    with contextlib.suppress(TokenFileError):
        head.keep_token()
    assert path.read_bytes() == torn, "a head that runs has it"
    site.head_file.unlink()
    head.keep_token()
    token = path.read_text()
    assert (len(token), path.stat().st_mode & 0o777) == (64, 0o600)
    head.keep_token()
    assert path.read_text() == token, "a whole one stays"


# -- its start

STARTER = """
import subprocess, sys, time
tries, fails, hangs = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
sleep = [sys.executable, "-c", "import sys, time; time.sleep(1000)"]
names = ("gcs_server", "raylet") if not fails else ("raylet",)
started = [subprocess.Popen([sys.executable, "-c", "import ctypes, sys, time; ctypes.CDLL(None).prctl(15, sys.argv[1].encode()); "
           "print(flush=True); sys.stdout.close(); time.sleep(1000)", name], stdout=subprocess.PIPE) for name in names]
for process in started:
    process.stdout.readline()
with open(tries, "a") as file:
    file.write(" ".join(str(process.pid) for process in started) + "\\n")
if fails:
    print("some traceback", file=sys.stderr)
    sys.exit("the port is taken")
if hangs:
    time.sleep(1000)
"""


class Starter:
    """Stands in for the head's program: its first ``fails`` tries fail, and later ones hang where ``hangs``."""

    def __init__(self, home: Path, *, fails: int = 0, hangs: bool = False, seconds: float = 300.0) -> None:
        self.fails, self.hangs = fails, hangs
        self.file = home / "tries"
        self.site = Site(Settings.from_environ({"ORCH_HOME": str(home)}).paths, None)
        self.site.paths.ray.mkdir()
        self.head = EmbeddedHead(
            self.site,
            num_cpus=1,
            simulate_gpus=1,
            on_died=lambda: None,
            command=self.command,
            limit=lambda: seconds,
        )
        self.head.keep_token()

    def command(self, _directory: Path, **options: int) -> list[str]:
        assert (options["num_cpus"], options["num_gpus"]) == (1, 1)
        self.fails -= 1
        return [sys.executable, "-c", STARTER, str(self.file), str(int(self.fails >= 0)), str(self.hangs)]

    def started(self) -> list[list[int]]:
        """Return the processes that each try has started."""
        return [[int(pid) for pid in line.split()] for line in self.file.read_text().splitlines()]

    def end(self) -> None:
        for pid in (pid for each in self.started() for pid in each):
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()
        self.site.remove_node_state()


@pytest.fixture
def starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Starter]]:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    made: list[Starter] = []

    def make(**options: Any) -> Starter:
        made.append(Starter(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.end()


def test_a_start_that_fails_is_tried_again_and_told_in_one_line(starter: Callable[..., Starter]) -> None:
    made = starter(fails=START_TRIES - 1)
    with capture_logs() as lines:
        head = asyncio.run(made.head.start())
    assert [line["tried"] for line in lines] == list(range(1, START_TRIES))
    assert all("the port is taken" in line["reason"] and "exc_info" not in line for line in lines)
    *failed, (control_plane_pid, raylet) = made.started()
    all_gone("what failed starts began", [*chain.from_iterable(failed)])
    assert {name: pid for name, (pid, _) in head.pids.items()} == {"gcs_server": control_plane_pid, "raylet": raylet}
    assert head.is_alive
    assert read_head(made.site.head_file) == head
    kill_head(head, made.site.paths.ray / "token")
    all_gone("the head", [control_plane_pid, raylet])
    assert not head.is_alive


def test_a_start_that_hangs_is_given_up_without_a_trace(
    starter: Callable[..., Starter], capfd: pytest.CaptureFixture[str]
) -> None:
    made = starter(hangs=True, seconds=3.0)
    with pytest.raises(ClusterError, match="did not start within 3 s"):
        asyncio.run(made.head.start())
    gc.collect()
    all_gone("what the start began", [*chain.from_iterable(made.started())])
    assert "Event loop is closed" not in capfd.readouterr().err


def test_what_a_start_began_is_ended_though_its_daemon_died_before_it_knew_the_processes(tmp_path: Path) -> None:
    """The session may have another program's number by then: only what has the head's token is killed."""
    token = tmp_path / "token"
    waits = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    of_head = subprocess.Popen(waits, env={**os.environ, **ray_environment(token)}, start_new_session=True, **pipes)
    other = subprocess.Popen(waits, process_group=0, **pipes)
    apart = subprocess.Popen(waits, start_new_session=True, **pipes)
    try:
        for each in (of_head, other, apart):
            assert each.stdout is not None
            each.stdout.readline()
        for each in (apart, of_head):
            kill_head(Head(session=each.pid), token)
        wait_until("it has ended", lambda: of_head.poll() is not None)
        assert [each.poll() is None for each in (of_head, other, apart)] == [False, True, True]
    finally:
        for each in (of_head, other, apart):
            each.kill()
            each.communicate()
