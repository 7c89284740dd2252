"""The cluster's nodes: their agents, what they report, and their capacity; GPUs that are kept from Ray.

An agent is created on each node, queried in each round, and dropped when Ray declares the node dead. Ray keeps a dead node's resources, and gives
a host that joins again a new node id. The data that only agents report, and when they answered, are kept in a file, which outlives the daemon.

Capacity is a node's total, less what other users hold, less lost GPUs. Ray picks the GPU ids and offers no way to exclude one, so a placeholder
actor reserves each GPU that no job may get.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from orchestrator.core.cluster import Node
from orchestrator.core.codec import RecordError, from_plain, to_plain
from orchestrator.durable_files import write_whole
from orchestrator.runtime import remote
from orchestrator.runtime.cluster.connection import CALL_SECONDS
from orchestrator.runtime.deadline import within
from orchestrator.runtime.nodes import control_plane
from orchestrator.runtime.nodes.control_plane import answers, end_worker
from orchestrator.runtime.nodes.directories import SERVICES, agent_name
from orchestrator.runtime.ranks.rank_events import FENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from orchestrator.runtime.cluster.connection import RayConnection
    from orchestrator.runtime.nodes.agent import NodeAgent, NodeGpu, NodeReport
    from orchestrator.runtime.nodes.control_plane import RayNode
    from orchestrator.runtime.nodes.directories import Site

MEET_SECONDS: Final = 10.0  # how long a round waits for new nodes' agents; slower ones are added in a later round
AGAIN_SECONDS: Final = 5.0  # a driver that hangs must not delay reports of other nodes
LATE_SECONDS: Final = 20.0
"""How long an agent may leave all calls unanswered before it is ended; Ray starts another.

Ray notices that a process has ended, not that it is stopped or that all its threads hang.
"""


def keep_home_token(path: Path) -> str:
    """Return the token by which a node proves that it shares the home, and write it; an existing one is kept: agents outlive daemons.

    An empty or torn one is replaced: an agent compares the file's content, which no agent had as its proof.
    """
    token = ""
    try:
        token = path.read_text(errors="replace")
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    if not re.fullmatch(r"[0-9a-f]{32}", token):
        token = secrets.token_hex(16)
        write_whole(path, token.encode())
    return token


def make_agent(site: Site, node_id: str, simulate_gpus: int, home_token: str) -> NodeAgent:
    """Find or create the agent of a node. ``simulate_gpus`` 0 uses its real GPUs. Blocks."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from orchestrator.runtime.nodes.agent import NodeAgent

    handle = (
        ray.remote(NodeAgent)
        .options(
            name=agent_name(node_id),
            namespace=site.namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=64,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
        )
        .remote(
            node_id=node_id,
            node_dir=str(site.node_dir(node_id)),
            simulate_gpus=simulate_gpus,
            home_token=(str(site.home_token), home_token),
        )
    )
    return remote.stub(NodeAgent, handle)


def remove_services(space: str) -> None:
    """End the daemon's own agents and exporters, which are the named actors of its namespace. Blocks."""
    import ray
    from ray.util import list_named_actors

    for name in list_named_actors():
        if name.startswith(SERVICES):
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(name, namespace=space), no_restart=True)


def still_there(report: NodeReport, first: Sequence[NodeGpu]) -> tuple[NodeReport, tuple[NodeGpu, ...]]:
    """Return the report with those of the node's ``first`` GPUs that it still lists, and the GPUs that it no longer lists.

    Ray's GPU ids are positions at the time when the node started: a lost GPU must not shift the ids after it.
    """
    here = {gpu.uuid for gpu in report.gpus}
    gpus = tuple(gpu for gpu in first if gpu.uuid in here)
    return replace(report, gpus=gpus), tuple(gpu for gpu in first if gpu.uuid not in here)


