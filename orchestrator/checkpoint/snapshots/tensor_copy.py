"""Copies a rank's tensors to the same addresses again and again, in parallel on several threads.

One core cannot use the full memory bandwidth, and training waits for the copy. torch releases the interpreter's lock
while it copies. The calling thread copies tensors of a device: its stream computed them.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

_Part: TypeAlias = tuple[list[Any], list[Any]]  # targets and sources
MOST_THREADS: Final = 4
WORTH_BYTES: Final = 32 << 20
"""One thread copies less than this: measured, two were no faster at 25 MB (the second must wake up), faster from 85 MB on."""
SPLIT_BYTES: Final = 1 << 20
"""A tensor is split only if both halves have at least this many bytes."""


def copy_threads(local_world_size: int) -> int:
    """Return a rank's number of copy threads: its share of the processors that this process may use, four at most."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // max(1, local_world_size)))


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``begin`` to ``end`` of the tensor at ``index``; the whole tensor where ``end`` is None."""

    index: int
    begin: int = 0
    end: int | None = None

    def of(self, tensors: Sequence[Any]) -> Any:
        """Return the piece of ``tensors``."""
        tensor = tensors[self.index]
        return tensor if self.end is None else tensor[self.begin : self.end]


def shares(sizes: Sequence[tuple[int, int]], threads: int) -> list[list[Piece]]:
    """Split tensors of these (bytes, rows) into parts of about equal bytes, one per thread, none empty.

    A tensor of 0 rows (a single number) is never split.
    """
    total = sum(size for size, _ in sizes)
    found: list[list[Piece]] = [[]]
    filled = 0  # bytes in all parts so far
    for index, (size, rows) in enumerate(sizes):
        begin, left = 0, size
        while len(found) < threads and left > (room := len(found) * total // threads - filled):
            fitting = rows * room // size if size else 0
            part = fitting * size // rows if rows else 0
            if part >= SPLIT_BYTES and left - part >= SPLIT_BYTES:
                found[-1].append(Piece(index, begin, begin + fitting))
                begin, left, filled = begin + fitting, left - part, filled + part
            elif not found[-1] or 2 * room > left:
                break
            found.append([])
        found[-1].append(Piece(index, begin, rows) if begin else Piece(index))
        filled += left
    return found


class TensorCopy:
    """Copies into ``targets``, torch tensors on the CPU, with up to this many threads; with one below ``worth_bytes``."""

    def __init__(
        self,
        targets: Sequence[Any],
        *,
        threads: int,
        pool: ThreadPoolExecutor | None,
        worth_bytes: int = WORTH_BYTES,
    ) -> None:
        self.targets = list(targets)
        self._pool = pool
        sizes = [(target.numel() * target.element_size(), target.shape[0] if target.dim() else 0) for target in targets]
        worth = pool is not None and threads > 1 and sum(size for size, _ in sizes) >= worth_bytes
        self._shares = shares(sizes, threads) if worth else []
        self._pieces = [[piece.of(self.targets) for piece in share] for share in self._shares]

    def copy(self, sources: Sequence[Any]) -> None:
        """Copy one source to each target of the same type and shape; return when all are copied."""
        import torch

        if not sources:
            return
        devices = {source.device for source in sources if source.is_cuda}
        if self._pool is None or len(self._shares) < 2 or devices:
            # Each copy from a GPU begins before the last has ended: to wait takes longer than to copy a small tensor.
            with torch.no_grad():
                torch._foreach_copy_(self.targets, list(sources), non_blocking=bool(devices))
            for device in devices:
                torch.cuda.synchronize(device)
            return
        with torch.no_grad():
            mine, *others = [
                (targets, [piece.of(sources) for piece in share])
                for targets, share in zip(self._pieces, self._shares, strict=True)
            ]
        under_way, left = _submitted(self._pool, others)
        try:
            for part in (*left, mine):
                _copy(*part)
        finally:
            wait(under_way)
        for copied in under_way:
            copied.result()


def _submitted(pool: ThreadPoolExecutor, parts: Sequence[_Part]) -> tuple[list[Future[None]], Sequence[_Part]]:
    """Start ``parts``; return those in progress, and those that no thread takes because the interpreter is ending."""
    under_way: list[Future[None]] = []
    for part in parts:
        try:
            under_way.append(pool.submit(_copy, *part))
        except RuntimeError:
            break
    return under_way, parts[len(under_way) :]


def _copy(targets: list[Any], sources: list[Any]) -> None:
    import torch

    with torch.no_grad():  # a setting of each thread
        torch._foreach_copy_(targets, sources)
