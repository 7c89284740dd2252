"""Calls Ray's control plane (the GCS of its head) over gRPC. Every call has a deadline and raises TimeoutError.

Ray's own ``ray.nodes``, ``placement_group_table``, ``get_placement_group`` and ``available_resources_per_node`` must not be
called in the daemon. They wait for a dead head without a deadline, and end the whole process when the answer is an
error, as it is when another gRPC server has taken the dead head's port.

Needs the GCS's messages (``ray.core.generated``) and ``ray._private.grpc_utils``, which are internal to Ray: only this module uses
them, and ``tests/integration/test_ray_internals.py`` fails when a new Ray breaks it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

ANSWER_SECONDS: Final = 20.0
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


def nodes() -> list[RayNode]:
    """Return every node that Ray lists, dead ones included."""
    from ray.core.generated import gcs_pb2, gcs_service_pb2

    reply = _ask(_address(), "NodeInfo", "GetAllNodeInfo", gcs_service_pb2.GetAllNodeInfoRequest())
    return [
        RayNode(
            id=raw.node_id.hex(),
            alive=raw.state == gcs_pb2.GcsNodeInfo.ALIVE,
            hostname=raw.node_manager_hostname,
            address=raw.node_manager_address,
            port=raw.node_manager_port,
            total=dict(raw.resources_total),
            started=raw.start_time_ms,
            ended=raw.end_time_ms,
        )
        for raw in reply.node_info_list
    ]


def available() -> dict[str, dict[str, float]]:
    """Return free resources, by node and Ray's resource names; they lag by a tenth of a second."""
    from ray.core.generated import gcs_service_pb2

    request = gcs_service_pb2.GetAllAvailableResourcesRequest()
    reply = _ask(_address(), "NodeResourceInfo", "GetAllAvailableResources", request)
    return {raw.node_id.hex(): dict(raw.resources_available) for raw in reply.resources_list}


def groups() -> list[RayGroup]:
    """Return every placement group of every user."""
    from ray.core.generated import gcs_service_pb2

    request = gcs_service_pb2.GetAllPlacementGroupRequest()
    reply = _ask(_address(), "PlacementGroupInfo", "GetAllPlacementGroup", request)
    return [_group(raw) for raw in reply.placement_group_table_data if not _removed(raw)]


def group(name: str, namespace: str) -> RayGroup | None:
    """Return the placement group of that name, or None."""
    from ray.core.generated import gcs_service_pb2

    request = gcs_service_pb2.GetNamedPlacementGroupRequest(name=name, ray_namespace=namespace)
    reply = _ask(_address(), "PlacementGroupInfo", "GetNamedPlacementGroup", request)
    raw = reply.placement_group_table_data
    return _group(raw) if raw.placement_group_id and not _removed(raw) else None


def _group(raw: Any) -> RayGroup:
    return RayGroup(
        id=raw.placement_group_id,
        name=raw.name,
        bundles=tuple((bundle.node_id.hex(), dict(bundle.unit_resources)) for bundle in raw.bundles),
    )


def _removed(raw: Any) -> bool:
    from ray.core.generated import gcs_pb2

    return bool(raw.state == gcs_pb2.PlacementGroupTableData.REMOVED)


def _address() -> str:
    from ray._private.worker import global_worker

    if not global_worker.connected:
        raise TimeoutError("there is no connection to Ray")
    return str(global_worker.gcs_client.address)


def _ask(address: str, service: str, method: str, request: Any) -> Any:
    """Return the reply of ``service``'s ``method``. Raises TimeoutError for any failure."""
    import grpc
    from ray.core.generated import gcs_service_pb2_grpc

    stub = getattr(gcs_service_pb2_grpc, f"{service}GcsServiceStub")(_channel(address))
    try:
        # A head that restarts on the same port answers within the deadline.
        reply = getattr(stub, method)(request, timeout=ANSWER_SECONDS, wait_for_ready=True)
    except grpc.RpcError as error:
        raise TimeoutError(f"Ray's control plane at {address} does not answer {method}: {error.code().name}") from error
    if reply.status.code:
        raise TimeoutError(f"Ray's control plane at {address} refuses {method}: {reply.status.message}")
    return reply


@functools.lru_cache(maxsize=1)
def _channel(address: str) -> Any:
    """Return the channel to the head, with the token and the certificates of Ray's own clients.

    A daemon has one head at a time: the channel to the previous head closes with its last call.
    """
    from ray._private.grpc_utils import init_grpc_channel

    return init_grpc_channel(address, DIRECTLY)
