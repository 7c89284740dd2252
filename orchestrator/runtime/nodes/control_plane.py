"""Calls Ray's control plane (the GCS of its head) and the nodes' raylets over gRPC. Every call has a deadline.

Ray's own ``ray.nodes``, ``placement_group_table``, ``get_placement_group`` and ``available_resources_per_node`` must not be
called in the daemon. They wait for a dead head without a deadline, and end the whole process when the answer is an
error, as it is when another gRPC server has taken the dead head's port.

Needs Ray's messages (``ray.core.generated``), ``ray._private.grpc_utils`` and an upload of ``ray._private.runtime_env``, which are internal to Ray: only this module uses
them, and ``tests/integration/test_ray_internals.py`` fails when a new Ray breaks it. The channels have the token and the
certificates of Ray's own clients, which read them from the environment.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from orchestrator.runtime.remote import handle_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

ANSWER_SECONDS: Final = 20.0
HEALTH_SECONDS: Final = 1.5
PRESTART_SECONDS: Final = 5.0
_HEALTH_TRIES: Final = 2
_HEALTH_METHOD: Final = "/grpc.health.v1.Health/Check"
_SERVING: Final = b"\x08\x01"  # HealthCheckResponse{status: SERVING}
DIRECTLY: Final = (("grpc.enable_http_proxy", 0),)
"""Options of every gRPC channel: as in Ray's own, a shell's http_proxy does not apply between the nodes of a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node as Ray's control plane lists it. ``total`` is by Ray's resource names, memory in bytes.

    A dead node keeps its last ``total``. ``started`` is by the node's clock, ``ended`` (0 while it is alive) by the
    head's, in milliseconds since the epoch.
    """

    id: str
    alive: bool
    hostname: str
    address: str
    port: int
    total: Mapping[str, float]
    started: int = 0
    ended: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RayGroup:
    """A placement group that has not been removed. ``bundles``: the node (empty until placed) and resources of each."""

    id: bytes
    name: str
    bundles: tuple[tuple[str, Mapping[str, float]], ...]


def nodes() -> dict[str, RayNode]:
    """Return every node that Ray lists, dead ones included, by id."""
    from ray.core.generated import gcs_service_pb2

    reply = _ask("NodeInfo", "GetAllNodeInfo", gcs_service_pb2.GetAllNodeInfoRequest())
    return {
        raw.node_id.hex(): RayNode(
            id=raw.node_id.hex(),
            alive=raw.state == raw.ALIVE,
            hostname=raw.node_manager_hostname,
            address=raw.node_manager_address,
            port=raw.node_manager_port,
            total=dict(raw.resources_total),
            started=raw.start_time_ms,
            ended=raw.end_time_ms,
        )
        for raw in reply.node_info_list
    }


def is_alive(node_id: str) -> bool:
    """Whether the control plane counts the node as alive."""
    from ray.core.generated import gcs_service_pb2

    request = gcs_service_pb2.CheckAliveRequest(node_ids=[bytes.fromhex(node_id)])
    return bool(_ask("NodeInfo", "CheckAlive", request, seconds=HEALTH_SECONDS).raylet_alive[0])


def available() -> dict[str, dict[str, float]]:
    """Return free resources, by node and Ray's resource names; they lag by a tenth of a second."""
    from ray.core.generated import gcs_service_pb2

    request = gcs_service_pb2.GetAllAvailableResourcesRequest()
    reply = _ask("NodeResourceInfo", "GetAllAvailableResources", request)
    return {raw.node_id.hex(): dict(raw.resources_available) for raw in reply.resources_list}


def groups() -> list[RayGroup]:
    """Return every placement group of every user."""
    from ray.core.generated import gcs_service_pb2

    request = gcs_service_pb2.GetAllPlacementGroupRequest()
    reply = _ask("PlacementGroupInfo", "GetAllPlacementGroup", request)
    return [_group(raw) for raw in reply.placement_group_table_data if not _removed(raw)]


