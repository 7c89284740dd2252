"""A GPU that falls off the bus is not counted, and the other GPUs keep their numbers."""

from __future__ import annotations

from orchestrator.core.facts.fact import UnreadableFact
from orchestrator.daemon.gpus import gpu_conditions
from orchestrator.daemon.nodes.requests import node_view
from orchestrator.runtime.cluster.nodes import still_there
from tests.support.nodes import node_report
from tests.unit.core.builders import node, nodes


def test_the_others_keep_the_places_that_ray_knows_them_by() -> None:
    first = node_report("G0", "G1", "G2").gpus
    left, lost = still_there(node_report("G0", "G2"), first)
    assert [(g.index, g.uuid) for g in left.gpus] == [(0, "G0"), (2, "G2")]
    assert [(g.index, g.uuid) for g in lost] == [(1, "G1")]
    back, none = still_there(node_report("G0", "G1", "G2"), first)
    assert (back.gpus, none) == (first, ())
    assert still_there(node_report("G0", "new"), first[:1])[0].gpus == first[:1], "Ray does not know what came later"


def test_a_lost_and_a_bad_gpu_are_shown_with_the_reason() -> None:
    left, lost = still_there(node_report("G0", "G2"), node_report("G0", "G1", "G2").gpus)
    place = nodes(node("a"))
    held = {"G2": UnreadableFact(text="2 failures began here")}
    conditions = gpu_conditions(["G0", "G1", "G2"], lost={"G1"}, quarantined=held, reports={})
    view = node_view(place["a"], left, [], lost=lost, conditions=conditions)
    assert [(g.uuid, g.healthy, g.condition, g.problem) for g in view.gpus] == [
        ("G0", True, "ok", ""),
        ("G1", False, "lost", "the driver no longer has this GPU; reset it or restart the node"),
        ("G2", False, "quarantined", "quarantined: 2 failures began here"),
    ]
    assert [cause["kind"] for gpu in view.gpus for cause in gpu.causes] == ["gpu_lost", "gpu_quarantined"]
    assert view.agent_pid == 7
