"""Exporters of GPUs that fail stay listed: an alert about an exporter that has vanished would never be raised."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.runtime.exporters.actor import ExporterAccess
from orchestrator.runtime.exporters.exporters import GONE_SECONDS, Exporters


@dataclass
class FakeActor:
    """Answers as an exporter's actor does, until it hangs."""

    url: str
    hangs: bool = False
    report: Any = field(init=False)

    def __post_init__(self) -> None:
        self.report = self._report

    async def _report(self, _since: float | None = None) -> Any:
        if self.hangs:
            await asyncio.sleep(3600)
        return SimpleNamespace(url=self.url)


@dataclass
class FakeCluster:
    """Nodes with GPUs, as their agents report them."""

    reports: dict[str, Any] = field(default_factory=dict)
    actors: dict[str, FakeActor] = field(default_factory=dict)
    restarted: list[FakeActor] = field(default_factory=list)

    async def call(self, make: Callable[..., Any], *given: Any, restart: bool = False) -> FakeActor | None:
        if restart:
            self.restarted.append(given[0])
            return None
        _node_id, gpu, _report = given
        return self.actors.setdefault(gpu.uuid, FakeActor(url=f"http://127.0.0.1:{9477 + len(self.actors)}/metrics"))

    def show(self, node_id: str, *uuids: str) -> None:
        gpus = tuple(SimpleNamespace(uuid=uuid) for uuid in uuids)
        self.reports[node_id] = SimpleNamespace(node_id=node_id, hostname=f"host-{node_id}", gpus=gpus)


@pytest.fixture
def cluster() -> FakeCluster:
    made = FakeCluster()
    made.show("n1", "GPU-a", "GPU-b")
    made.show("n2", "GPU-c")
    return made


def made(cluster: FakeCluster, **changes: Any) -> Exporters:
    exporters = Exporters(cluster, cluster, ExporterAccess(), **changes)  # type: ignore[arg-type]  # what it needs of both
    asyncio.run(exporters.refresh())
    return exporters


def test_every_gpu_has_a_place(cluster: FakeCluster) -> None:
    exporters = made(cluster)
    assert {uuid: place.node for uuid, place in exporters.places.items()} == {
        "GPU-a": "host-n1",
        "GPU-b": "host-n1",
        "GPU-c": "host-n2",
    }
    assert exporters.missing() == []


def test_a_gpu_that_fell_out_of_the_inventory_is_missing_and_still_asked(cluster: FakeCluster) -> None:
    exporters = made(cluster)
    cluster.show("n1", "GPU-a")
    asyncio.run(exporters.refresh())
    assert exporters.missing() == [("host-n1", "GPU-b")]
    assert "GPU-b" in exporters.places
    assert "GPU-b" in asyncio.run(exporters.ask())


def test_an_exporter_that_hangs_keeps_its_place(cluster: FakeCluster) -> None:
    exporters = made(cluster, report_seconds=0.01)
    cluster.actors["GPU-a"].hangs = True
    assert "GPU-a" not in asyncio.run(exporters.ask())
    assert "GPU-a" in exporters.places


def test_an_exporter_that_moved_is_found_when_it_is_asked(cluster: FakeCluster) -> None:
    exporters = made(cluster)
    cluster.actors["GPU-a"].url = "http://127.0.0.1:9555/metrics"
    asyncio.run(exporters.ask())
    assert exporters.places["GPU-a"].url.endswith(":9555/metrics")


def test_a_node_that_is_gone_is_named_for_a_while(cluster: FakeCluster) -> None:
    now = [0.0]
    exporters = made(cluster, clock=lambda: now[0])
    del cluster.reports["n2"]
    asyncio.run(exporters.refresh())
    assert "GPU-c" in exporters.places
    assert exporters.missing() == [], "its node is gone with it"
    assert "GPU-c" not in asyncio.run(exporters.ask())
    now[0] = GONE_SECONDS + 1.0
    asyncio.run(exporters.refresh())
    assert "GPU-c" not in exporters.places


def test_a_head_that_died_takes_every_place_with_it(cluster: FakeCluster) -> None:
    exporters = made(cluster)
    exporters.forget_all()
    assert (exporters.places, exporters.reports, exporters.missing()) == ({}, {}, [])


def test_an_exporter_that_hangs_for_long_is_replaced_and_one_that_answers_again_is_not(cluster: FakeCluster) -> None:
    clock = [0.0]
    exporters = made(cluster, report_seconds=0.01, hung_seconds=30.0, clock=lambda: clock[0])
    for uuid in ("GPU-a", "GPU-b"):
        cluster.actors[uuid].hangs = True
    for clock[0] in (0.0, 10.0, 20.0):
        assert set(asyncio.run(exporters.ask())) == {"GPU-c"}
    cluster.actors["GPU-b"].hangs = False
    clock[0] = 25.0
    asyncio.run(exporters.ask())
    cluster.actors["GPU-b"].hangs = True
    clock[0] = 31.0
    asyncio.run(exporters.ask())
    assert cluster.restarted == [cluster.actors["GPU-a"]]
    asyncio.run(exporters.ask())
    assert len(cluster.restarted) == 1, "the new one gets as long"


def test_an_exporter_that_has_not_answered_yet_is_starting_and_not_for_ever(cluster: FakeCluster) -> None:
    now = 0.0
    exporters = Exporters(
        cluster,  # type: ignore[arg-type]  # what it needs of both
        cluster,  # type: ignore[arg-type]
        ExporterAccess(),
        report_seconds=0.01,
        hung_seconds=30.0,
        clock=lambda: now,
    )
    assert exporters.is_starting("GPU-a"), "there is none yet"
    slow = exporters._actors["GPU-a"] = FakeActor(url="http://127.0.0.1:9477/metrics", hangs=True)
    asyncio.run(exporters.ask())
    now = 29.0
    asyncio.run(exporters.ask())
    assert exporters.is_starting("GPU-a")
    now = 31.0
    assert not exporters.is_starting("GPU-a")
    asyncio.run(exporters.ask())
    assert cluster.restarted == [slow]
    assert not exporters.is_starting("GPU-a"), "the one that replaces it has to show that it is better"
