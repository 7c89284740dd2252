"""Places a gang's ranks, all or nothing, by the job's placement strategy; free resources of nodes, and their reservations. Pure.

While a node is reserved for maintenance, nothing runs there. Before, a gang is placed there only if it is expected to end in time, by
its ``max_duration`` or by what is known of such jobs (``durations.py``). A job of which nothing is known is not expected to end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.core.cluster import Free, Node
from orchestrator.core.facts.faults import Closure, NodeClosed
from orchestrator.core.facts.reasons import ByNodeDrain, NodeReserved

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from orchestrator.core.cluster import Node, NodeReservation
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.durations import RunTimes

LEAST_CPUS: Final = 0.001
"""CPUs that a rank without a GPU reserves with ``cpu: 0``. Ray makes no empty reservation, and a node without CPUs only
coordinates."""
TOPOLOGY: Final = "topology."
"""Nodes with the same value of a label with this prefix are a group: a rack, a switch, a zone."""
Group = tuple[str, str]
Topology = Mapping[str, tuple[Group, ...]]
"""The group of each labelled node on each level, the widest first; empty where all nodes are equally near."""
_MAX_SHAPES: Final = 64


class Sums(NamedTuple):
    """Free GPUs of all nodes, shared ones included, free whole GPUs, and free CPUs."""

    gpus: float = 0.0
    whole: float = 0.0
    cpus: float = 0.0


class FreeNodes(Mapping[str, Free]):
    """Free resources by node. They change only through ``changing`` and ``put``; ``restore`` undoes what followed ``begin``.

    ``slots`` remembers how many ranks of a shape fit on each node, and counts again only on nodes that have changed.
    """

    def __init__(self, free: Mapping[str, Free] | None = None, topology: Topology | None = None) -> None:
        self.topology: Topology = topology or {}
        self._free = dict(free or {})
        self._before: list[dict[str, Free]] = []
        self._slots: dict[Hashable, tuple[dict[str, int], set[str]]] = {}
        self._sums: Sums | None = None

    def __getitem__(self, node_id: str) -> Free:
        return self._free[node_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._free)

    def __len__(self) -> int:
        return len(self._free)

    def copy(self) -> FreeNodes:
        """Return an independent copy."""
        found = FreeNodes({node_id: left.copy() for node_id, left in self._free.items()}, self.topology)
        found._slots = {shape: (dict(counts), set(changed)) for shape, (counts, changed) in self._slots.items()}
        found._sums = self._sums
        return found

    def put(self, node_id: str, left: Free | None) -> None:
        """Set what is free on a node; None: it accepts no new ranks."""
        if left is None:
            self._free.pop(node_id, None)
        else:
            self._free[node_id] = left
        self._touch(node_id)

    def changing(self, node_id: str) -> Free:
        """Return what is free on a node, for the caller to change at once."""
        left = self._free[node_id]
        if self._before and node_id not in self._before[-1]:
            self._before[-1][node_id] = left.copy()
        self._touch(node_id)
        return left

    def begin(self) -> None:
        """Keep the former values of what is changed from now on."""
        self._before.append({})

    def restore(self) -> None:
        """Undo what was changed since the last ``begin``."""
        for node_id, left in self._before.pop().items():
            self.put(node_id, left)

    def slots(self, shape: Hashable, count: Callable[[str, Free], int]) -> dict[str, int]:
        """Return the nodes with room for ranks of a shape, and for how many; ``count`` returns it for one node."""
        if shape not in self._slots:
            if len(self._slots) >= _MAX_SHAPES:
                self._slots.clear()
            self._slots[shape] = {}, set(self._free)
        counts, changed = self._slots[shape]
        for node_id in changed:
            ranks = count(node_id, self._free[node_id]) if node_id in self._free else 0
            if ranks:
                counts[node_id] = ranks
            else:
                counts.pop(node_id, None)
        changed.clear()
        return counts

    def sums(self) -> Sums:
        """Return the sums over the nodes."""
        if self._sums is None:
            gpus = whole = cpus = 0.0
            for left in self._free.values():
                cpus += max(0.0, left.cpus)
                if left.idle_gpus > 0 or left.shares:
                    gpus += max(0.0, left.gpus)
                    whole += max(0, left.idle_gpus)
            self._sums = Sums(gpus, whole, cpus)
        return self._sums

    def _touch(self, node_id: str) -> None:
        self._sums = None
        for _, changed in self._slots.values():
            changed.add(node_id)


def topology_of(nodes: Iterable[Node]) -> Topology:
    """Return the groups of nodes. The label with the fewest values is the widest level, and the others divide its groups.

    A node without a label of a level is a group of its own.
    """
    labelled = [node for node in nodes if node.labels and any(key.startswith(TOPOLOGY) for key in node.labels)]
    values: dict[str, set[str]] = {}
    for node in labelled:
        for key, value in node.labels.items():
            if key.startswith(TOPOLOGY):
                values.setdefault(key, set()).add(value)
    levels = sorted(values, key=lambda key: (len(values[key]), key))
    return {
        node.id: tuple((node.labels[key], "") if key in node.labels else ("", node.id) for key in levels)
        for node in labelled
    }


def free_on(nodes: Iterable[Node], jobs: Iterable[Job]) -> FreeNodes:
    """Return the resources of every schedulable node that open gangs and other users of the cluster leave free."""
    known = list(nodes)
    return FreeNodes(left_on((n for n in known if n.schedulable), jobs), topology_of(known))


def left_on(nodes: Iterable[Node], jobs: Iterable[Job]) -> dict[str, Free]:
    """Return the resources of every node, schedulable or not, that open gangs and other users leave free."""
    free = {n.id: Free.of(n) for n in nodes}
    # Whole GPUs and known shares are taken first; the others then get what Ray would give them, in any order.
    holding = [job for job in jobs if job.gang_open]
    for job in sorted(holding, key=lambda job: (share_unknown(job), -rank_size(job)[1], job.submission.sequence)):
        size = rank_size(job)
        for node_id, gpu in zip(job.nodes, known_shares(job), strict=True):
            if node_id in free:
                free[node_id].take(*size, gpu=gpu)
    return free


def rank_size(job: Job) -> tuple[float, float, int]:
    """Return CPUs, GPUs and memory (bytes) of one rank, as reserved by the scheduler and requested from Ray."""
    worker = job.spec.resources.resources_per_worker
    cpus = worker.cpu if worker.gpu else max(worker.cpu, LEAST_CPUS)
    return cpus, worker.gpu, worker.memory_bytes or 0


def share_unknown(job: Job) -> bool:
    """Whether the GPUs of the gang's shares are still unknown: then less is free than it seems."""
    return not job.seats and 0 < rank_size(job)[1] < 1


