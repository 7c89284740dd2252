"""Nodes are added, polled and dropped; they offer the resources that other programs do not hold."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.runtime.cluster.nodes import Capacity, Held, LastSeen, NodeRegistry, held_by_others, keep_home_token
from orchestrator.runtime.nodes.control_plane import RayNode, answers
from tests.support.nodes import node_report


def raw(*alive: str, dead: tuple[str, ...] = ()) -> dict[str, RayNode]:
    return {
        name: RayNode(
            id=name, alive=name in alive, hostname=name, address="10.0.0.1", port=1, total={"CPU": 4.0, "GPU": 3.0}
        )
        for name in (*alive, *dead)
    }


class Agent:
    def __init__(self, *gpus: str) -> None:
        self.gpus, self.error = gpus, False
        self.report = self._report

    async def _report(self) -> Any:
        if self.error:
            raise RuntimeError("the actor died")
        return node_report(*self.gpus)


class Ray:
    """Runs calls at once; ``agents`` has the agent of each node, ``held`` what others hold in successive rounds."""

    def __init__(self, **agents: Agent) -> None:
        self.agents, self.held, self.deaf = agents, list[dict[str, Held]](), set[str]()

    async def call(self, function: Any, *args: Any) -> Any:
        if function is held_by_others:
            return self.held.pop(0)
        if function is answers:
            return args[0].id not in self.deaf
        return function(*args)


def registry(ray: Ray, *, embedded: bool = False) -> NodeRegistry:
    def make(node_id: str) -> Agent:
        return ray.agents[node_id]

    return NodeRegistry(ray, make, embedded=embedded)  # type: ignore[arg-type]


def test_a_node_is_met_asked_again_and_dropped() -> None:
    async def run() -> None:
        ray = Ray(a=Agent("G0", "G1"), b=Agent())
        nodes = registry(ray)
        await nodes.update(raw("a", "b"))
        assert set(nodes.reports) == {"a", "b"}
        ray.agents["a"].gpus = ("G0",)
        ray.agents["b"].error = True
        await nodes.update(raw("a", "b"))
        assert [gpu.uuid for gpu in nodes.lost_gpus["a"]] == ["G1"]
        assert "b" in nodes.reports, "it keeps its last report: Ray decides whether it lives"
        await nodes.update(raw("a", dead=("b",)))
        assert (set(nodes.reports), set(nodes.agents)) == ({"a"}, {"a"})
        assert nodes.agent_for("b") is None

    asyncio.run(run())


def test_the_one_node_of_an_embedded_head_must_be_met() -> None:
    async def run() -> None:
        broken = Agent()
        broken.error = True
        with pytest.raises(RuntimeError, match="the actor died"):
            await registry(Ray(a=broken), embedded=True).update(raw("a"))
        shared = registry(Ray(a=broken, b=Agent()))
        await shared.update(raw("a", "b"))
        assert set(shared.reports) == {"b"}, "on a shared cluster it holds no other up"
        own = registry(Ray(a=Agent()), embedded=True)
        await own.update(raw("a"))
        assert own.agent_for("an older id of this machine") is own.agents["a"]
        own.forget_all()
        assert (own.agents, own.reports) == ({}, {})

    asyncio.run(run())


def test_what_others_hold_is_believed_when_it_lasts() -> None:
    async def run() -> None:
        ray = Ray(a=Agent("G0", "G1", "G2"))
        nodes = registry(ray)
        await nodes.update(raw("a"))
        holds: Any = SimpleNamespace(held={}, per_node=dict)
        capacity = Capacity(ray, nodes, holds, tuple, LastSeen(None))  # type: ignore[arg-type]
        ray.held = [{"a": Held(cpus=3.0, gpus=1.0)}, {"a": Held(cpus=1.0, gpus=1.0)}]
        await capacity.look_at_others(raw("a"))
        found = capacity.node(raw("a")["a"])
        assert (found.cpus, found.other_cpus, found.gpus, found.other_gpus) == (4.0, 1.0, 3.0, 1.0)
        ray.agents["a"].gpus = ("G0", "G1")
        await nodes.update(raw("a"))
        assert capacity.node(raw("a")["a"]).other_gpus == 2.0, "a lost GPU is free in Ray's numbers"

    asyncio.run(run())


def test_a_node_whose_raylet_does_not_answer_is_not_reachable() -> None:
    async def run() -> None:
        ray = Ray(a=Agent(), b=Agent())
        nodes = registry(ray)
        await nodes.update(raw("a", "b"))
        ray.deaf.add("b")
        await nodes.find_silent(raw("a", "b"))
        holds: Any = SimpleNamespace(held={}, per_node=dict)
        capacity = Capacity(ray, nodes, holds, tuple, LastSeen(None))  # type: ignore[arg-type]
        seen = {name: capacity.node(node).reachable for name, node in raw("a", "b").items()}
        assert seen == {"a": True, "b": False}

    asyncio.run(run())


def test_a_round_ends_when_the_head_whose_agent_it_waits_for_has_died() -> None:
    async def run() -> None:
        asked, agent = asyncio.Event(), Agent()

        async def never() -> Any:
            asked.set()
            await asyncio.Event().wait()

        agent.report = never
        nodes = registry(Ray(a=agent), embedded=True)
        waiting = asyncio.create_task(nodes.update(raw("a")))
        async with asyncio.timeout(300):
            await asked.wait()
            nodes.forget_all()
            await waiting
        assert (nodes.agents, nodes.reports) == ({}, {})

    asyncio.run(run())


@pytest.mark.parametrize("torn", [None, "", "0123"], ids=["none", "empty", "half"])
def test_a_torn_proof_of_the_shared_home_is_made_anew(tmp_path: Path, torn: str | None) -> None:
    path = tmp_path / "jobs" / ".home-token"
    if torn is not None:
        path.parent.mkdir()
        path.write_text(torn)
    made = keep_home_token(path)
    assert len(made) == 32
    assert keep_home_token(path) == path.read_text() == made
