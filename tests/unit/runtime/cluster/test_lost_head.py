"""What a daemon's own driver does when the head that it talks to dies."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import psutil
import pytest

from orchestrator.runtime.cluster import cluster as module
from orchestrator.runtime.cluster.cluster import (
    CALLS_AT_ONCE,
    OF_THE_DRIVER,
    RECONNECT_SECONDS,
    Cluster,
    ClusterOptions,
)
from orchestrator.runtime.cluster.head_processes import Head
from orchestrator.spec.settings import Settings


class Standing(Cluster):
    """A cluster whose head is said to be this process; connecting fails, and notes what Ray would have seen."""

    seen: str | None = None

    async def _find_head(self) -> Head | None:
        return Head(
            gcs_address="127.0.0.1:1",
            session_dir="/nowhere",
            pids={"raylet": (os.getpid(), psutil.Process().create_time())},
        )

    def _connect(self, address: str) -> None:
        self.seen = os.environ.get(RECONNECT_SECONDS)
        raise ConnectionRefusedError(address)


def a_cluster(kind: type[Standing], home: Path, address: str | None = None) -> Standing:
    paths = Settings.from_environ({"ORCH_HOME": str(home)}).paths
    return kind(paths, ClusterOptions(address=address), on_lost=lambda: None)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OF_THE_DRIVER:
        monkeypatch.setenv(name, "before")  # put back as it was, whatever the test sets
        monkeypatch.delenv(name)
    monkeypatch.setattr(module, "ray_environment", lambda _token: {})


def failed_start(made: Standing) -> Standing:
    async def start() -> None:
        with pytest.raises(module.ClusterError, match="cannot connect to Ray"):
            await made.start()
        made._unwatch_head()

    asyncio.run(start())
    return made


def test_the_driver_of_an_embedded_head_never_gives_up(tmp_path: Path) -> None:
    assert int(failed_start(a_cluster(Standing, tmp_path)).seen or 0) > 24 * 3600


def test_that_of_somebody_s_cluster_does_as_ray_does(tmp_path: Path) -> None:
    assert failed_start(a_cluster(Standing, tmp_path, "10.0.0.1:6379")).seen is None


class Restarting(Standing):
    """One whose next head is there at once."""

    async def _leave(self, seconds: float = 0.0) -> None:
        pass

    async def _start_head(self) -> Head:
        head = await self._find_head()
        assert head is not None
        return head

    async def start(self) -> None:
        pass


def test_calls_that_the_dead_head_never_answers_do_not_hold_up_the_next_ones(tmp_path: Path) -> None:
    never = threading.Event()

    async def lose_the_head() -> None:
        made = a_cluster(Restarting, tmp_path)
        stuck = [asyncio.ensure_future(made.call(never.wait)) for _ in range(CALLS_AT_ONCE)]
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await made.call(lambda: "too many", seconds=0.05)
        await made.restart()
        assert await made.call(lambda: "answered", seconds=5.0) == "answered"
        for call in stuck:
            call.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)

    try:
        asyncio.run(lose_the_head())
    finally:
        never.set()