def known_shares(job: Job) -> tuple[str | None, ...]:
    """Return for each rank of an open gang the id of its shared GPU; None with whole GPUs, or while unknown."""
    shared = job.seats and 0 < rank_size(job)[1] < 1
    return tuple(seat.gpu_ids[0] for seat in job.seats) if shared else (None,) * len(job.nodes)


def take(
    job: Job, placed: Sequence[str], free: FreeNodes, shares: Sequence[str | None] | None = None
) -> tuple[str | None, ...]:
    """Count a gang's ranks as placed; return for each rank the name of its shared GPU, which ``shares`` may give."""
    size = rank_size(job)
    known = shares or (None,) * len(placed)
    return tuple(free.changing(node_id).take(*size, gpu=gpu) for node_id, gpu in zip(placed, known, strict=True))


def give_back(job: Job, placed: Sequence[str], shares: Sequence[str | None], free: FreeNodes) -> None:
    """Count the gang's ranks as gone, with their shares of GPUs."""
    size = rank_size(job)
    for node_id, gpu in zip(placed, shares, strict=True):
        free.changing(node_id).give_back(*size, gpu)


def vacate(job: Job, free: FreeNodes) -> None:
    """Give back what a job holds on the nodes that accept new ranks."""
    there = [(node_id, gpu) for node_id, gpu in zip(job.nodes, known_shares(job), strict=True) if node_id in free]
    give_back(job, [node_id for node_id, _ in there], [gpu for _, gpu in there], free)


