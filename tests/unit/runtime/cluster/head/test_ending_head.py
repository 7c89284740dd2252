"""A head whose control plane has closed its port while its processes still exist."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from orchestrator.runtime.cluster.cluster import Cluster, ClusterOptions
from orchestrator.runtime.cluster.head.embedded import EmbeddedHead
from orchestrator.runtime.cluster.head.processes import Head
from orchestrator.spec.settings import Settings


@pytest.fixture
def port() -> Iterator[socket.socket]:
    listening = socket.create_server(("127.0.0.1", 0))
    yield listening
    listening.close()


def cluster_on(home: Path, port: socket.socket, lost: list[str]) -> Cluster:
    """A connected cluster whose control plane listens on ``port``."""
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


def test_an_existing_cluster_is_left_to_ray(tmp_path: Path) -> None:
    async def run() -> None:
        lost: list[str] = []
        paths = Settings.from_environ({"ORCH_HOME": str(tmp_path)}).paths
        cluster = Cluster(paths, ClusterOptions(address="127.0.0.1:1"), on_lost=lambda: lost.append("lost"))
        cluster.ray.opened()
        await cluster.check_head()
        assert (lost, cluster.connected) == ([], True)

    asyncio.run(run())
