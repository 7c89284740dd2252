"""Free resources of the nodes, with an index by shape of rank, so that finding a place takes a few look-ups. Pure.

A change updates only what depends on its node. A round may change anything: ``begin`` keeps the former values of
changed nodes, and ``restore`` puts them back. So no decision copies all nodes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from orchestrator.core.cluster import Free
from orchestrator.core.scheduler.room.topology import FLAT, Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

MOST_INDEXES: Final = 64
"""Maximum number of shapes with an index; the one that was requested longest ago is dropped."""
_BLOCK: Final = 32


class Slots:
    """Numbers of ranks of one shape that fit, by node, and nodes by that number. Nodes without room are left out."""

    __slots__ = ("_by_count", "_counts", "dirty", "of", "total")

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self.total = 0
        self.dirty: set[str] = set()
        self._counts: list[int] = []
        self._by_count: dict[int, list[str]] = {}

    def put(self, node_id: str, count: int) -> None:
        """Set how many ranks fit on a node."""
        before = self.of.get(node_id, 0)
        if before == count:
            return
        self.total += count - before
        if before:
            nodes = self._by_count[before]
            del nodes[bisect_left(nodes, node_id)]
            if not nodes:
                del self._by_count[before]
                del self._counts[bisect_left(self._counts, before)]
        if not count:
            del self.of[node_id]
            return
        self.of[node_id] = count
        if count not in self._by_count:
            self._by_count[count] = []
            insort(self._counts, count)
        insort(self._by_count[count], node_id)

    @property
    def most(self) -> int:
        """Return the most ranks that fit on one node."""
        return self._counts[-1] if self._counts else 0

    def tightest(self, ranks: int) -> str | None:
        """Return the node with the least room that holds ``ranks``, of equals the first by id; None without one."""
        at = bisect_left(self._counts, ranks)
        return self._by_count[self._counts[at]][0] if at < len(self._counts) else None

    def roomiest(self) -> Iterator[str]:
        """Return the nodes, those with the most room first, equals by id."""
        for count in reversed(self._counts):
            yield from self._by_count[count]


class Vacancy(Mapping[str, Free]):
    """The free resources of nodes. They are changed only through ``changing`` and ``put``."""

    def __init__(self, free: Mapping[str, Free] | None = None, topology: Topology = FLAT) -> None:
        self.topology = topology
        self._free: dict[str, Free] = {}
        self._saved: list[dict[str, Free]] = []
        self._indexes: dict[Hashable, Slots] = {}
        self._blocks: list[list[str]] = []
        self._block_of: dict[str, int] = {}
        self._sums: list[tuple[float, float, float]] = []
        self._stale: set[int] = set()
        for node_id, left in (free or {}).items():
            self.put(node_id, left)

    def __getitem__(self, node_id: str) -> Free:
        return self._free[node_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._free)

    def __len__(self) -> int:
        return len(self._free)

    def put(self, node_id: str, left: Free) -> None:
        """Set what is free on a node."""
        if node_id not in self._block_of:
            if not self._blocks or len(self._blocks[-1]) == _BLOCK:
                self._blocks.append([])
                self._sums.append((0.0, 0.0, 0.0))
            self._blocks[-1].append(node_id)
            self._block_of[node_id] = len(self._blocks) - 1
        self._free[node_id] = left
        self._touch(node_id)

    def drop(self, node_id: str) -> None:
        """Remove a node."""
        if self._free.pop(node_id, None) is not None:
            self._touch(node_id)

    def changing(self, node_id: str) -> Free:
        """Return what is free on a node, for the caller to change at once."""
        left = self._free[node_id]
        if self._saved and node_id not in self._saved[-1]:
            self._saved[-1][node_id] = left.copy()
        self._touch(node_id)
        return left

    def begin(self) -> None:
        """Keep the former values of what is changed from now on."""
        self._saved.append({})

    def restore(self) -> None:
        """Undo what was changed since the last ``begin``."""
        for node_id, left in self._saved.pop().items():
            self._free[node_id] = left
            self._touch(node_id)

    def slots(self, shape: Hashable, count: Callable[[str, Free], int]) -> Slots:
        """Return how many ranks of a shape fit; ``count`` returns how many do on one node."""
        index = self._indexes.pop(shape, None)
        if index is None:
            index = Slots()
            index.dirty.update(self._free)
        self._indexes[shape] = index
        if len(self._indexes) > MOST_INDEXES:
            del self._indexes[next(iter(self._indexes))]
        for node_id in index.dirty:
            left = self._free.get(node_id)
            index.put(node_id, 0 if left is None else count(node_id, left))
        index.dirty.clear()
        return index

    def sums(self) -> tuple[float, float, float]:
        """Return the sums over the nodes of free GPUs, shared ones included, of free whole GPUs, and of free CPUs."""
        for number in self._stale:
            there = [self._free[i] for i in self._blocks[number] if i in self._free]
            shared = [left for left in there if left.idle_gpus > 0 or left.shares]
            self._sums[number] = (
                sum(max(0.0, left.gpus) for left in shared),
                sum(max(0.0, left.idle_gpus) for left in shared),
                sum(max(0.0, left.cpus) for left in there),
            )
        self._stale.clear()
        gpus = sum(block[0] for block in self._sums)
        return gpus, sum(block[1] for block in self._sums), sum(block[2] for block in self._sums)

    def with_gpus(self) -> list[str]:
        """Return the nodes that have a GPU, or a part of one, left."""
        self.sums()
        blocks = (self._blocks[number] for number, sums in enumerate(self._sums) if sums[0] > 0)
        return [i for block in blocks for i in block if i in self._free and self._free[i].gpus > 0]

    def _touch(self, node_id: str) -> None:
        self._stale.add(self._block_of[node_id])
        for index in self._indexes.values():
            index.dirty.add(node_id)