def occupy(job: Job, free: FreeNodes) -> None:
    """Undo ``vacate``."""
    there = [(node_id, gpu) for node_id, gpu in zip(job.nodes, known_shares(job), strict=True) if node_id in free]
    take(job, [node_id for node_id, _ in there], free, [gpu for _, gpu in there])


class ReservedNodes(Mapping[str, "Node"]):
    """Nodes, some of them with reservations, as they are at a time; ``plain`` has them without their reservations.

    ``closed`` are those on which nothing runs now, with the reservation of each.
    """

    def __init__(self, nodes: Mapping[str, Node], at: float, run_times: RunTimes) -> None:
        self.plain = nodes
        self._at = at
        self._run_times = run_times
        self._reserved = {node_id: node.reservations for node_id, node in nodes.items() if node.reservations}
        begun = {i: [r for r in there if r.start <= at < r.end] for i, there in self._reserved.items()}
        self.closed: Mapping[str, NodeReservation] = {i: there[0] for i, there in begun.items() if there}
        self._nodes = {i: replace(n, reserved=self.closed[i]) if i in self.closed else n for i, n in nodes.items()}

    def __getitem__(self, node_id: str) -> Node:
        return self._nodes[node_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def closed_to(self, job: Job, at: float | None = None) -> frozenset[str]:
        """Return the nodes on which a job that starts at a time, by default now, would still run when they are reserved."""
        start = self._at if at is None else at
        left = self._run_times.left(job, start)
        end = inf if left is None else start + left.seconds
        return frozenset(
            node_id
            for node_id, reservations in self._reserved.items()
            if any(one.start < end and one.end > start for one in reservations)
        )

    def why(self, job: Job, node_ids: frozenset[str]) -> tuple[NodeReserved, ...]:
        """Return the reservations that keep a job from nodes, the first of each, in order of time."""
        left = self._run_times.left(job, self._at)
        found = []
        for node_id in node_ids:
            one = min((r for r in self._reserved[node_id] if r.end > self._at), key=lambda r: (r.start, r.id))
            found.append(
                NodeReserved(
                    node=self._nodes[node_id].name,
                    start=one.start,
                    end=one.end,
                    said=one.reason,
                    seconds=None if left is None else left.seconds,
                    begun=node_id in self.closed,
                )
            )
        return tuple(sorted(found, key=lambda fact: (fact.start, fact.node)))

    def ends(self) -> list[float]:
        """Return when the coming reservations of nodes that are not reserved now end, in order."""
        later = (r for i, reservations in self._reserved.items() if i not in self.closed for r in reservations)
        return sorted({one.end for one in later if one.end > self._at})

    def next_change(self) -> float | None:
        """Return when the next reservation begins or ends."""
        times = [at for known in self._reserved.values() for one in known for at in (one.start, one.end)]
        return min((at for at in times if at > self._at), default=None)


def nodes_at(nodes: Mapping[str, Node], at: float, run_times: RunTimes) -> Mapping[str, Node]:
    """Return the nodes as they are at a time; ``nodes`` itself if none has a reservation."""
    reserved = any(node.reservations for node in nodes.values())
    return ReservedNodes(nodes, at, run_times) if reserved else nodes


def plain(nodes: Mapping[str, Node]) -> Mapping[str, Node]:
    """Return the nodes without their reservations."""
    return nodes.plain if isinstance(nodes, ReservedNodes) else nodes


def closed_to(job: Job, nodes: Mapping[str, Node], at: float | None = None) -> frozenset[str]:
    """Return the nodes on which a job may not start at a time, by default now, because they will be reserved."""
    return nodes.closed_to(job, at) if isinstance(nodes, ReservedNodes) else frozenset()


MAX_NAMED: Final = 16
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
        if len(found) < MAX_NAMED and holds_rank(shape, node):
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
