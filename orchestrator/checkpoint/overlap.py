"""What a copy needs to go on while training does: which tensors nobody changes meanwhile, and whether anybody did.

Between a save and the next step of an optimizer, forward and backward passes only read parameters and optimizer state. A
copy in that window stalls nothing (CheckFreq, FAST 2021, overlaps snapshots in the same way). Everything else in a state
(batch norm's sums, random states) may change at once, and is copied at once.

Owns the window, not the copying: snapshot_writer.py copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

WORTH_BYTES: Final = 1 << 20
"""Less is copied at once: that takes as long as waking up a thread."""
TENSOR_BYTES: Final = 64 << 10
"""Smaller tensors are copied at once: looking after each costs more."""
SAMPLES: Final = 32


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
            for state in optimizer.state.values():
                if isinstance(state, Mapping):
                    found.update(value.data_ptr() for value in state.values() if type(value) is Tensor)
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
        if [tensor._version for tensor in self._tensors] != self._versions:  # noqa: SLF001 - as above
            return True
        return not all(map(_same, self._samples, _samples(copies)))


def may_wait(tensor: Any, addresses: Collection[int]) -> bool:
    """Whether this tensor of a state may be copied later: an optimizer's own, large enough to be worth it, and not on a GPU.

    (What a GPU's streams would need for it could not be tried yet.)
    """
    return (
        tensor.nbytes >= TENSOR_BYTES
        and tensor.data_ptr() in addresses
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
    )


def _samples(tensors: Sequence[Any]) -> list[Any]:
    """Of each tensor, large and contiguous, some numbers from all over it."""
    import torch

    with torch.no_grad():
        return [t.as_strided((SAMPLES,), (t.numel() // SAMPLES,)).clone() for t in tensors]


def _same(left: Any, right: Any) -> bool:
    import torch

    # As bytes: a number that is none equals itself here.
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