class NodeRegistry:
    """Records of nodes by id: ``agents``, their newest ``reports``, and ``lost_gpus``, lost since the node was added.

    ``silent`` gives the reason for each node that does not answer though Ray counts it as alive. ``answered`` has the
    nodes that reported in the last round. ``make`` finds or creates a node's agent; ``embedded``: there is one node, on
    this machine.
    """

    def __init__(self, ray: RayConnection, make: Callable[[str], NodeAgent], *, embedded: bool) -> None:
        self._ray = ray
        self._make = make
        self._embedded = embedded
        self._late_since: dict[str, float] = {}
        self._meetings: dict[str, asyncio.Task[None]] = {}
        self._first_gpus: dict[str, tuple[NodeGpu, ...]] = {}
        self._dead_since: dict[str, float] = {}
        self.agents: dict[str, NodeAgent] = {}
        self.reports: dict[str, NodeReport] = {}
        self.lost_gpus: dict[str, tuple[NodeGpu, ...]] = {}
        self.silent: dict[str, str] = {}
        self.answered: set[str] = set()

    async def update(self, raw: Mapping[str, RayNode]) -> None:
        """Run one round. Raises the error of an embedded head's only node.

        On an existing cluster an agent that does not answer delays no other node.
        """
        alive = {node_id for node_id, node in raw.items() if node.alive}
        self._drop_dead(set(raw) - alive)
        self.answered.clear()
        known = set(self.reports)
        await self._first_reports(alive)
        await asyncio.gather(*(self._ask_again(node_id) for node_id in known & alive))

    def _drop_dead(self, dead: set[str]) -> None:
        for node_id in dead:
            self._dead_since.setdefault(node_id, time.monotonic())
        for node_id in (set(self.agents) | set(self._meetings)) & dead:
            self.agents.pop(node_id, None)
            self.reports.pop(node_id, None)
            self.lost_gpus.pop(node_id, None)
            if node_id in self._meetings:
                self._meetings.pop(node_id).cancel()

    async def _first_reports(self, alive: set[str]) -> None:
        """Get the first report of every new node."""
        for node_id in alive - set(self.reports) - set(self._meetings):
            self._meetings[node_id] = asyncio.create_task(self._first_report(node_id), name=f"meet-{node_id[:8]}")
        if not self._meetings:
            return
        limit = CALL_SECONDS * 2 if self._embedded else MEET_SECONDS
        done, _ = await asyncio.wait(self._meetings.values(), timeout=limit)
        for node_id in [n for n, task in self._meetings.items() if task in done]:
            error = self._meetings.pop(node_id).exception()
            if error is not None and self._embedded:
                raise error

    async def _first_report(self, node_id: str) -> None:
        try:
            self.agents[node_id] = await self._ray.call(self._make, node_id)
            self.reports[node_id] = await within(CALL_SECONDS, self.agents[node_id].report())
            self.answered.add(node_id)
            self._first_gpus[node_id] = self.reports[node_id].gpus
            self.lost_gpus.pop(node_id, None)
        except BaseException:
            self.agents.pop(node_id, None)
            raise

    async def _ask_again(self, node_id: str) -> None:
        """Get the node's newest report. A node that does not answer keeps its last one: Ray decides liveness."""
        try:
            report = await within(AGAIN_SECONDS, self.agents[node_id].report())
        except Exception as error:
            if isinstance(error, TimeoutError):
                await self._late(node_id)
            return
        self._late_since.pop(node_id, None)
        self.answered.add(node_id)
        if node_id in self.reports:
            self.reports[node_id], self.lost_gpus[node_id] = still_there(report, self._first_gpus[node_id])

    async def _late(self, node_id: str) -> None:
        """Record a missing answer; end the agent after LATE_SECONDS without one, if its node answers.

        A report may wait for a driver that hangs, so a cheaper call is made first.
        """
        since = self._late_since.setdefault(node_id, time.monotonic())
        if time.monotonic() - since < LATE_SECONDS or node_id in self.silent or node_id not in self.agents:
            return
        agent = self.agents[node_id]
        self._late_since.pop(node_id, None)
        with contextlib.suppress(Exception):  # the agent has died meanwhile: Ray starts another
            try:
                await within(AGAIN_SECONDS, agent.reads("/", ""))
            except TimeoutError:
                await self._ray.call(end_worker, agent, restart=True)

    async def find_silent(self, raw: Mapping[str, RayNode]) -> None:
        """Check whether the raylet of every node with an agent answers."""
        wanted = sorted(node_id for node_id, node in raw.items() if node.alive and node_id in self.agents)
        well = await asyncio.gather(*(self._ray.call(answers, raw[node_id]) for node_id in wanted))
        self.silent = {
            node_id: "its raylet does not answer; Ray has not declared it dead yet"
            for node_id, answered in zip(wanted, well, strict=True)
            if not answered
        }

    def agent_for(self, node_id: str) -> NodeAgent | None:
        """Return the agent that answers for a node; an embedded head's node is the same machine under every id."""
        if node_id in self.agents or not self._embedded:
            return self.agents.get(node_id)
        return next(iter(self.agents.values()), None)

    async def until_fenced(self, node_id: str) -> None:
        """Return once a node that Ray has given up can run nothing more: the leases of its rank actors have expired."""
        since = self._dead_since.setdefault(node_id, time.monotonic())
        await asyncio.sleep(max(0.0, since + FENCE_SECONDS - time.monotonic()))

    def forget_all(self) -> None:
        """Drop all nodes: Ray's head has died, and every agent with it."""
        self.agents, self.reports, self.lost_gpus = {}, {}, {}
        for task in self._meetings.values():
            task.cancel()
        self._meetings.clear()

    async def end_meetings(self) -> None:
        """Stop adding nodes."""
        for task in self._meetings.values():
            task.cancel()
        await asyncio.gather(*self._meetings.values(), return_exceptions=True)
        self._meetings.clear()

    async def shut_down(self) -> None:
        """End all agents' processes; on a shared cluster also remove the nodes' directories."""
        await asyncio.gather(*(self._shut_down(agent) for agent in self.agents.values()))

    async def _shut_down(self, agent: NodeAgent) -> None:
        with contextlib.suppress(Exception):  # the agent has already ended
            await within(CALL_SECONDS, agent.shut_down(remove=not self._embedded))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A node as in its agent's newest report. The agent first answered in round ``first``, last in round ``last``."""

    name: str
    shares_home: bool
    gpu_models: tuple[str, ...]
    simulated: bool
    first: int
    last: int


