"""Copies a rank's state into shared memory: the implementation of ``context().save`` under orch.

Runs in the training process. After the first snapshot of a structure nothing is allocated or planned: the state is
walked once, and its tensors are copied to their places in the tensor file's image. The newest snapshot, and the one
that a persister writes, are never overwritten, so the copy waits for nothing.

A snapshot that is *wanted* on storage (an explicit interval, one of the best scores) is not overwritten before it has
reached it: a save waits while all slots hold such snapshots and storage works. Where storage fails, training continues
and the skipped snapshots are reported.

Everything is copied before ``save`` returns: what training changes afterwards is not in the snapshot.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from orchestrator.checkpoint.format import codec
from orchestrator.checkpoint.format.layout import Version
from orchestrator.checkpoint.snapshots.encode_plan import PartPlan
from orchestrator.checkpoint.snapshots.file import (
    HEADER_BYTES,
    SLOTS,
    PartRegion,
    SnapshotDirectory,
    SnapshotMeta,
    SnapshotSlot,
    held,
    identity,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


class SnapshotWriter:
    """Writes the snapshots of one rank. Not thread-safe; the caller serialises."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int,
        world_size: int,
        attempt: int,
        job_id: str = "",
        token: str = "",
        threads: int = 1,
        best: TopScores | None = None,
    ) -> None:
        """Copy with up to ``threads`` threads. ``best``: the saves with the best scores are wanted on storage.

        Raises SnapshotUnavailableError when shared memory cannot be used.
        """
        directory = SnapshotDirectory(path)
        self._attempt = attempt
        self._meta = functools.partial(
            SnapshotMeta, job_id=job_id, attempt=attempt, rank=rank, world_size=world_size, token=token
        )
        self._lock = directory.writer_lock(rank)
        self._lock.acquire()
        self._layout = StateLayout(threads)
        self._best = best if rank == 0 else None
        self.slots = SlotPool(directory, rank)
        """The rank's slots, with their memory and the time that a save waited for one."""
        self.copy_seconds = 0.0  # duration of the last snapshot, without planning and allocating

    def save(
        self,
        parts: Mapping[str, Any],
        *,
        step: int,
        gang: bool,
        metrics: Mapping[str, float] | None = None,
        wanted: bool = False,
        on_wait: Callable[[], None] | None = None,
    ) -> int:
        """Snapshot ``parts`` (name to state) as of ``step``; return the bytes taken, 0 when this step already exists.

        ``wanted``: it must reach storage. ``on_wait`` is called when the save must first wait for storage.

        Raises SnapshotUnavailableError when shared memory is insufficient, UnsupportedStateError as the codec does.
        """
        self.slots.waited_seconds = 0.0
        word = identity(Version(attempt=self._attempt, step=step))
        if self.slots.holds(word):
            return 0
        self._layout.update(parts)
        try:
            index = self.slots.choose(on_wait)
            wanted = self._is_best(word, metrics or {}) or wanted
            return self._write(index, word, step, gang, metrics or {}, wanted)
        finally:
            self._layout.forget()

    def close(self) -> None:
        """Release the writer's lock; the snapshots stay."""
        self._layout.close()
        self._lock.release()
        self.slots.close()

    def _is_best(self, word: int, metrics: Mapping[str, float]) -> bool:
        """Whether this save is one of the best so far; the one that it replaces need not reach storage any more."""
        if self._best is None:
            return False
        member, replaced = self._best.offer(word, metrics.get(self._best.attribute))
        if member:
            self.slots.want_instead(word, replaced)
        return member

    def _write(
        self,
        index: int,
        word: int,
        step: int,
        gang: bool,  # noqa: FBT001 - a field of the page, private
        metrics: Mapping[str, float],
        wanted: bool,  # noqa: FBT001 - private
    ) -> int:
        copier = self._layout.copier(index, self.slots)
        began = time.perf_counter()
        copier.slot.begin()
        copier.slot.want(word if wanted else 0)
        copier.copy()
        regions = self._layout.regions()
        copier.slot.describe(
            self._meta(step=step, gang=gang, created_at=time.time(), metrics=dict(metrics), parts=regions)
        )
        copier.slot.commit(word)
        self.copy_seconds = time.perf_counter() - began
        return sum(region.tree_bytes + region.image_bytes for region in regions)


class TopScores:
    """The ``keep`` best scores offered so far, by the identity of their saves; of equal ones the newer is better."""

    def __init__(self, attribute: str, *, order: str, keep: int) -> None:
        self.attribute = attribute
        self._sign = 1.0 if order == "max" else -1.0
        self._keep = keep
        self._best: list[tuple[float, int]] = []  # score (greater is better) and identity, the worst first

    def offer(self, word: int, score: float | None) -> tuple[bool, int]:
        """Add a save; return whether it is now among the best, and the identity of the one that it replaced (0: none)."""
        if score is None or not math.isfinite(score):
            return False, 0
        self._best = sorted([*(item for item in self._best if item[1] != word), (self._sign * score, word)])
        replaced = 0
        if len(self._best) > self._keep:
            replaced = self._best.pop(0)[1]
        return replaced != word, replaced if replaced != word else 0

    def learn(self, scored: Iterable[tuple[int, float | None]]) -> None:
        """Add the saves of earlier attempts."""
        for word, score in scored:
            self.offer(word, score)


