"""A shell's http_proxy does not apply to what orch asks Ray's processes over gRPC, as it does not to Ray's own calls."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest

from orchestrator.runtime.nodes import control_plane
from orchestrator.runtime.nodes.control_plane import _HEALTH_METHOD, _SERVING, RayNode, answers, prestart_workers


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


def test_every_call_goes_there_directly(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    node = RayNode(id="n1", alive=True, hostname="h", address="127.0.0.1", port=port, total={})
    assert answers(node)
    with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
        prestart_workers(node, 1, 60)
    with pytest.raises(TimeoutError, match="no connection to Ray"):
        control_plane.nodes()
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=f"127.0.0.1:{port}"))
    control_plane._channel.cache_clear()
    with pytest.raises(TimeoutError, match="does not answer GetAllNodeInfo: UNIMPLEMENTED"):
        control_plane.nodes()
    control_plane._channel.cache_clear()