def group(name: str, namespace: str) -> RayGroup | None:
    """Return the placement group of that name, or None."""
    from ray.core.generated import gcs_service_pb2

    request = gcs_service_pb2.GetNamedPlacementGroupRequest(name=name, ray_namespace=namespace)
    reply = _ask("PlacementGroupInfo", "GetNamedPlacementGroup", request)
    raw = reply.placement_group_table_data
    return _group(raw) if raw.placement_group_id and not _removed(raw) else None


def _group(raw: Any) -> RayGroup:
    return RayGroup(
        id=raw.placement_group_id,
        name=raw.name,
        bundles=tuple((bundle.node_id.hex(), dict(bundle.unit_resources)) for bundle in raw.bundles),
    )


def _removed(raw: Any) -> bool:
    return bool(raw.state == raw.REMOVED)


def answers(node: RayNode) -> bool:
    """Whether the node's raylet answers gRPC's standard health check, which Ray's control plane uses too."""
    import grpc

    for _ in range(_HEALTH_TRIES):
        try:
            with _new_channel(f"{node.address}:{node.port}") as channel:
                if channel.unary_unary(_HEALTH_METHOD)(b"", timeout=HEALTH_SECONDS) == _SERVING:
                    return True
        except grpc.RpcError:
            continue
    return False


def prestart_workers(node: RayNode, count: int, keep_alive_seconds: int) -> None:
    """Request ``count`` more idle Python workers from the node's raylet. Raises gRPC's error."""
    from ray.core.generated import node_manager_pb2

    request = node_manager_pb2.PrestartWorkersRequest(num_workers=count, keep_alive_duration_secs=keep_alive_seconds)
    with _new_channel(f"{node.address}:{node.port}") as channel:
        _method(channel, "NodeManager", "PrestartWorkers", node_manager_pb2)(request, timeout=PRESTART_SECONDS)


def end_worker(actor: Any, *, restart: bool) -> None:
    """Have a raylet kill the process of one of orch's actors, which takes 5 s for a stopped one; with ``restart`` Ray starts it again."""
    import ray

    ray.kill(handle_of(actor), no_restart=not restart)


def _ask(service: str, method: str, request: Any, *, seconds: float = ANSWER_SECONDS) -> Any:
    """Return the control plane's reply. Raises TimeoutError for any failure."""
    import grpc
    import ray
    from ray.core.generated import gcs_service_pb2

    if not ray.is_initialized():
        raise TimeoutError("there is no connection to Ray")
    address = ray.get_runtime_context().gcs_address
    call = _method(_channel(address), f"{service}Gcs", method, gcs_service_pb2)
    try:
        # A head that restarts on the same port answers within the deadline.
        reply = call(request, timeout=seconds, wait_for_ready=True)
    except grpc.RpcError as error:
        raise TimeoutError(f"Ray's control plane at {address} does not answer {method}: {error.code().name}") from error
    if reply.status.code:
        raise TimeoutError(f"Ray's control plane at {address} refuses {method}: {reply.status.message}")
    return reply


def _method(channel: Any, service: str, method: str, messages: Any) -> Any:
    return channel.unary_unary(
        f"/ray.rpc.{service}Service/{method}",
        request_serializer=lambda request: request.SerializeToString(),
        response_deserializer=getattr(messages, f"{method}Reply").FromString,
    )


@functools.lru_cache(maxsize=1)
def _channel(address: str) -> Any:
    """Return the channel to the head. A daemon has one head at a time: that to the previous one closes with its last call."""
    return _new_channel(address)


def _new_channel(address: str) -> Any:
    from ray._private.grpc_utils import init_grpc_channel

    return init_grpc_channel(address, DIRECTLY)


def upload_modules(paths: Sequence[str], scratch: Path) -> dict[str, Any]:
    """Upload modules that the cluster lacks; return the part of a ``runtime_env`` that names them. Blocks.

    Ray documents no way to upload them for one actor. ``tests/integration/test_ray_cluster.py`` fails when a new Ray breaks it.
    """
    from ray._private.runtime_env.py_modules import upload_py_modules_if_needed

    found: dict[str, Any] = upload_py_modules_if_needed(
        {"py_modules": list(paths)}, include_gitignore=True, scratch_dir=str(scratch)
    )
    return found
