"""The daemon's own driver when the head to which it is connected dies."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path

import psutil
import pytest

from orchestrator.runtime.cluster import cluster as module
from orchestrator.runtime.cluster import head
from orchestrator.runtime.cluster.cluster import Cluster, ClusterOptions
from orchestrator.runtime.cluster.connection import CALLS_AT_ONCE, RayConnection
from orchestrator.runtime.cluster.head import OF_THE_DRIVER, RECONNECT_SECONDS, ClusterError, Head, write_head
from orchestrator.runtime.nodes import control_plane
from orchestrator.runtime.nodes.control_plane import RayNode
from orchestrator.spec.settings import Settings


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OF_THE_DRIVER:
        monkeypatch.setenv(name, "before")  # restored after the test, whatever it sets
        monkeypatch.delenv(name)
    monkeypatch.setattr(head, "ray_environment", lambda _token: {})


def standing_head(home: Path, port: int) -> None:
    """Record this process, which listens on ``port``, as the home's head."""
    pids = {"raylet": (os.getpid(), psutil.Process().create_time())}
    (home / "ray").mkdir()
    write_head(home / "ray/head.json", Head(gcs_address=f"127.0.0.1:{port}", session=os.getsid(0), pids=pids))


def well(_address: str, _space: str, _seconds: float) -> list[str]:
    """Return the command line of a trial that succeeds."""
    return ["true"]


def seen_by_ray(monkeypatch: pytest.MonkeyPatch, home: Path, address: str | None = None) -> str | None:
    """Return the reconnection time in the environment of Ray when a cluster refuses the connection."""
    seen: list[str | None] = []

    def connect(address: str, _space: str) -> None:
        seen.append(os.environ.get(RECONNECT_SECONDS))
        raise ConnectionRefusedError(address)

    async def start() -> None:
        paths = Settings.from_environ({"ORCH_HOME": str(home)}).paths
        made = Cluster(paths, ClusterOptions(address=address), on_lost=lambda: None)
        with pytest.raises(ClusterError, match="cannot connect to Ray"):
            await made.start()
        if made._head is not None:
            made._head.unwatch()

    monkeypatch.setattr(module, "RayConnection", lambda space: RayConnection(space, connect=connect, try_first=well))
    asyncio.run(start())
    return seen[0]


def test_the_driver_of_an_embedded_head_never_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        standing_head(tmp_path, listening.getsockname()[1])
        assert int(seen_by_ray(monkeypatch, tmp_path) or 0) > 24 * 3600


def test_that_of_somebody_s_cluster_does_as_ray_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen_by_ray(monkeypatch, tmp_path, "10.0.0.1:6379") is None


def node(*, alive: bool) -> RayNode:
    return RayNode(id="n1", alive=alive, hostname="h", address="127.0.0.1", port=1, total={"CPU": 2.0})


def test_an_embedded_head_whose_node_is_dead_is_lost_though_its_processes_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its raylet is stopped by a signal, or does not finish ending."""
    lost: list[str] = []
    listed: list[RayNode] = []
    monkeypatch.setattr(control_plane, "nodes", lambda: {one.id: one for one in listed})

    async def look() -> None:
        paths = Settings.from_environ({"ORCH_HOME": str(tmp_path)}).paths
        made = Cluster(paths, ClusterOptions(), on_lost=lambda: lost.append("lost"))
        await made.refresh()
        made.ray.opened()
        await made.refresh()
        assert lost == [], "nothing is listed yet"
        listed.append(node(alive=False))
        nodes = await made.refresh()
        assert [one.alive for one in nodes.values()] == [False]
        assert not made.connected
        await made.refresh()

    asyncio.run(look())
    assert lost == ["lost"], "once"


def test_a_node_whose_agent_starts_late_is_waited_for_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's first workers may take minutes on a busy machine."""
    problems: list[str] = []

    async def late(cluster: Cluster) -> None:
        problems.append(cluster.ray.problem)
        if len(problems) < 3:
            raise TimeoutError

    def ray(space: str) -> RayConnection:
        return RayConnection(space, connect=lambda _address, _space: None, try_first=well)

    monkeypatch.setattr(module, "RayConnection", ray)
    monkeypatch.setattr(Cluster, "refresh", late)
    paths = Settings.from_environ({"ORCH_HOME": str(tmp_path)}).paths
    made = Cluster(paths, ClusterOptions(address="127.0.0.1:1", warm_workers=0), on_lost=lambda: None)
    asyncio.run(made.start())
    assert problems[0] == ""
    assert all("the node's agent has not answered yet" in problem for problem in problems[1:])
    assert (len(problems), made.ray.problem, made.connected) == (3, "", True)


def test_calls_to_a_head_that_has_died_fail_and_do_not_hold_up_the_next_ones() -> None:
    never = threading.Event()

    async def lose_the_head() -> None:
        ray = RayConnection("orch-x", disconnect=lambda: None)
        stuck = [asyncio.ensure_future(ray.call(never.wait, seconds=1e9)) for _ in range(CALLS_AT_ONCE)]
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await ray.call(lambda: "too many", seconds=0.05)
        ray.lost()
        await ray.leave()
        for call in stuck:
            with pytest.raises(TimeoutError, match="Ray's head died before it answered"):
                await call
        assert await ray.call(lambda: "answered", seconds=60.0) == "answered"
        assert (ray.epoch, ray.connected) == (1, False)

    try:
        asyncio.run(lose_the_head())
    finally:
        never.set()


def test_a_call_to_a_living_head_can_still_be_given_up() -> None:
    never = threading.Event()

    async def cancel() -> None:
        ray = RayConnection("orch-x", disconnect=lambda: None)
        calls = [asyncio.ensure_future(ray.call(never.wait, seconds=1e9)) for _ in range(CALLS_AT_ONCE)]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        assert [type(each) for each in await asyncio.gather(*calls, return_exceptions=True)] == [
            asyncio.CancelledError
        ] * CALLS_AT_ONCE
        assert await ray.call(lambda: "there is a place", seconds=60.0) == "there is a place"

    try:
        asyncio.run(cancel())
    finally:
        never.set()