_STORE_POLL_SECONDS = 0.002


class SlotPool:
    """Finds the rank's existing slots, and makes more when they are needed. The caller holds the writer's lock."""

    def __init__(self, directory: SnapshotDirectory, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._hold = directory.hold()
        self._store_state = directory.store_state(rank)
        self._leader = self._store_state if rank == 0 else directory.store_state(0)
        self._slots: dict[int, SnapshotSlot] = {}
        for index in range(SLOTS):
            slot = SnapshotSlot.open(directory.slot_path(rank, index))
            if slot is not None:
                self._slots[index] = slot
        self.waited_seconds = 0.0
        """Seconds that the last save waited for storage to take an earlier one; 0 at the beginning of each save."""
        self.left_out: list[int] = []
        """Steps that were wanted on storage and were dropped because storage failed."""

    @property
    def memory_bytes(self) -> int:
        """The memory that this rank's snapshots take once every slot is in use."""
        return SLOTS * max((slot.size for slot in self._slots.values()), default=0)

    def holds(self, word: int) -> bool:
        """Whether a slot has the snapshot of this identity."""
        return any(slot.identity() == word for slot in self._slots.values())

    def want_instead(self, word: int, replaced: int) -> None:
        """Require ``word`` on the storage of every rank; ``replaced`` (0: none) need not reach it any more."""
        self._store_state.publish_wanted((self._store_state.wanted() | {word}) - {replaced})
        for slot in self._slots.values() if replaced else ():
            if slot.identity() == replaced:
                slot.want(0)

    def of_size(self, index: int, size: int) -> SnapshotSlot:
        """Return a slot, replaced by a new one unless it has about this size. Raises SnapshotUnavailableError."""
        slot = self._slots.get(index)
        if slot is None or not size <= slot.size <= 2 * size:
            slot = self._slots[index] = SnapshotSlot.create(self._directory.slot_path(self._rank, index), size)
        return slot

    def choose(self, on_wait: Callable[[], None] | None) -> int:
        """Choose a slot that may be overwritten: not the newest, not one that is held or must still reach storage.

        Prefers a used one to a new one. Waits where there is none and storage works.
        """
        began = time.perf_counter()
        while (index := self._free()) is None:
            if not self._store_state.takes_all:
                return self._given_up()
            if on_wait is not None:
                on_wait()
                on_wait = None
            time.sleep(_STORE_POLL_SECONDS)
            self.waited_seconds = time.perf_counter() - began
        return index

    def close(self) -> None:
        """Release the slots; the snapshots in them stay."""
        self._hold.close()
        self._slots.clear()

    def _free(self) -> int | None:
        identities = {index: slot.identity() for index, slot in self._slots.items()}
        wanted = self._leader.wanted()
        keep = self._in_use(identities) | {slot.pending(wanted) for slot in self._slots.values()}
        free = [index for index, found in identities.items() if found == 0 or found not in keep]
        if free:
            return min(free, key=lambda index: identities[index])
        return next((index for index in range(SLOTS) if index not in identities), None)

    def _in_use(self, identities: Mapping[int, int]) -> set[int]:
        return {max(identities.values(), default=0), held(list(identities.values()), self._hold.get())} - {0}

    def _given_up(self) -> int:
        """Return the slot of the oldest snapshot that must reach storage and cannot."""
        identities = {index: slot.identity() for index, slot in self._slots.items()}
        keep = self._in_use(identities)
        index = min((i for i, found in identities.items() if found not in keep), key=lambda i: identities[i])
        lost = version_of(identities[index])
        if self._store_state.serves and lost is not None:
            self.left_out.append(lost.step)
        return index


_PORTABLE: Final = 1  # CU_MEMHOSTREGISTER_PORTABLE: locked for all contexts of the process
_SUCCESS: Final = 0


class CudaDriver:
    """The driver library that torch has loaded. Raises OSError without one, AttributeError where it is too old.

    The driver is called and not torch's runtime: an error of the runtime stays set, and an unrelated later call of the
    script's would raise it.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._lock, self._unlock = library.cuMemHostRegister_v2, library.cuMemHostUnregister
        self._lock.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._unlock.argtypes = [ctypes.c_void_p]

    def lock(self, address: int, size: int) -> bool:
        """Lock ``size`` bytes of memory; return whether that succeeded. Fails in a thread that has no CUDA context."""
        return bool(self._lock(address, size, _PORTABLE) == _SUCCESS)

    def unlock(self, address: int) -> bool:
        """Undo ``lock``; return whether that succeeded."""
        return bool(self._unlock(address) == _SUCCESS)


@functools.cache
def cuda_driver() -> CudaDriver | None:
    """Return the CUDA driver; None where there is none (AMD, Intel)."""
    try:
        return CudaDriver()
    except (OSError, AttributeError):
        return None


class PageLocks:
    """Page-locks the slots into which a GPU's tensors are copied: each once, for as long as it is mapped.

    The driver copies to memory that may be paged out through a small buffer of its own, on the processor; to locked
    memory the GPU writes by itself, at the speed of its bus.
    """

    def __init__(self, driver: Callable[[], CudaDriver | None] = cuda_driver) -> None:
        self._driver = driver
        self._tried: weakref.WeakSet[Any] = weakref.WeakSet()

    def lock(self, slot: SnapshotSlot) -> None:
        """Lock a slot's memory, if that was not tried before. A failure only makes copies into the slot slower."""
        if slot in self._tried:
            return
        self._tried.add(slot)
        driver, address = self._driver(), _address_of(slot)
        if driver is not None and driver.lock(address, len(slot.memory)):
            # Before the memory is unmapped: a slot's finalizer precedes the release of what it refers to.
            weakref.finalize(slot, driver.unlock, address).atexit = False


def _address_of(slot: SnapshotSlot) -> int:
    import torch

    return int(torch.frombuffer(slot.memory, dtype=torch.uint8).data_ptr())


_PAGE = 4096
_TREE_SLACK = 1024  # space for plain values that become longer
MAX_THREADS: Final = 4
WORTH_BYTES: Final = 32 << 20
"""One thread copies less than this: measured, two were no faster at 25 MB (the second must wake up), faster from 85 MB on."""
PIECE_BYTES: Final = 4 << 20
"""Larger tensors are split."""


def copy_threads(local_world_size: int) -> int:
    """Return a rank's number of copy threads: its share of the processors that this process may use, four at most."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // max(1, local_world_size)))


class TensorCopy:
    """Copies into ``targets``, torch tensors on the CPU, again and again; from ``worth_bytes`` on with several threads.

    One core cannot use the full memory bandwidth, and training waits for the copy. torch's own threads are not used: they
    wait for each other without giving up the processor, so that a copy takes ten times as long beside another process.
    """

    def __init__(
        self,
        targets: Sequence[Any],
        *,
        threads: int = 1,
        pool: ThreadPoolExecutor | None = None,
        worth_bytes: int = WORTH_BYTES,
    ) -> None:
        self.targets = list(targets)
        self._pool = pool
        worth = pool is not None and sum(map(_bytes_of, targets)) >= worth_bytes
        pieces = [(index, rows) for index, target in enumerate(targets) for rows in _rows(target)] if worth else []
        self._shares = [pieces[number::threads] for number in range(min(threads, len(pieces)))]
        self._views = [_views(self.targets, share) for share in self._shares]

    def copy(self, sources: Sequence[Any]) -> None:
        """Copy one source to each target of the same type and shape; return when all are copied."""
        import torch

        if not sources:
            return
        devices = {source.device for source in sources if source.is_cuda}
        if self._pool is None or not self._shares or devices:
            # Each copy from a GPU begins before the last has ended: to wait takes longer than to copy a small tensor.
            with torch.no_grad():
                torch._foreach_copy_(self.targets, list(sources), non_blocking=bool(devices))
            for device in devices:
                torch.cuda.synchronize(device)
            return
        with torch.no_grad():
            first, *others = [
                (mine, _views(sources, share)) for mine, share in zip(self._views, self._shares, strict=True)
            ]
        under_way: list[Future[None]] = []
        try:
            for part in others:
                try:
                    under_way.append(self._pool.submit(_copy, *part))
                except RuntimeError:  # the interpreter is ending, and starts no thread
                    _copy(*part)
            _copy(*first)
        finally:
            wait(under_way)
        for copied in under_way:
            copied.result()


def _bytes_of(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _rows(target: Any) -> list[slice]:
    """Return the rows of each piece of a tensor; of one that is too small to be split, all of it."""
    step = len(target) * PIECE_BYTES // _bytes_of(target) if target.dim() and target.numel() else 0
    return [slice(start, start + step) for start in range(0, len(target), step)] if step else [slice(None)]


def _views(tensors: Sequence[Any], share: Sequence[tuple[int, slice]]) -> list[Any]:
    return [tensors[index] if rows.stop is None else tensors[index][rows] for index, rows in share]


def _copy(targets: list[Any], sources: list[Any]) -> None:
    import torch

    with torch.no_grad():  # a setting of each thread
        torch._foreach_copy_(targets, sources)


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
            content = codec.memory(self.plans[name].sources[index])
            memory[at : at + len(content)] = content
        self._copy.copy(self._sources())

    def _sources(self) -> list[Any]:
        return [self.plans[name].sources[index] for name, index in self._tensors]


class StateLayout:
    """The plans of a state's parts, their regions of a slot, and a copier for each slot in use. Copies with ``threads``.

    Planned once for a structure, and used until the structure changes: a copy then allocates and plans nothing.
    """

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
            structs.replace(region, tree_bytes=len(self._plans[region.name].tree)) for region in self._regions.values()
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
