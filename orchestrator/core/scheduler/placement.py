"""Places a gang's ranks: all or nothing, by the job's placement strategy. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.core.cluster import Free, Node
from orchestrator.core.facts.nodes import Closure, NodeClosed
from orchestrator.core.facts.requesters import ByNodeDrain
from orchestrator.core.scheduler.reservations import closed_to, plain
from orchestrator.core.scheduler.resources import FreeNodes, rank_size, topology_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.resources import Group, Topology

MOST_NAMED: Final = 16
"""Maximum number of closed nodes named to a job."""


class Shape(NamedTuple):
    """Properties that decide on which nodes a rank of the job fits."""

    size: tuple[float, float, int]
    gpu_model: str | None
    at_home: bool
    nodes: tuple[str, ...]
    labels: tuple[tuple[str, str], ...] = ()


def shape_of(job: Job) -> Shape:
    """Return the shape of the job's ranks."""
    resources = job.spec.resources
    labels = tuple(sorted(resources.node_labels.items())) if resources.node_labels else ()
    model = resources.resources_per_worker.gpu_model
    return Shape(rank_size(job), model, bool(needs_home(job)), tuple(resources.nodes), labels)


def needs_home(job: Job) -> str:
    """Return why the job runs only on nodes that share the daemon's home, where its checkpoints are; else ""."""
    if job.spec.checkpoint.storage_path is None:
        return "it has no checkpoint.storage_path, and checkpoints in ORCH_HOME would be lost with the node"
    if job.spec.checkpoint.watch is not None:
        return "the files of checkpoint.watch in its working copy would be lost with the node"
    if job.submission.resume_from is not None and "://" not in job.submission.resume_from:
        return "the checkpoint that it starts from is in ORCH_HOME"
    return ""


def suits(shape: Shape, node: Node) -> bool:
    """Whether ranks of a shape may run on a node, whatever is free there."""
    if shape.at_home and not node.shares_home:
        return False
    if shape.nodes and node.name not in shape.nodes and node.id not in shape.nodes:
        return False
    if any(node.labels.get(key) != value for key, value in shape.labels):
        return False
    model = shape.gpu_model
    return model is None or any(model.lower() in known.lower() for known in node.gpu_models)


def place(
    job: Job, free: FreeNodes, nodes: Mapping[str, Node], *, ranks: int | None = None, at: float | None = None
) -> tuple[str, ...] | None:
    """Return a node for every rank, in rank order and grouped by node, or None when the gang does not fit.

    ``ranks`` defaults to the fewest that the job runs with. ``at`` is when it starts, by default now: nodes may be reserved.
    """
    wanted = job.size.least if ranks is None else ranks
    slots = _slots(job, free, nodes, at) if wanted else {}
    if not slots:
        return None
    strategy, packs = job.spec.resources.placement_strategy, job.spec.resources.placement_strategy.endswith("PACK")
    whole = min(((room, i) for i, room in slots.items() if room >= wanted), default=None) if packs else None
    if whole is not None:  # the fullest node that holds all of it, so that large spaces remain for large jobs
        return (whole[1],) * wanted
    several = len(slots) >= wanted
    if strategy == "STRICT_PACK" or sum(slots.values()) < wanted or (strategy == "STRICT_SPREAD" and not several):
        return None
    if free.topology and wanted > 1 and (packs or several):
        return gather(wanted, slots, free.topology, spread=not packs)
    roomiest = sorted(slots, key=lambda i: (-slots[i], i))
    return _fill(wanted, slots, roomiest) if packs else _in_turn(wanted, slots, roomiest)


def capacity(job: Job, free: FreeNodes, nodes: Mapping[str, Node]) -> int:
    """Return the most ranks of the job that ``place`` can place."""
    slots = _slots(job, free, nodes)
    match job.spec.resources.placement_strategy:
        case "STRICT_PACK":
            return max(slots.values(), default=0)
        case "STRICT_SPREAD":
            return len(slots)
        case _:
            return sum(slots.values())


def claim(job: Job, free: FreeNodes, nodes: Mapping[str, Node]) -> bool:
    """Reserve what is free for a gang that does not fit yet, so that no later job takes it.

    Returns whether it claimed everything that its ranks fit in.
    """
    shape, closed, left = shape_of(job), closed_to(job, nodes), job.size.least
    slots = dict(_slots(job, free, nodes))
    for node_id in sorted(slots, key=lambda i: (-slots[i], i)):
        for _ in range(min(left, slots[node_id])):
            free.changing(node_id).take(*shape.size)
            left -= 1
    if left and shape.size[1] > 0:  # the rest of its demand claims GPUs that are left in pieces too small for a rank
        for node_id in [i for i, there in free.items() if there.gpus > 0]:
            if node_id not in closed and suits(shape, nodes[node_id]):
                free.changing(node_id).claim_gpus()
    return left > 0


def could_ever_fit(job: Job, nodes: Mapping[str, Node]) -> bool:
    """Whether the gang would fit if nothing else ran on the nodes that are alive, and none of them were reserved."""
    nodes = plain(nodes)
    empty = FreeNodes({n.id: _empty(n) for n in nodes.values() if n.alive}, topology_of(nodes.values()))
    return place(job, empty, nodes) is not None


