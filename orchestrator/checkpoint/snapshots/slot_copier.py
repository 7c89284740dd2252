"""Copies a state into a slot whose layout is known: nothing is allocated or planned.

Decides which tensors may be copied later (async_copy.py defines when they do not change).
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.format import foreign_values as foreign
from orchestrator.checkpoint.snapshots.async_copy import WORTH_BYTES, Watch, Window, may_wait
from orchestrator.checkpoint.snapshots.late_copy import Late
from orchestrator.checkpoint.snapshots.tensor_copy import TensorCopy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from orchestrator.checkpoint.snapshots.encode_plan import PartPlan
    from orchestrator.checkpoint.snapshots.file import PartRegion, SnapshotSlot


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
        self._threads, self._pool = threads, pool
        self._targets: list[Any] = []
        self._bytes: list[tuple[str, int, int]] = []
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
                    self._targets.append(torch.frombuffer(view, dtype=source.dtype).reshape(source.shape))
                    self._tensors.append((name, index))
                else:
                    self._bytes.append((name, index, at))
        self._all = self._copies(range(len(self._targets)))
        self._split: list[bool] = []
        self._now = self._later = self._copies(())

    @property
    def from_gpu(self) -> bool:
        """Whether any tensor is on an NVIDIA or AMD GPU."""
        return any(self.plans[name].sources[index].is_cuda for name, index in self._tensors)

    def copy(self, window: Window | None) -> Late | None:
        """Copy the present content of the plans' sources; return the deferred or rehearsed copy, None without one."""
        memory = self.slot.memory
        for name, plan in self.plans.items():
            at = self._regions[name].tree_at
            memory[at : at + len(plan.tree)] = plan.tree
        for name, index, at in self._bytes:
            content = foreign.memory(self.plans[name].sources[index])
            memory[at : at + len(content)] = content
        sources = [self.plans[name].sources[index] for name, index in self._tensors]
        if window is None or sum(plan.data_bytes for plan in self.plans.values()) < WORTH_BYTES:
            self._all.copy(sources)
            return None
        addresses = window.addresses()
        waits = [may_wait(source, addresses) for source in sources]
        waiting = list(itertools.compress(sources, waits))
        if sum(source.numel() * source.element_size() for source in waiting) < WORTH_BYTES:
            self._all.copy(sources)
            return None
        if waits != self._split:
            self._split = waits
            self._now = self._copies([index for index, later in enumerate(waits) if not later])
            self._later = self._copies([index for index, later in enumerate(waits) if later])
        late = Late(self._later, waiting, Watch(waiting), copied=window.rehearse)
        self._now.copy([source for source, later in zip(sources, waits, strict=True) if not later])
        if window.rehearse:
            self._later.copy(waiting)
        return late

    def _copies(self, indices: Sequence[int]) -> TensorCopy:
        return TensorCopy([self._targets[index] for index in indices], threads=self._threads, pool=self._pool)
