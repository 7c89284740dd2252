"""The number of idle workers that an embedded head is requested to keep."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.runtime.cluster import cluster as module
from orchestrator.runtime.cluster.cluster import Cluster, ClusterOptions
from orchestrator.spec.paths import Paths


@pytest.mark.parametrize(("placed", "kept"), [(None, 2), ({"a": 1}, 2), ({"a": 5}, 5)])
def test_an_embedded_head_keeps_as_many_as_it_began_with_or_as_the_gang_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placed: dict[str, int] | None, kept: int
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(module, "prestart", lambda count, raylet, _token: asked.append((count, raylet)))

    async def run() -> None:
        cluster = Cluster(
            Paths(home=tmp_path, socket=tmp_path / "s"), ClusterOptions(warm_workers=2), on_lost=lambda: None
        )
        head: Any = SimpleNamespace(raylet_pid=4711)
        cluster._head = head
        await cluster.warm(placed)
        assert asked == [], "Ray is not connected"
        cluster.ray.opened()
        await cluster.warm(placed)

    asyncio.run(run())
    assert asked == [(kept, 4711)]