def missing_nodes(job: Job, nodes: Mapping[str, Node]) -> tuple[str, ...]:
    """Return the names of down nodes that could hold a rank, if the gang would fit with them up; else nothing."""
    shape, nodes = shape_of(job), plain(nodes)
    down = {n.name for n in nodes.values() if not n.alive and holds_rank(shape, n)}
    back = {n.id: replace(n, alive=True) for n in nodes.values()}
    return tuple(sorted(down)) if down and could_ever_fit(job, back) else ()


def holds_rank(shape: Shape, node: Node) -> bool:
    """Whether a node suits ranks of a shape, and holds one if nothing else runs there."""
    return suits(shape, node) and bool(_empty(node).room(*shape.size))


def labels_of(job: Job) -> tuple[str, ...]:
    """Return the labels that a node must have for the job, as ``key=value``."""
    return tuple(f"{key}={value}" for key, value in shape_of(job).labels)


def closure_of(node: Node, jobs: Iterable[Job]) -> Closure | None:
    """Return why a node accepts no new ranks; None if it does. Some of ``jobs`` may be leaving it because it drains."""
    if not node.alive:
        return Closure.DOWN
    if not node.reachable:
        return Closure.UNREACHABLE
    if node.cordoned:
        drains = any(j.stop is not None and isinstance(j.stop.by, ByNodeDrain) and node.id in j.nodes for j in jobs)
        return Closure.DRAINING if drains else Closure.CORDONED
    return None if node.quarantined is None else Closure.QUARANTINED


def closed_for(job: Job, nodes: Iterable[Node], jobs: Iterable[Job]) -> tuple[NodeClosed, ...]:
    """Return those of ``nodes``, which accept no new ranks, that would suit a job; reservations are a reason of their own."""
    found: list[NodeClosed] = []
    shape = shape_of(job)
    for node in nodes:
        if len(found) < MOST_NAMED and holds_rank(shape, node):
            state = closure_of(node, jobs)
            found += [] if state is None else [NodeClosed(node=node.name, state=state)]
    return tuple(found)


def gather(ranks: int, room: Mapping[str, int], topology: Topology, *, spread: bool, level: int = 0) -> tuple[str, ...]:
    """Return the nodes for ``ranks`` ranks in as few groups as possible; with ``spread`` each rank on another node.

    ``room`` is how many ranks fit on each node. Groups that are needed whole are the roomiest; the last one is the
    tightest that holds the rest.
    """
    inner: dict[Group, dict[str, int]] = {}
    for node_id, count in room.items():
        known = topology.get(node_id, ())
        if known and level == len(known):
            return _on_nodes(ranks, room, spread=spread)
        inner.setdefault(known[level] if known else ("", node_id), {})[node_id] = count
    sizes = {group: len(there) if spread else sum(there.values()) for group, there in inner.items()}
    placed: tuple[str, ...] = ()
    while ranks:
        whole = [(size, group) for group, size in sizes.items() if size >= ranks]
        group = min(whole)[1] if whole else min(sizes, key=lambda one: (-sizes[one], one))
        taken, there = min(ranks, sizes.pop(group)), inner[group]
        if len(there) > 1:
            placed += gather(taken, there, topology, spread=spread, level=level + 1)
        else:
            placed += _on_nodes(taken, there, spread=spread)
        ranks -= taken
    return placed


def _slots(job: Job, free: FreeNodes, nodes: Mapping[str, Node], at: float | None = None) -> dict[str, int]:
    """Return how many ranks of the job fit on each node that suits it."""
    shape, closed = shape_of(job), closed_to(job, nodes, at)

    def count(node_id: str, left: Free) -> int:
        if node_id in closed or not suits(shape, nodes[node_id]):
            return 0
        return left.room(*shape.size) or 0

    return free.slots((shape, closed), count)


def _empty(node: Node) -> Free:
    return Free(cpus=node.cpus, idle_gpus=round(node.gpus), memory_bytes=node.memory_bytes)


def _on_nodes(ranks: int, room: Mapping[str, int], *, spread: bool) -> tuple[str, ...]:
    """Return the nodes for ranks in one group: the tightest node that holds all of them, else the roomiest ones."""
    roomiest = sorted(room, key=lambda i: (-room[i], i))
    if spread:
        return tuple(roomiest[:ranks])
    whole = [(count, i) for i, count in room.items() if count >= ranks]
    return (min(whole)[1],) * ranks if whole else _fill(ranks, room, roomiest)


def _fill(ranks: int, room: Mapping[str, int], order: Sequence[str]) -> tuple[str, ...]:
    placed: list[str] = []
    for node_id in order:
        placed.extend([node_id] * min(room[node_id], ranks - len(placed)))
        if len(placed) == ranks:
            break
    return tuple(placed)


def _in_turn(ranks: int, room: Mapping[str, int], order: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes with one rank on each in turn, as long as there is room; ``room`` is enough for all."""
    counts: Counter[str] = Counter()
    left = ranks
    while left:
        for node_id in order:
            if left and counts[node_id] < room[node_id]:
                counts[node_id] += 1
                left -= 1
    return tuple(node_id for node_id in order for _ in range(counts[node_id]))
