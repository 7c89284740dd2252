"""What a daemon's own driver does when the head that it talks to dies."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import psutil
import pytest

from orchestrator.runtime.cluster import cluster as module
from orchestrator.runtime.cluster.cluster import Cluster, ClusterOptions
from orchestrator.runtime.cluster.connection import CALLS_AT_ONCE, RayConnection
from orchestrator.runtime.cluster.driver_environment import OF_THE_DRIVER, RECONNECT_SECONDS
from orchestrator.runtime.cluster.head import embedded
from orchestrator.runtime.cluster.head.processes import Head, write_head
from orchestrator.runtime.cluster.head.start import ClusterError
from orchestrator.spec.settings import Settings


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OF_THE_DRIVER:
        monkeypatch.setenv(name, "before")  # put back as it was, whatever the test sets
        monkeypatch.delenv(name)
    monkeypatch.setattr(embedded, "ray_environment", lambda _token: {})


def standing_head(home: Path) -> None:
    """The home's head is said to be this process."""
    pids = {"raylet": (os.getpid(), psutil.Process().create_time())}
    (home / "ray").mkdir()
    write_head(home / "ray/head.json", Head(gcs_address="127.0.0.1:1", session_dir="/nowhere", pids=pids))


def seen_by_ray(monkeypatch: pytest.MonkeyPatch, home: Path, address: str | None = None) -> str | None:
    """What Ray would find in the environment, of a cluster that cannot be connected to."""
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

    monkeypatch.setattr(module, "RayConnection", lambda space: RayConnection(space, connect=connect))
    asyncio.run(start())
    return seen[0]


def test_the_driver_of_an_embedded_head_never_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standing_head(tmp_path)
    assert int(seen_by_ray(monkeypatch, tmp_path) or 0) > 24 * 3600


def test_that_of_somebody_s_cluster_does_as_ray_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen_by_ray(monkeypatch, tmp_path, "10.0.0.1:6379") is None


def test_calls_that_the_dead_head_never_answers_do_not_hold_up_the_next_ones() -> None:
    never = threading.Event()

    async def lose_the_head() -> None:
        ray = RayConnection("orch-x", disconnect=lambda: None)
        stuck = [asyncio.ensure_future(ray.call(never.wait)) for _ in range(CALLS_AT_ONCE)]
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await ray.call(lambda: "too many", seconds=0.05)
        ray.lost()
        ray.renew_turns()
        await ray.leave()
        assert await ray.call(lambda: "answered", seconds=60.0) == "answered"
        assert (ray.epoch, ray.connected) == (1, False)
        for call in stuck:
            call.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)

    try:
        asyncio.run(lose_the_head())
    finally:
        never.set()
