"""Nodes that are down are shown as they were, and a host that has joined again is listed once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.runtime.cluster.nodes import Capacity, LastSeen
from orchestrator.runtime.nodes.control_plane import RayNode
from tests.support.nodes import node_report
from tests.support.records import replace

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.core.cluster import Node


class Host:
    """Raylets of some hosts, as Ray lists them, and the daemon's view of them after each round."""

    def __init__(self, file: Path | None = None) -> None:
        self.seen = LastSeen(file)
        self.raw: dict[str, RayNode] = {}
        self.reports: dict[str, Any] = {}

    def joins(self, node_id: str, *, hostname: str = "h", cpus: float = 4.0, address: str = "", at: int = 0) -> None:
        self.raw[node_id] = RayNode(
            id=node_id,
            alive=True,
            hostname=hostname,
            address=address or f"address of {hostname}",
            port=1,
            total={"CPU": cpus, "GPU": 2.0, "memory": 8e9},
            started=at or len(self.raw) + 1,
        )

    def dies(self, node_id: str, at: int = 0) -> None:
        self.raw[node_id] = replace(self.raw[node_id], alive=False, ended=at or 1_000)

    def round(self, *silent: str) -> dict[str, Node]:
        """Run a round in which all living raylets but ``silent`` answer."""
        alive = [node for node in self.raw.values() if node.alive]
        self.reports = {node.id: node_report("G", node_id=node.id, hostname=node.hostname) for node in alive}
        self.seen.note(self.raw, self.reports, {node.id for node in alive} - set(silent))
        self.seen.write()
        return self.nodes()

    def nodes(self) -> dict[str, Node]:
        known: Any = SimpleNamespace(reports=self.reports, silent={}, lost_gpus={})
        holds: Any = SimpleNamespace(held={}, per_node=dict)
        unused: Any = None
        return Capacity(unused, known, holds, tuple, self.seen).nodes(self.raw)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "nodes.json"


@pytest.mark.parametrize("restarted", [False, True], ids=["the same daemon", "the next daemon"])
def test_a_node_that_is_down_has_what_it_had(file: Path, *, restarted: bool) -> None:
    host = Host(file)
    host.joins("a")
    alive = host.round()["a"]
    if restarted:
        host.seen = LastSeen(file)
    host.dies("a")
    down = host.round()["a"]
    assert down == replace(alive, alive=False)
    assert (down.cpus, down.gpus, down.memory_bytes, down.gpu_models) == (4.0, 2.0, 8_000_000_000, ("H100",))


@pytest.mark.parametrize("restarted", [False, True], ids=["the same daemon", "the next daemon"])
@pytest.mark.parametrize("noticed", [False, True], ids=["before its death is noticed", "after"])
def test_a_host_that_has_joined_again_is_there_once(file: Path, *, noticed: bool, restarted: bool) -> None:
    host = Host(file)
    host.joins("its first id")
    host.joins("other", hostname="other")
    host.round()
    if noticed:
        host.dies("its first id")
        assert set(host.round()) == {"its first id", "other"}
    host.joins("its second id")
    if restarted:
        host.seen = LastSeen(file)
    host.round("its first id")
    host.dies("its first id")
    assert set(host.round()) == {"its second id", "other"}
    host.dies("its second id")
    assert set(host.round()) == {"its second id", "other"}
    host.joins("its third id")
    assert set(host.round()) == {"its third id", "other"}


@pytest.mark.parametrize("restarted", [False, True], ids=["the same daemon", "the next daemon"])
def test_raylets_that_share_a_host_are_different_nodes(file: Path, *, restarted: bool) -> None:
    host = Host(file)
    host.joins("a")
    host.joins("b")
    host.joins("c", cpus=8.0)
    host.round()
    host.dies("a")
    host.dies("c")
    if restarted:
        host.seen = LastSeen(file)
    assert set(host.round()) == {"a", "b", "c"}, "one that was up beside them took no place of theirs"
    host.joins("d")
    assert set(host.round()) == {"b", "c", "d"}, "a new one took one place, that of its size"
    host.joins("e")
    assert set(host.round()) == {"b", "d", "e"}
    host.joins("f")
    assert set(host.round()) == {"b", "d", "e", "f"}


def test_hosts_of_one_name_are_told_apart_by_their_addresses() -> None:
    host = Host()
    host.joins("a", address="10.0.0.1")
    host.round()
    host.dies("a")
    host.joins("b", address="10.0.0.2")
    assert set(host.round()) == {"a", "b"}


def test_of_nodes_that_died_before_the_first_daemon_ray_tells_the_times() -> None:
    host = Host()
    for node_id, began, ended in (("old", 10, 20), ("beside", 15, 40), ("new", 30, 0)):
        host.joins(node_id, at=began)
        if ended:
            host.dies(node_id, at=ended)
    assert set(host.round()) == {"beside", "new"}


def test_what_ray_has_forgotten_is_forgotten(file: Path) -> None:
    host = Host(file)
    host.joins("a")
    host.joins("b", hostname="b")
    host.round()
    del host.raw["a"]
    host.round()
    assert LastSeen(file).get("a") is None
    assert LastSeen(file).get("b") == host.seen.get("b")


@pytest.mark.parametrize("text", ["", "[]", '{"nodes": 3}', '{"round": 1, "nodes": {"a": {"name": 1}}}', "\xff{"])
def test_a_damaged_record_is_as_none(file: Path, text: str) -> None:
    file.write_text(text, encoding="latin-1")
    host = Host(file)
    host.joins("a")
    assert set(host.round()) == {"a"}
    assert LastSeen(file).get("a") is not None


def test_the_record_is_written_when_something_has_changed(file: Path) -> None:
    host = Host(file)
    host.joins("a")
    host.round()
    file.unlink()
    host.round()
    assert not file.exists()
    host.round("a")
    assert file.exists()
