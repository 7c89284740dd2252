"""Places a gang's ranks: all or nothing, by the job's placement strategy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.core.cluster import Free, Node
from orchestrator.core.scheduler.room.timetable import closed_to, plain
from orchestrator.core.scheduler.room.topology import FLAT, gather, topology_of
from orchestrator.core.scheduler.room.vacancy import Slots, Vacancy
from orchestrator.core.spec_memo import SpecMemo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.room.topology import Topology


LEAST_CPUS = 0.001
"""CPUs that a rank without a GPU reserves with ``cpu: 0``. Ray makes no empty reservation, and a node without CPUs only
coordinates."""
_shapes: SpecMemo[Shape] = SpecMemo()


class Shape(NamedTuple):
    """Properties that decide on which nodes a rank of the job fits."""

    size: tuple[float, float, int]
    gpu_model: str | None
    at_home: bool
    nodes: tuple[str, ...]
    labels: tuple[tuple[str, str], ...] = ()


def shape_of(job: Job) -> Shape:
    """Return the shape of the job's ranks."""
    if job.submission.resume_from is not None:  # where it may run depends on more than its spec
        return _shape_of(job)
    return _shapes.of(job.spec, _shape_of, job)


def _shape_of(job: Job) -> Shape:
    resources = job.spec.resources
    model = resources.resources_per_worker.gpu_model
    labels = tuple(sorted(resources.node_labels.items()))
    return Shape(rank_size(job), model, bool(needs_home(job)), tuple(resources.nodes), labels)


def free_on(nodes: Iterable[Node], jobs: Iterable[Job]) -> dict[str, Free]:
    """Return the resources of every schedulable node that open gangs and other users of the cluster leave free."""
    return left_on((n for n in nodes if n.schedulable), jobs)


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


def share_unknown(job: Job) -> bool:
    """Whether the GPUs of the gang's shares are still unknown: then less is free than it seems."""
    return not job.seats and 0 < rank_size(job)[1] < 1


def known_shares(job: Job) -> tuple[str | None, ...]:
    """Return for each rank of an open gang the id of its shared GPU; None with whole GPUs, or while unknown."""
    shared = job.seats and 0 < rank_size(job)[1] < 1
    return tuple(seat.gpu_ids[0] for seat in job.seats) if shared else (None,) * len(job.nodes)


def take(
    job: Job, placed: Sequence[str], free: Mapping[str, Free], shares: Sequence[str | None] | None = None
) -> tuple[str | None, ...]:
    """Count a gang's ranks as placed; return for each rank the name of its shared GPU, which ``shares`` may give."""
    size = rank_size(job)
    known = shares or (None,) * len(placed)
    change = _changing(free)
    return tuple(change(node_id).take(*size, gpu=gpu) for node_id, gpu in zip(placed, known, strict=True))


def give_back(job: Job, placed: Sequence[str], shares: Sequence[str | None], free: Mapping[str, Free]) -> None:
    """Count the gang's ranks as gone, with their shares of GPUs."""
    size = rank_size(job)
    change = _changing(free)
    for node_id, gpu in zip(placed, shares, strict=True):
        change(node_id).give_back(*size, gpu)


def _changing(free: Mapping[str, Free]) -> Callable[[str], Free]:
    return free.changing if isinstance(free, Vacancy) else free.__getitem__


def rank_size(job: Job) -> tuple[float, float, int]:
    """Return CPUs, GPUs and memory (bytes) of one rank, as reserved by the scheduler and requested from Ray."""
    worker = job.spec.resources.resources_per_worker
    cpus = worker.cpu if worker.gpu else max(worker.cpu, LEAST_CPUS)
    return cpus, worker.gpu, worker.memory_bytes or 0


def place(
    job: Job, free: Mapping[str, Free], nodes: Mapping[str, Node], *, ranks: int | None = None, at: float | None = None
) -> tuple[str, ...] | None:
    """Return a node for every rank, in rank order and grouped by node, or None when the gang does not fit.

    ``ranks`` defaults to the fewest that the job runs with. ``at`` is when it starts, by default now: nodes may be reserved.
    """
    wanted = job.size.least if ranks is None else ranks
    if not wanted:
        return None
    slots, strategy = _room(job, free, nodes, at), job.spec.resources.placement_strategy
    several = wanted > 1 and slots.total >= wanted
    return _by_strategy(strategy, wanted, slots, _topology(free, nodes) if several else FLAT)


def _topology(free: Mapping[str, Free], nodes: Mapping[str, Node]) -> Topology:
    return free.topology if isinstance(free, Vacancy) else topology_of(nodes.values())


def has_room(job: Job, placed: Sequence[str], free: Mapping[str, Free], nodes: Mapping[str, Node]) -> bool:
    """Whether ranks of the job fit on these nodes, one for each entry."""
    room = _room(job, free, nodes).of
    return all(room.get(node_id, 0) >= ranks for node_id, ranks in Counter(placed).items())


def capacity(job: Job, free: Mapping[str, Free], nodes: Mapping[str, Node]) -> int:
    """Return the most ranks of the job that ``place`` can place."""
    slots = _room(job, free, nodes)
    match job.spec.resources.placement_strategy:
        case "STRICT_PACK":
            return slots.most
        case "STRICT_SPREAD":
            return len(slots.of)
        case _:
            return slots.total


def _room(job: Job, free: Mapping[str, Free], nodes: Mapping[str, Node], at: float | None = None) -> Slots:
    """Return how many ranks of the job fit on each node that suits it."""
    shape, closed = shape_of(job), closed_to(job, nodes, at)

    def count(node_id: str, left: Free) -> int:
        return _slots(shape, left) if node_id not in closed and suits(shape, nodes[node_id]) else 0

    if isinstance(free, Vacancy):
        return free.slots((shape, closed) if closed else shape, count)
    slots = Slots()
    for node_id, left in free.items():
        slots.put(node_id, count(node_id, left))
    return slots


