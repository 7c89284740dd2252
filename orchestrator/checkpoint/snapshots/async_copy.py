"""What a copy beside training needs: which tensors stay unchanged meanwhile, and whether they did.

Between a save and the next step of an optimizer, forward and backward passes only read parameters and optimizer state. A
copy in that window stalls nothing (CheckFreq, FAST 2021, overlaps snapshots in the same way). Everything else in a state
(batch norm's sums, random states) may change at once, and is copied at once.

Owns the window, not the copying: snapshot_writer.py copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

WORTH_BYTES: Final = 1 << 20
"""Less is copied at once: that takes as long as waking up a thread."""
TENSOR_BYTES: Final = 64 << 10
"""Smaller tensors are copied at once: looking after each costs more."""
SAMPLES: Final = 32
REHEARSALS: Final = 3


@dataclass(frozen=True, slots=True)
class Window:
    """Until the next step of an optimizer, what lies at ``addresses()`` is believed to stay as it is.

    To ``rehearse`` is to copy it at once all the same, and to look at the end whether that was true.
    """

    addresses: Callable[[], Collection[int]]
    rehearse: bool = False


class AsyncCopyPolicy:
    """Whether a process's saves overlap with its training: once that was rehearsed, until a state is seen to change.

    A loop may swap in an average of its weights after each save, or change them without an optimizer. One that does so in
    a rehearsal loses nothing: the snapshot was whole at once.
    """

    def __init__(self) -> None:
        self._rehearsals = REHEARSALS
        self._given = True

    def window(self, addresses: Callable[[], Collection[int]], *, asked: bool) -> Window | None:
        """The next save's; None when all is to be copied at once. What is ``asked`` for needs no rehearsal."""
        if not self._given or (not asked and self._rehearsals < 0):
            return None
        return Window(addresses, rehearse=not asked and self._rehearsals > 0)

    def rehearsed(self, *, well: bool) -> None:
        """A rehearsal is over."""
        self._rehearsals = self._rehearsals - 1 if well else -1

    def end(self) -> None:
        """A state was changed while it was being copied: no state is copied beside training from now on."""
        self._given = False


class OptimizerGuard:
    """Knows the tensors of torch's optimizers, and has each step of any of them call ``before_step`` first."""

    def __init__(self, before_step: Callable[[], None]) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._before_step = before_step
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handle = register_optimizer_step_pre_hook(self._enter)

    def _enter(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._seen.add(optimizer)
        self._before_step()

    def addresses(self) -> set[int]:
        """Where the parameters and the state of every optimizer lie that has stepped since this began and still lives."""
        from torch import Tensor
        from torch.nn import Parameter

        found: set[int] = set()
        for optimizer in list(self._seen):
            for group in optimizer.param_groups:
                found.update(p.data_ptr() for p in group["params"] if type(p) is Parameter or type(p) is Tensor)
            for state in list(optimizer.state.values()):  # another thread may add to it
                if isinstance(state, Mapping):
                    found.update(value.data_ptr() for value in list(state.values()) if type(value) is Tensor)
        found.discard(0)
        return found

    def close(self) -> None:
        """Let optimizers step as they like."""
        self._handle.remove()


class Watch:
    """Tells whether tensors were changed since this was made: by torch's own count of changes, and by some of their numbers.

    The count sees every change that torch is told of. It misses what is written through ``.data`` or another library's
    view; that is seen where it changes one of 32 numbers of a tensor, as an average of weights that is swapped in does.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = list(tensors)
        self._versions = [tensor._version for tensor in tensors]  # noqa: SLF001 - torch offers nothing else
        self._samples = _samples(tensors)

    def saw_change(self, copies: Sequence[Any]) -> bool:
        """Whether ``copies``, made since, hold anything but what the tensors held when this was made."""
        return self._counted() or not all(map(_same, self._samples, _samples(copies)))

    def saw_any_change(self, copies: Sequence[Any]) -> bool:
        """Whether the tensors now hold anything but ``copies``, made when this was: compares every byte."""
        import torch

        with torch.no_grad():
            return self._counted() or not all(
                torch.equal(_words(tensor), _words(copy)) for tensor, copy in zip(self._tensors, copies, strict=True)
            )

    def _counted(self) -> bool:
        return [tensor._version for tensor in self._tensors] != self._versions  # noqa: SLF001 - as above


def may_wait(tensor: Any, addresses: Collection[int]) -> bool:
    """Whether this tensor of a state may be copied later: an optimizer's own, large enough to be worth it, and not on a GPU.

    (What a GPU's streams would need for it could not be tried yet.)
    """
    return (
        tensor.nbytes >= TENSOR_BYTES
        and tensor.data_ptr() in addresses
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_inference()  # torch does not count the changes of these
    )


def _samples(tensors: Sequence[Any]) -> list[Any]:
    """Of each tensor, large and contiguous, some numbers from all over it."""
    import torch

    with torch.no_grad():
        return [t.as_strided((SAMPLES,), (t.numel() // SAMPLES,)).clone() for t in tensors]


def _same(left: Any, right: Any) -> bool:
    import torch

    return torch.equal(_words(left), _words(right))


def _words(tensor: Any) -> Any:
    """A tensor as whole numbers of the same bits: among these, what is no number equals itself."""
    import torch

    flat = tensor.reshape(-1)
    try:
        return flat.view(torch.int64)  # eight times as fast to compare as bytes
    except RuntimeError:  # the size or the place is no multiple of 8
        return flat.view(torch.uint8)
