"""Places a gang's ranks: all or nothing, by the job's placement strategy."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from orchestrator.core.cluster import Free, Node

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from orchestrator.core.job.record import Job


LEAST_CPUS = 0.001
"""What a rank without a GPU reserves with ``cpu: 0``. Ray reserves nothing that is empty, and a node without CPUs only
coordinates."""


def free_on(nodes: Iterable[Node], jobs: Iterable[Job]) -> dict[str, Free]:
    """Return the free resources of every schedulable node, beside open gangs and other users of the cluster."""
    free = {n.id: Free.of(n) for n in nodes if n.schedulable}
    # Whole GPUs and known shares come first: the others get what Ray would give them beside these, in any order.
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
    return tuple(free[node_id].take(*size, gpu=gpu) for node_id, gpu in zip(placed, known, strict=True))


def give_back(job: Job, placed: Sequence[str], shares: Sequence[str | None], free: Mapping[str, Free]) -> None:
    """Count the gang's ranks as gone, with their shares of GPUs."""
    size = rank_size(job)
    for node_id, gpu in zip(placed, shares, strict=True):
        free[node_id].give_back(*size, gpu)


def rank_size(job: Job) -> tuple[float, float, int]:
    """Return CPUs, GPUs and memory (bytes) of one rank, as reserved by the scheduler and requested from Ray."""
    worker = job.spec.resources.resources_per_worker
    cpus = worker.cpu if worker.gpu else max(worker.cpu, LEAST_CPUS)
    return cpus, worker.gpu, worker.memory_bytes or 0


def place(
    job: Job, free: Mapping[str, Free], nodes: Mapping[str, Node], *, ranks: int | None = None
) -> tuple[str, ...] | None:
    """Return a node for every rank, in rank order and grouped by node, or None when the gang does not fit now.

    ``ranks`` defaults to the fewest that the job runs with.
    """
    wanted = job.size.least if ranks is None else ranks
    return _by_strategy(job.spec.resources.placement_strategy, wanted, _room(job, free, nodes)) if wanted else None


def capacity(job: Job, free: Mapping[str, Free], nodes: Mapping[str, Node]) -> int:
    """Return the most ranks of the job that ``place`` can place."""
    slots = _room(job, free, nodes)
    match job.spec.resources.placement_strategy:
        case "STRICT_PACK":
            return max(slots.values(), default=0)
        case "STRICT_SPREAD":
            return len(slots)
        case _:
            return sum(slots.values())


def _room(job: Job, free: Mapping[str, Free], nodes: Mapping[str, Node]) -> dict[str, int]:
    slots = {node_id: _slots(job, left) for node_id, left in free.items() if _suits(job, nodes[node_id])}
    return {node_id: count for node_id, count in slots.items() if count > 0}


def could_ever_fit(job: Job, nodes: Mapping[str, Node]) -> bool:
    """Whether the gang would fit if nothing else ran on the nodes that are alive."""
    empty = {
        n.id: Free(cpus=n.cpus, idle_gpus=round(n.gpus), memory_bytes=n.memory_bytes) for n in nodes.values() if n.alive
    }
    return place(job, empty, nodes) is not None


def claim(job: Job, free: Mapping[str, Free], nodes: Mapping[str, Node]) -> bool:
    """Reserve what is free for a gang that does not fit yet, so that no later job takes it.

    Returns whether it claimed everything that its ranks fit in.
    """
    size = rank_size(job)
    left = job.size.least
    for node_id in sorted(free, key=lambda n: -_slots(job, free[n])):
        if not _suits(job, nodes[node_id]):
            continue
        while left and free[node_id].room(*size) != 0:
            free[node_id].take(*size)
            left -= 1
    if left:  # the rest of its demand claims GPUs that are left in pieces too small for a rank
        for node_id, node_free in free.items():
            if _suits(job, nodes[node_id]) and size[1] > 0:
                node_free.claim_gpus()
    return left > 0


def needs_home(job: Job) -> str:
    """Return why the job runs only on nodes that share the daemon's home: its checkpoints lie there; or nothing."""
    if job.spec.checkpoint.storage_path is None:
        return "it has no checkpoint.storage_path, and checkpoints in ORCH_HOME would be lost with the node"
    if job.spec.checkpoint.watch is not None:
        return "what checkpoint.watch finds in its working copy would be lost with the node"
    if job.submission.resume_from is not None and "://" not in job.submission.resume_from:
        return "the checkpoint that it begins with lies in ORCH_HOME"
    return ""


def _suits(job: Job, node: Node) -> bool:
    if not node.shares_home and needs_home(job):
        return False
    pinned = job.spec.resources.nodes
    if pinned and node.name not in pinned and node.id not in pinned:
        return False
    model = job.spec.resources.resources_per_worker.gpu_model
    if model is None:
        return True
    return any(model.lower() in known.lower() for known in node.gpu_models)


def _slots(job: Job, left: Free) -> int:
    """Return how many of the job's ranks fit; its maximum when they need nothing."""
    room = left.room(*rank_size(job))
    return job.size.most if room is None else room


def _by_strategy(strategy: str, ranks: int, slots: Mapping[str, int]) -> tuple[str, ...] | None:
    order = sorted(slots, key=lambda n: (-slots[n], n))
    if strategy in ("PACK", "STRICT_PACK"):
        whole = [n for n in order if slots[n] >= ranks]
        if whole:  # the fullest node that holds all of it, so that large spaces stay for large jobs
            return (min(whole, key=lambda n: (slots[n], n)),) * ranks
        if strategy == "STRICT_PACK":
            return None
        return _fill(order, ranks, slots)
    if strategy == "STRICT_SPREAD":
        return tuple(order[:ranks]) if len(order) >= ranks else None
    return _round_robin(order, ranks, slots)


def _fill(order: Sequence[str], ranks: int, slots: Mapping[str, int]) -> tuple[str, ...] | None:
    placed: list[str] = []
    for node_id in order:
        placed.extend([node_id] * min(slots[node_id], ranks - len(placed)))
    return tuple(placed) if len(placed) == ranks else None


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
