"""A head with a control plane that has closed its port while its processes still exist."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from orchestrator.runtime.cluster.head.embedded import EmbeddedHead
from orchestrator.runtime.cluster.head.processes import Head, write_head

from orchestrator.runtime.cluster import cluster as cluster_module
from orchestrator.runtime.cluster.cluster import Cluster, ClusterOptions
from orchestrator.runtime.nodes.control_plane import RayNode
from orchestrator.spec.settings import Settings


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
    cluster._head._head = Head(gcs_address=f"127.0.0.1:{port.getsockname()[1]}", session_dir="/nowhere", pids={})
    cluster.ray.opened()
    return cluster


def test_a_head_is_ending_when_nothing_listens_at_its_address(port: socket.socket) -> None:
    head = EmbeddedHead(Mock(), num_cpus=None, simulate_gpus=0, on_died=lambda: None)
    assert not asyncio.run(head.is_ending()), "there is none"
    head._head = Head(gcs_address=f"127.0.0.1:{port.getsockname()[1]}", session_dir="/nowhere", pids={})
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
        monkeypatch.setattr(cluster_module, "list_nodes", listed)
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


def test_a_head_of_an_earlier_daemon_that_is_ending_is_not_taken(tmp_path: Path, port: socket.socket) -> None:
    site = Mock(head_file=tmp_path / "head.json", paths=Mock(ray=tmp_path))
    write_head(site.head_file, Head(gcs_address=f"127.0.0.1:{port.getsockname()[1]}", session_dir="/nowhere", pids={}))
    head = EmbeddedHead(site, num_cpus=None, simulate_gpus=0, on_died=lambda: None)
    assert asyncio.run(head._find()) is not None
    port.close()
    assert asyncio.run(head._find()) is None