def could_ever_fit(job: Job, nodes: Mapping[str, Node]) -> bool:
    """Whether the gang would fit if nothing else ran on the nodes that are alive, and none of them were reserved."""
    nodes = plain(nodes)
    return place(job, {n.id: _empty(n) for n in nodes.values() if n.alive}, nodes) is not None


def _empty(node: Node) -> Free:
    return Free(cpus=node.cpus, idle_gpus=round(node.gpus), memory_bytes=node.memory_bytes)


def missing_nodes(job: Job, nodes: Mapping[str, Node]) -> tuple[str, ...]:
    """Return the names of down nodes that could hold a rank, if the gang would fit with them up; else nothing."""
    shape, nodes = shape_of(job), plain(nodes)
    down = {n.name for n in nodes.values() if not n.alive and suits(shape, n) and _slots(shape, _empty(n))}
    back = {n.id: replace(n, alive=True) for n in nodes.values()}
    return tuple(sorted(down)) if down and could_ever_fit(job, back) else ()


def claim(job: Job, free: Mapping[str, Free], nodes: Mapping[str, Node]) -> bool:
    """Reserve what is free for a gang that does not fit yet, so that no later job takes it.

    Returns whether it claimed everything that its ranks fit in.
    """
    shape, slots, closed = shape_of(job), _room(job, free, nodes), closed_to(job, nodes)
    change = _changing(free)
    left = job.size.least
    for node_id in list(_beginning(slots, left)):
        taken = min(left, slots.of[node_id])
        there = change(node_id)
        for _ in range(taken):
            there.take(*shape.size)
        left -= taken
    if left and shape.size[1] > 0:  # the rest of its demand claims GPUs that are left in pieces too small for a rank
        for node_id in free.with_gpus() if isinstance(free, Vacancy) else free:
            if node_id not in closed and suits(shape, nodes[node_id]):
                change(node_id).claim_gpus()
    return left > 0


def _beginning(slots: Slots, ranks: int) -> Iterable[str]:
    """Yield the roomiest nodes until they have room for this many ranks."""
    for node_id in slots.roomiest():
        if ranks <= 0:
            return
        yield node_id
        ranks -= slots.of[node_id]


def needs_home(job: Job) -> str:
    """Return why the job runs only on nodes that share the daemon's home, where its checkpoints are; else ""."""
    if job.spec.checkpoint.storage_path is None:
        return "it has no checkpoint.storage_path, and checkpoints in ORCH_HOME would be lost with the node"
    if job.spec.checkpoint.watch is not None:
        return "the files of checkpoint.watch in its working copy would be lost with the node"
    if job.submission.resume_from is not None and "://" not in job.submission.resume_from:
        return "the checkpoint that it starts from is in ORCH_HOME"
    return ""


def labels_of(job: Job) -> tuple[str, ...]:
    """Return the labels that a node must have for the job, as ``key=value``."""
    return tuple(f"{key}={value}" for key, value in shape_of(job).labels)


def suits(shape: Shape, node: Node) -> bool:
    """Whether ranks of a shape may run on a node, whatever is free there."""
    if shape.at_home and not node.shares_home:
        return False
    if shape.nodes and node.name not in shape.nodes and node.id not in shape.nodes:
        return False
    if any(node.labels.get(key) != value for key, value in shape.labels):
        return False
    model = shape.gpu_model
    if model is None:
        return True
    return any(model.lower() in known.lower() for known in node.gpu_models)


def holds_rank(shape: Shape, node: Node) -> bool:
    """Whether a node suits ranks of a shape, and holds one if nothing else runs there."""
    return suits(shape, node) and _slots(shape, _empty(node)) > 0


def _slots(shape: Shape, left: Free) -> int:
    """Return how many ranks of a shape fit. Each needs a GPU, or a part of a CPU."""
    return left.room(*shape.size) or 0


def _by_strategy(strategy: str, ranks: int, slots: Slots, topology: Topology) -> tuple[str, ...] | None:
    if strategy in ("PACK", "STRICT_PACK"):
        whole = slots.tightest(ranks)
        if whole is not None:  # the fullest node that holds all of it, so that large spaces remain for large jobs
            return (whole,) * ranks
        if strategy == "STRICT_PACK":
            return None
        if slots.total < ranks:
            return None
        return gather(ranks, slots.of, topology, spread=False) if topology else _fill(ranks, slots)
    if topology and len(slots.of) >= ranks:
        return gather(ranks, slots.of, topology, spread=True)
    order = list(slots.roomiest())
    if strategy == "STRICT_SPREAD":
        return tuple(order[:ranks]) if len(order) >= ranks else None
    return _round_robin(order, ranks, slots.of)


def _fill(ranks: int, slots: Slots) -> tuple[str, ...]:
    placed: list[str] = []
    for node_id in slots.roomiest():
        placed.extend([node_id] * min(slots.of[node_id], ranks - len(placed)))
        if len(placed) == ranks:
            break
    return tuple(placed)


def _round_robin(order: Sequence[str], ranks: int, slots: Mapping[str, int]) -> tuple[str, ...] | None:
    counts: Counter[str] = Counter()
    while sum(counts.values()) < ranks:
        before = sum(counts.values())
        for node_id in order:
            if counts[node_id] < slots[node_id] and sum(counts.values()) < ranks:
                counts[node_id] += 1
        if sum(counts.values()) == before:
            return None
    return tuple(node_id for node_id in order for _ in range(counts[node_id]))