class LastSeen:
    """The newest sighting of every node that Ray still lists, kept in the file ``path``; None: in memory only.

    Rounds are counted from the home's first daemon on: they order events without a clock.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._sightings, self._round = _read(path)
        self._answered: frozenset[str] = frozenset()
        self._unwritten = False

    def get(self, node_id: str) -> Sighting | None:
        """Return how the node was last seen; None when its agent never answered."""
        return self._sightings.get(node_id)

    def note(self, raw: Mapping[str, RayNode], reports: Mapping[str, NodeReport], answered: Collection[str]) -> None:
        """Record a round, in which the agents of ``answered`` reported. A node that Ray no longer lists is removed."""
        self._round += 1
        before = {node_id: replace(seen, last=0) for node_id, seen in self._sightings.items()}
        now_answered = frozenset(answered) & reports.keys() & raw.keys()
        for node_id in now_answered:
            self._sightings[node_id] = self._sighting(node_id, reports[node_id])
        self._sightings = {node_id: seen for node_id, seen in self._sightings.items() if node_id in raw}
        after = {node_id: replace(seen, last=0) for node_id, seen in self._sightings.items()}
        # The last round of a node is written when it no longer answers, not in each round.
        self._unwritten = self._unwritten or before != after or now_answered != self._answered
        self._answered = now_answered

    def _sighting(self, node_id: str, report: NodeReport) -> Sighting:
        known = self._sightings.get(node_id)
        return Sighting(
            name=report.hostname,
            shares_home=report.home_shared,
            gpu_models=tuple(sorted({gpu.model for gpu in report.gpus})),
            simulated=any(gpu.simulated for gpu in report.gpus),
            first=known.first if known else self._round,
            last=self._round,
        )

    def write(self) -> None:
        """Write the file if it is out of date. Blocks. On a full disk, a later call writes it."""
        if self._path is None or not self._unwritten:
            return
        nodes = {node_id: to_plain(seen) for node_id, seen in self._sightings.items()}
        with contextlib.suppress(OSError):
            write_whole(self._path, json.dumps({"round": self._round, "nodes": nodes}).encode())
            self._unwritten = False

    def superseded(self, raw: Mapping[str, RayNode]) -> set[str]:
        """Return the dead nodes that another node on the same host has replaced.

        Raylets that were up at the same time are different nodes, also where they share a host. A raylet that started
        on a host after another had ended takes the place of that one, and of no other.
        """
        hosts: dict[tuple[str, str], list[RayNode]] = {}
        for node in sorted(raw.values(), key=lambda node: (node.started, node.id)):
            hosts.setdefault((node.hostname, node.address), []).append(node)
        gone: set[str] = set()
        for joined in hosts.values():
            places: list[RayNode] = []
            for node in joined:
                left = [other for other in places if self._ended_before(other, node)]
                if left:
                    before = max(left, key=lambda other: (_size(other) == _size(node), other.started))
                    places.remove(before)
                    gone.add(before.id)
                places.append(node)
        return gone

    def _ended_before(self, one: RayNode, other: RayNode) -> bool:
        """Whether ``one`` ended before ``other`` joined: by their agents' answers, or else by Ray's times."""
        if one.alive:
            return False
        seen, then = self._sightings.get(one.id), self._sightings.get(other.id)
        if seen is not None and then is not None:
            return seen.last < then.first
        return 0 < one.ended <= other.started


def _size(node: RayNode) -> tuple[float, float]:
    return node.total.get("CPU", 0.0), node.total.get("GPU", 0.0)


def _read(path: Path | None) -> tuple[dict[str, Sighting], int]:
    """Return what an earlier daemon wrote; nothing if the file is damaged, which affects only dead nodes."""
    if path is None:
        return {}, 0
    try:
        stored: Any = json.loads(path.read_text())
        return {node_id: from_plain(Sighting, seen) for node_id, seen in stored["nodes"].items()}, int(stored["round"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecordError):
        return {}, 0


SETTLE_SECONDS: Final = 0.3  # Ray's own numbers lag by less
TAKE_SECONDS: Final = 10.0
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


class Capacity:
    """Computes free capacity. ``own_groups`` names this daemon's placement groups; all other use belongs to other users.

    A node that is down keeps its last known resources: jobs that fit only there wait for it.
    """

    def __init__(
        self,
        ray: RayConnection,
        nodes: NodeRegistry,
        holds: GpuReservations,
        own_groups: Callable[[], Collection[str]],
        seen: LastSeen,
    ) -> None:
        self._ray = ray
        self._nodes = nodes
        self._holds = holds
        self._own_groups = own_groups
        self._seen = seen
        self._others: dict[str, Held] = {}

    async def look_at_others(self, raw: Mapping[str, RayNode]) -> None:
        """Update what other users hold. A change counts once a second reading, SETTLE_SECONDS later, confirms it."""
        others: dict[str, Held] = await self._ray.call(held_by_others, raw, self._own_groups())
        if others == self._others:
            return
        await asyncio.sleep(SETTLE_SECONDS)
        again: dict[str, Held] = await self._ray.call(held_by_others, raw, self._own_groups())
        self._others = {node_id: held.least(again.get(node_id, NOTHING)) for node_id, held in others.items()}

    def nodes(self, raw: Mapping[str, RayNode]) -> dict[str, Node]:
        """Return the nodes as the scheduler sees them, without dead ones that have joined again under another id."""
        superseded = self._seen.superseded(raw)
        return {node_id: self.node(node) for node_id, node in raw.items() if node_id not in superseded}

    def node(self, raw: RayNode) -> Node:
        """Return the node as the scheduler sees it."""
        if raw.id not in self._nodes.reports:
            return self._down(raw)
        report, held = self._nodes.reports[raw.id], self._others.get(raw.id, NOTHING)
        return Node(
            id=raw.id,
            name=report.hostname,
            alive=raw.alive,
            reachable=raw.id not in self._nodes.silent,
            shares_home=report.home_shared,
            cpus=raw.total.get("CPU", 0.0),
            gpus=raw.total.get("GPU", 0.0),
            memory_bytes=int(raw.total.get("memory", 0)),
            other_cpus=held.cpus,
            # Ray's numbers include the GPUs that this daemon has reserved.
            other_gpus=max(held.gpus, self._holds.per_node().get(raw.id, 0)) + self._lost_and_free(raw.id),
            other_memory_bytes=held.memory_bytes,
            gpu_models=tuple(sorted({g.model for g in report.gpus})),
            simulated=any(g.simulated for g in report.gpus),
        )

    def _down(self, raw: RayNode) -> Node:
        """Return a node that is dead, or whose agent has not answered yet, as it was last seen."""
        seen = self._seen.get(raw.id)
        return Node(
            id=raw.id,
            name=seen.name if seen else raw.hostname,
            alive=False,
            reachable=raw.id not in self._nodes.silent,
            shares_home=seen is None or seen.shares_home,
            cpus=raw.total.get("CPU", 0.0),
            gpus=raw.total.get("GPU", 0.0),
            memory_bytes=int(raw.total.get("memory", 0)),
            gpu_models=seen.gpu_models if seen else (),
            simulated=bool(seen and seen.simulated),
        )

    def _lost_and_free(self, node_id: str) -> int:
        return sum(gpu.uuid not in self._holds.held for gpu in self._nodes.lost_gpus.get(node_id, ()))


class _Placeholder:
    """Placeholder actor that reserves a GPU."""

    def gpu_ids(self) -> list[str]:
        """Return Ray's ids of this actor's GPUs."""
        import ray

        return [str(i) for i in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


class GpuReservations:
    """Creates and ends placeholder actors. ``held`` maps each reserved GPU to its node. Decides nothing.

    Actors with one GPU each are created until one of them has the GPU in question; it stays, and the others end at once.
    Ray ends the actors with this daemon's connection; the next daemon creates its own.
    """

    def __init__(self, ray: RayConnection) -> None:
        self._ray = ray
        self._placeholders: dict[str, Any] = {}
        self._serial = asyncio.Lock()
        self.held: dict[str, str] = {}

    def per_node(self) -> Mapping[str, int]:
        """Return how many GPUs are reserved on each node."""
        return Counter(self.held.values())

    def forget_all(self) -> None:
        """Drop all reservations: Ray's head has died, and every actor with it."""
        self._placeholders.clear()
        self.held.clear()

    async def keep(self, wanted: Mapping[str, tuple[str, NodeGpu, int]]) -> bool:
        """Reserve exactly these GPUs (by UUID: node, GPU, GPUs of the node); return whether anything changed.

        A GPU that is in use cannot be reserved: call again later.
        """
        async with self._serial:
            changed = False
            for uuid in self.held.keys() - wanted.keys():
                del self.held[uuid]
                await self._end(self._placeholders.pop(uuid))
                changed = True
            for uuid in wanted.keys() - self.held.keys():
                node_id, gpu, count = wanted[uuid]
                placeholder = await self._take(node_id, str(gpu.index), count)
                if placeholder is not None:
                    self._placeholders[uuid], self.held[uuid] = placeholder, node_id
                    changed = True
            return changed

    async def _take(self, node_id: str, index: str, count: int) -> Any:
        others = []
        try:
            for _ in range(count):
                placeholder = await self._ray.call(_make, node_id)
                try:
                    ids = await within(TAKE_SECONDS, placeholder.gpu_ids.remote())
                except Exception:  # no GPU is free, or the node is gone
                    others.append(placeholder)
                    return None
                if index in ids:
                    return placeholder
                others.append(placeholder)
            return None
        finally:
            for other in others:
                await self._end(other)

    async def _end(self, placeholder: Any) -> None:
        import ray

        await self._ray.call(ray.kill, placeholder)


def _make(node_id: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    return ray.remote(_Placeholder).options(num_cpus=0, num_gpus=1, scheduling_strategy=strategy).remote()
