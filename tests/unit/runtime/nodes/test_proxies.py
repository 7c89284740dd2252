"""A shell's http_proxy does not apply to what orch asks Ray's processes over gRPC, as it does not to Ray's own calls."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from orchestrator.runtime.cluster.prestart import prestart_workers
from orchestrator.runtime.nodes.ray_nodes import _HEALTH_METHOD, _SERVING, answers

from orchestrator.runtime.nodes import control_plane
from orchestrator.runtime.nodes.control_plane import RayNode


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A server that answers health checks, and that every other call finds to lack its method; no proxy answers."""
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    _, service, method = _HEALTH_METHOD.split("/")
    check = grpc.unary_unary_rpc_method_handler(lambda _request, _context: _SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: check}),))
    found = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield found
    server.stop(None).wait()


def test_every_call_goes_there_directly(port: int) -> None:
    from ray.core.generated import gcs_service_pb2

    node = RayNode(id="n1", alive=True, hostname="h", address="127.0.0.1", port=port, total={})
    assert answers(node, None)
    assert "UNIMPLEMENTED" in str(prestart_workers("127.0.0.1", port, 1, None))
    control_plane._channel.cache_clear()
    with pytest.raises(TimeoutError, match="UNIMPLEMENTED"):
        control_plane._ask(f"127.0.0.1:{port}", "NodeInfo", "GetAllNodeInfo", gcs_service_pb2.GetAllNodeInfoRequest())
    control_plane._channel.cache_clear()
