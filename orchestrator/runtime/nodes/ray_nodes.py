"""Queries Ray about its nodes: which exist, what other users hold of them, and whether they answer.

Blocking calls; cluster.py runs them in threads. Must not store or decide anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchestrator.runtime.nodes import control_plane
from orchestrator.spec import token_file

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from orchestrator.runtime.nodes.control_plane import RayNode

HEALTH_SECONDS: Final = 1.5
_HEALTH_TRIES: Final = 2
_HEALTH_METHOD: Final = "/grpc.health.v1.Health/Check"
_SERVING: Final = b"\x08\x01"  # HealthCheckResponse{status: SERVING}
_EPSILON: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Resources of a node that other users hold. Memory in bytes."""

    cpus: float = 0.0
    gpus: float = 0.0
    memory_bytes: int = 0

    def least(self, other: Held) -> Held:
        """Return what both readings report as held."""
        return Held(
            cpus=min(self.cpus, other.cpus),
            gpus=min(self.gpus, other.gpus),
            memory_bytes=min(self.memory_bytes, other.memory_bytes),
        )


NOTHING: Final = Held()


def end_worker(actor: Any, *, restart: bool) -> None:
    """Have a raylet kill an actor's process, which takes 5 s for a stopped one; with ``restart`` Ray starts it again."""
    import ray

    ray.kill(actor, no_restart=not restart)


def list_nodes() -> dict[str, RayNode]:
    """Return every node that Ray lists, dead ones included."""
    return {node.id: node for node in control_plane.nodes()}


def held_by_others(nodes: Mapping[str, RayNode], own_groups: Collection[str]) -> dict[str, Held]:
    """Return what is in use on each live node beyond the placement groups named in ``own_groups``.

    Ray's numbers of free resources lag by a tenth of a second: take the least of two readings.
    """
    own = _reserved(own_groups)
    found = {}
    for node_id, available in control_plane.available().items():
        node = nodes.get(node_id)
        if node is None or not node.alive:
            continue
        mine = own.get(node_id, {})
        left = {
            name: max(0.0, node.total.get(name, 0.0) - available.get(name, 0.0) - mine.get(name, 0.0))
            for name in ("CPU", "GPU", "memory")
        }
        held = Held(cpus=_clean(left["CPU"]), gpus=_clean(left["GPU"]), memory_bytes=int(left["memory"]))
        if held != NOTHING:
            found[node_id] = held
    return found


def _reserved(names: Collection[str]) -> dict[str, dict[str, float]]:
    """Return what placement groups reserve, by node and resource."""
    reserved: dict[str, dict[str, float]] = {}
    for group in control_plane.groups():
        if group.name not in names:
            continue
        for node_id, bundle in group.bundles:
            node = reserved.setdefault(node_id, {})
            for name, amount in bundle.items():
                node[name] = node.get(name, 0.0) + amount
    return reserved


def _clean(amount: float) -> float:
    return round(amount, 4) if amount > _EPSILON else 0.0


def answers(node: RayNode, token: str | None) -> bool:
    """Whether the node's raylet answers gRPC's standard health check, which Ray's control plane uses too."""
    import grpc

    metadata = [("authorization", f"Bearer {token}")] if token else []
    for _ in range(_HEALTH_TRIES):
        try:
            with grpc.insecure_channel(f"{node.address}:{node.port}", control_plane.DIRECTLY) as channel:
                check = channel.unary_unary(_HEALTH_METHOD)
                if check(b"", timeout=HEALTH_SECONDS, metadata=metadata) == _SERVING:
                    return True
        except grpc.RpcError:
            continue
    return False


def is_alive(node_id: str) -> bool:
    """Whether Ray's control plane counts the node as alive. Raises Ray's error when it is out of reach."""
    import ray
    from ray._private.worker import global_worker

    # The typed id matters: given plain bytes, Ray 2.60 crashes with a segmentation fault.
    (alive,) = global_worker.gcs_client.check_alive([ray.NodeID.from_hex(node_id)], timeout=HEALTH_SECONDS)
    return bool(alive)


def token_from(environ: Mapping[str, str]) -> str | None:
    """Return the token that Ray's own clients would use, or None where authentication is off or Ray would fail anyway.

    Raises TokenExposedError.
    """
    if environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return None
    if environ.get("RAY_AUTH_TOKEN"):
        return environ["RAY_AUTH_TOKEN"]
    path = Path(environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return token_file.read(path)
    except token_file.TokenExposedError:
        raise
    except token_file.TokenFileError:
        return None
