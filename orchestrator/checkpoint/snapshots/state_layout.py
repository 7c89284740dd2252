"""Layout of a state's parts in a slot, and the copy into it.

Planned once for a structure, and used until the structure changes: a copy then allocates and plans nothing.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.format import foreign_values as foreign
from orchestrator.checkpoint.snapshots.encode_plan import PartPlan
from orchestrator.checkpoint.snapshots.file import HEADER_BYTES, PartRegion
from orchestrator.checkpoint.snapshots.page_lock import PageLocks
from orchestrator.checkpoint.snapshots.tensor_copy import TensorCopy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.checkpoint.snapshots.file import SnapshotSlot
    from orchestrator.checkpoint.snapshots.slot_pool import SlotPool

_PAGE = 4096
_TREE_SLACK = 1024  # space for plain values that become longer


class SlotCopier:
    """The views into one slot for one set of plans."""

    def __init__(
        self,
        slot: SnapshotSlot,
        regions: Mapping[str, PartRegion],
        plans: Mapping[str, PartPlan],
        threads: int,
        pool: ThreadPoolExecutor | None,
    ) -> None:
        self.slot, self.plans = slot, dict(plans)
        self._regions = dict(regions)
        self._tensors: list[tuple[str, int]] = []
        self._bytes: list[tuple[str, int, int]] = []
        targets: list[Any] = []
        torch = sys.modules.get("torch")
        for name, plan in plans.items():
            start = regions[name].image_at
            slot.memory[start : start + len(plan.header)] = plan.header
            for index, (entry, source) in enumerate(zip(plan.entries, plan.sources, strict=True)):
                at = start + len(plan.header) + entry.begin
                if entry.end == entry.begin:
                    continue
                if torch is not None and isinstance(source, torch.Tensor):
                    view = memoryview(slot.memory)[at : at + entry.end - entry.begin]
                    targets.append(torch.frombuffer(view, dtype=source.dtype).reshape(source.shape))
                    self._tensors.append((name, index))
                else:
                    self._bytes.append((name, index, at))
        self._copy = TensorCopy(targets, threads=threads, pool=pool)

    @property
    def from_gpu(self) -> bool:
        """Whether any tensor is on an NVIDIA or AMD GPU."""
        return any(source.is_cuda for source in self._sources())

    def copy(self) -> None:
        """Copy the present content of the plans' sources; the slot has all of it when this returns."""
        memory = self.slot.memory
        for name, plan in self.plans.items():
            at = self._regions[name].tree_at
            memory[at : at + len(plan.tree)] = plan.tree
        for name, index, at in self._bytes:
            content = foreign.memory(self.plans[name].sources[index])
            memory[at : at + len(content)] = content
        self._copy.copy(self._sources())

    def _sources(self) -> list[Any]:
        return [self.plans[name].sources[index] for name, index in self._tensors]


class StateLayout:
    """The plans of a state's parts, their regions of a slot, and a copier for each slot in use. Copies with ``threads``."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="orch-copy") if threads > 1 else None
        self._plans: dict[str, PartPlan] = {}
        self._regions: dict[str, PartRegion] = {}
        self._copiers: dict[int, SlotCopier] = {}
        self._page_locks = PageLocks()

    def update(self, parts: Mapping[str, Any]) -> None:
        """Update the plans for the states; make a new layout when a part no longer fits."""
        fresh = parts.keys() != self._plans.keys()
        plans: dict[str, PartPlan] = {}
        for name, state in parts.items():
            plan = self._plans.get(name)
            if plan is None or not plan.update(state):
                plan, fresh = PartPlan(state), True
            plans[name] = plan
            region = self._regions.get(name)
            if region is not None and len(plan.tree) > region.tree_bytes:
                fresh = True
        if fresh:
            self._plans, self._copiers = plans, {}
            self._regions = _lay_out(plans)

    def forget(self) -> None:
        """Keep no reference to the states of the last update."""
        for plan in self._plans.values():
            plan.forget()

    def copier(self, index: int, slots: SlotPool) -> SlotCopier:
        """Return the copier into a slot, which is made where there is none of the right size."""
        copier = self._copiers.get(index)
        if copier is None:
            size = max(
                (region.image_at + region.image_bytes for region in self._regions.values()), default=HEADER_BYTES
            )
            slot = slots.of_size(index, size)
            slot.begin()
            copier = self._copiers[index] = SlotCopier(slot, self._regions, self._plans, self._threads, self._pool)
            if copier.from_gpu:
                self._page_locks.lock(slot)
        return copier

    def regions(self) -> tuple[PartRegion, ...]:
        """Return the regions, with the lengths of the present content."""
        return tuple(
            PartRegion(
                name=region.name,
                tree_at=region.tree_at,
                tree_bytes=len(self._plans[region.name].tree),
                image_at=region.image_at,
                image_bytes=region.image_bytes,
            )
            for region in self._regions.values()
        )

    def close(self) -> None:
        """End the threads, and release the views into the slots."""
        if self._pool is not None:
            self._pool.shutdown()
        self._copiers.clear()


def _lay_out(plans: Mapping[str, PartPlan]) -> dict[str, PartRegion]:
    regions: dict[str, PartRegion] = {}
    at = HEADER_BYTES
    for name, plan in plans.items():
        tree_bytes = len(plan.tree) + len(plan.tree) // 4 + _TREE_SLACK
        image_at = _round_up(at + tree_bytes)
        image_bytes = len(plan.header) + plan.data_bytes
        regions[name] = PartRegion(
            name=name, tree_at=at, tree_bytes=tree_bytes, image_at=image_at, image_bytes=image_bytes
        )
        at = _round_up(image_at + image_bytes)
    return regions


def _round_up(value: int) -> int:
    return -(-value // _PAGE) * _PAGE
