"""Keeps idle Ray worker processes warm, so that a rank actor answers in 0.1 s instead of 0.5 s.

Uses the raylet's ``PrestartWorkers`` call, which is internal to Ray; no other module uses it. When it fails,
actors merely start slower. ``tests/integration/test_ray_internals.py`` fails when a new Ray breaks it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import psutil

from orchestrator.runtime.cluster.head.processes import of_session
from orchestrator.runtime.nodes.control_plane import DIRECTLY
from orchestrator.runtime.nodes.ray_nodes import list_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping

KEEP_ALIVE_SECONDS = 24 * 3600
GUEST_KEEP_ALIVE_SECONDS = 600  # then an existing cluster gets its memory back
_DEADLINE_SECONDS = 5.0


def prestart(count: int, raylet_pid: int, token: str | None) -> None:
    """Keep ``count`` idle workers under the raylet of an embedded head. Blocks.

    Only the missing ones are requested: Ray adds what is requested to what exists, and a restarted daemon finds the
    workers of the one before.
    """
    lacking = count - idle_workers(raylet_pid)
    for node in list_nodes().values():
        if lacking > 0 and node.alive:
            prestart_workers(node.address, node.port, lacking, token)


def prestart_as_guest(counts: Mapping[str, int] | int, token: str | None) -> None:
    """Start idle workers on nodes of an existing cluster: ``counts`` by node, or the same number on every node. Blocks."""
    for node in list_nodes().values():
        count = counts if isinstance(counts, int) else counts.get(node.id, 0)
        if count > 0 and node.alive and node.total.get("CPU"):  # a head without CPUs takes no ranks
            prestart_workers(node.address, node.port, count, token, GUEST_KEEP_ALIVE_SECONDS)


def idle_workers(raylet_pid: int) -> int:
    """Return how many workers of a raylet on this machine are idle or starting; 0 when the raylet has ended."""
    count = 0
    for process in of_session(raylet_pid):
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            count += "ray::IDLE" in line or "default_worker.py" in line
    return count


def prestart_workers(
    address: str, port: int, count: int, token: str | None, keep_alive_seconds: int = KEEP_ALIVE_SECONDS
) -> str | None:
    """Request ``count`` more idle Python workers from the raylet at ``address:port``. Returns the error, or None."""
    try:
        import grpc
        from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc

        request = node_manager_pb2.PrestartWorkersRequest(
            language=common_pb2.PYTHON, num_workers=count, keep_alive_duration_secs=keep_alive_seconds
        )
        metadata: list[tuple[str, str]] = [("authorization", f"Bearer {token}")] if token else []
        channel: Any
        with grpc.insecure_channel(f"{address}:{port}", DIRECTLY) as channel:
            stub = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
            stub.PrestartWorkers(request, metadata=metadata, timeout=_DEADLINE_SECONDS)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
