"""A GPU that falls off the bus is counted out, and moves no other."""

from __future__ import annotations

from orchestrator.daemon.node_views import GPU_LOST, node_view
from orchestrator.runtime.gpu_holds import still_there
from orchestrator.runtime.node_agent import NodeGpu, NodeReport
from tests.unit.core.builders import node, nodes


def gpus(*uuids: str) -> tuple[NodeGpu, ...]:
    return tuple(NodeGpu(index=i, uuid=uuid, model="H100", simulated=False) for i, uuid in enumerate(uuids))


def report(*uuids: str) -> NodeReport:
    return NodeReport(
        node_id="a",
        hostname="a",
        agent_pid=7,
        version="1",
        python="/p",
        node_dir="/n",
        simulated_node="a",
        home_shared=True,
        home="/h",
        gpus=gpus(*uuids),
        problems=(),
    )


def test_the_others_keep_the_places_that_ray_knows_them_by() -> None:
    first = gpus("G0", "G1", "G2")
    left, lost = still_there(report("G0", "G2"), first)
    assert [(g.index, g.uuid) for g in left.gpus] == [(0, "G0"), (2, "G2")]
    assert [(g.index, g.uuid) for g in lost] == [(1, "G1")]
    back, none = still_there(report("G0", "G1", "G2"), first)
    assert (back.gpus, none) == (first, ())
    assert still_there(report("G0", "new"), first[:1])[0].gpus == first[:1], "Ray does not know what came later"


def test_a_lost_and_a_bad_gpu_are_shown_with_the_reason() -> None:
    left, lost = still_there(report("G0", "G2"), gpus("G0", "G1", "G2"))
    place = nodes(node("a"))
    view = node_view(place["a"], left, [], place, lost=lost, bad={"G2": "2 failures began here"})
    assert [(g.uuid, g.healthy, g.problem) for g in view.gpus] == [
        ("G0", True, ""),
        ("G1", False, GPU_LOST),
        ("G2", False, "2 failures began here"),
    ]
    assert view.agent_pid == 7
