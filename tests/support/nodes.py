"""Reports of a node's agent, for tests that need only a part of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.runtime.nodes.agent import NodeGpu, NodeReport

_PLAIN = NodeReport(
    node_id="a",
    hostname="a",
    agent_pid=7,
    version="1",
    python="/p",
    node_dir="/n",
    simulated_node="a",
    home_shared=True,
    home="/h",
    gpus=(),
    problems=(),
)


def node_report(*uuids: str, **fields: Any) -> NodeReport:
    """Return the report of node ``a``, with GPUs of these UUIDs, except for ``fields``."""
    gpus = tuple(NodeGpu(index=i, uuid=uuid, model="H100", simulated=False) for i, uuid in enumerate(uuids))
    return replace(_PLAIN, gpus=gpus, **fields)
