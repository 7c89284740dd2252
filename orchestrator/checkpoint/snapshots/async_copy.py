"""Supports copies during training: which tensors stay unchanged meanwhile, and whether they did.

Between a save and the next step of an optimizer, forward and backward passes only read parameters and optimizer state. A
copy in that window stalls nothing (CheckFreq, FAST 2021, overlaps snapshots in the same way). Everything else in a
state (batch norm's sums, random states) may change at once, and is copied at once.

Owns the window, not the copying (slot_copier.py, late_copy.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

WORTH_BYTES: Final = 1 << 20
"""Smaller amounts are copied at once: waking a thread takes as long."""
TENSOR_BYTES: Final = 64 << 10
"""Smaller tensors are copied at once: tracking each costs more."""
SAMPLES: Final = 32
REHEARSALS: Final = 3


@dataclass(frozen=True, slots=True)
class Window:
    """Time until the next step of an optimizer, in which the memory at ``addresses()`` is assumed to stay unchanged.

    A *rehearsal* copies it at once and checks at the end whether the assumption was true.
    """

    addresses: Callable[[], Collection[int]]
    rehearse: bool = False


class AsyncCopyPolicy:
    """Decides whether a process's saves overlap with its training: after a successful rehearsal, until a state changes.

    A loop may swap in averaged weights after each save, or change weights without an optimizer. One that does so in a
    rehearsal loses nothing: the snapshot was copied at once.
    """

    def __init__(self) -> None:
        self._rehearsals = REHEARSALS
        self._given = True

    def window(self, addresses: Callable[[], Collection[int]], *, asked: bool) -> Window | None:
        """Return the next save's window; None when everything is copied at once. With ``asked`` no rehearsal is needed."""
        if not self._given or (not asked and self._rehearsals < 0):
            return None
        return Window(addresses, rehearse=not asked and self._rehearsals > 0)

    def rehearsed(self, *, well: bool) -> None:
        """Record the result of a rehearsal."""
        self._rehearsals = self._rehearsals - 1 if well else -1

    def end(self) -> None:
        """Stop overlapping: a state was changed while it was being copied."""
        self._given = False


class OptimizerGuard:
    """Records torch's optimizers when they step, and calls ``before_step`` before each step of any of them."""

    def __init__(self, before_step: Callable[[], None]) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._before_step = before_step
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handle = register_optimizer_step_pre_hook(self._enter)

    def _enter(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._seen.add(optimizer)
        self._before_step()

    def addresses(self) -> set[int]:
        """Return the addresses of parameters and state of every live optimizer that has stepped under this guard."""
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
        """Stop intercepting optimizer steps."""
        self._handle.remove()


class Watch:
    """Detects whether tensors were changed since its creation: by torch's version counters, and by samples of their values.

    The counter includes every change that torch records. It misses writes through ``.data`` or another library's view;
    the samples find those that change one of 32 numbers of a tensor, as a swapped-in average of weights does.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = list(tensors)
        self._versions = [tensor._version for tensor in tensors]  # noqa: SLF001 - torch offers nothing else
        self._samples = _samples(tensors)

    def saw_change(self, copies: Sequence[Any]) -> bool:
        """Whether ``copies``, made since, differ from what the tensors held at creation."""
        return self._counted() or not all(map(_same, self._samples, _samples(copies)))

    def saw_any_change(self, copies: Sequence[Any]) -> bool:
        """Whether the tensors now differ from ``copies``, made at creation: compares every byte."""
        import torch

        with torch.no_grad():
            return self._counted() or not all(
                torch.equal(_words(tensor), _words(copy)) for tensor, copy in zip(self._tensors, copies, strict=True)
            )

    def _counted(self) -> bool:
        return [tensor._version for tensor in self._tensors] != self._versions  # noqa: SLF001 - as above


def may_wait(tensor: Any, addresses: Collection[int]) -> bool:
    """Whether this tensor may be copied later: an optimizer's own, large enough, and not on a GPU.

    (Overlap with a GPU's streams is untested.)
    """
    return (
        tensor.nbytes >= TENSOR_BYTES
        and tensor.data_ptr() in addresses
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_inference()  # torch does not count the changes of these
    )


def _samples(tensors: Sequence[Any]) -> list[Any]:
    """Return some values of each large, contiguous tensor, spread over it."""
    import torch

    with torch.no_grad():
        return [t.as_strided((SAMPLES,), (t.numel() // SAMPLES,)).clone() for t in tensors]


def _same(left: Any, right: Any) -> bool:
    import torch

    return torch.equal(_words(left), _words(right))


def _words(tensor: Any) -> Any:
    """Return a tensor as integers of the same bits, so that NaN equals itself."""
    import torch

    flat = tensor.reshape(-1)
    try:
        return flat.view(torch.int64)  # eight times as fast to compare as bytes
    except RuntimeError:  # size or address is not a multiple of 8
        return flat.view(torch.uint8)
