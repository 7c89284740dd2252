"""Free resources of the nodes, and what gangs take from them and give back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.core.cluster import Free

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.job.record import Job

LEAST_CPUS: Final = 0.001
"""CPUs that a rank without a GPU reserves with ``cpu: 0``. Ray makes no empty reservation, and a node without CPUs only
coordinates."""
TOPOLOGY: Final = "topology."
"""Nodes with the same value of a label with this prefix are a group: a rack, a switch, a zone."""
Group = tuple[str, str]
Topology = Mapping[str, tuple[Group, ...]]
"""The group of each labelled node on each level, the widest first; empty where all nodes are equally near."""
_MOST_SHAPES: Final = 64


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
            if len(self._slots) >= _MOST_SHAPES:
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
