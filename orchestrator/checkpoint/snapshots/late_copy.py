"""Copies large tensors after a save has returned, while training continues.

The snapshot counts once they are copied, and only if none of them changed meanwhile.
"""

from __future__ import annotations

import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.checkpoint.snapshots.async_copy import Watch
    from orchestrator.checkpoint.snapshots.file import SnapshotSlot
    from orchestrator.checkpoint.snapshots.tensor_copy import TensorCopy


@dataclass(frozen=True, slots=True)
class LateCopy:
    """The result of a deferred copy: why the snapshot does not count ("" when it does), and the processor time of its thread."""

    failure: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Late:
    """Tensors to copy while training continues, after the rest of the snapshot; or, in a rehearsal, ``copied`` with it."""

    copier: TensorCopy
    sources: Sequence[Any]
    watch: Watch
    copied: bool

    def copy(self) -> bool:
        """Copy the tensors; return whether they stayed unchanged meanwhile."""
        self.copier.copy(self.sources)
        return not self.watch.saw_change(self.copier.targets)

    def is_unchanged(self) -> bool:
        """Whether a copy made now would equal the existing one, and the tensors were not written since."""
        try:
            return not self.watch.saw_any_change(self.copier.targets)
        except Exception:  # torch fails for a tensor that was replaced; no error here may end the training
            return False


class LateCopies:
    """The thread that makes deferred copies: that of ``executor``, else one of its own, begun with the first copy."""

    def __init__(self, executor: Executor | None = None) -> None:
        self._executor = executor

    def begin(self, slot: SnapshotSlot, late: Late, word: int) -> Future[LateCopy]:
        """Copy, and make the slot's snapshot count as ``word`` unless a tensor changed meanwhile."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="orch-late-copy")
        try:
            return self._executor.submit(_complete, slot, late, word)
        except RuntimeError:  # the interpreter is ending and starts no more threads
            done: Future[LateCopy] = Future()
            done.set_result(_complete(slot, late, word))
            return done

    def close(self) -> None:
        """End the thread, after the copy in progress."""
        if self._executor is not None:
            self._executor.shutdown()


def _complete(slot: SnapshotSlot, late: Late, word: int) -> LateCopy:
    began = time.thread_time()
    try:
        failure = (
            "" if late.copy() else "the state was changed while it was being copied, and not by an optimizer's step"
        )
    except Exception as error:  # no error here may end the training
        failure = f"the state could not be copied while training went on: {error}"
    if not failure:
        slot.commit(word)
    return LateCopy(failure=failure, seconds=time.thread_time() - began)
