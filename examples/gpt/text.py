"""Text to learn from: Python's own standard library, or the files of a directory, in shards of a million bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

SHARD_BYTES = 1_000_000


def read(directory: Path | None, shards: int) -> list[bytes]:
    """Return the first `shards` shards, or all if there are fewer. The same on every machine with the same files."""
    root = directory or Path(sysconfig.get_path("stdlib"))
    pattern = "*.py" if directory is None else "*"
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3"} if directory is None else set()
    gathered = bytearray()
    for path in sorted(root.rglob(pattern)):
        if path.is_file() and skipped.isdisjoint(path.relative_to(root).parts):
            gathered += path.read_bytes()
        if len(gathered) >= shards * SHARD_BYTES:
            break
    whole = bytes(gathered[: shards * SHARD_BYTES])
    return [whole[start : start + SHARD_BYTES] for start in range(0, len(whole), SHARD_BYTES)]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive pieces of text, each with its targets: the same piece shifted by one byte."""

    def __init__(self, text: bytes, context: int) -> None:
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        """Return the number of whole pieces in the text."""
        return (len(self._bytes) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a piece and its targets, two tensors of `context` integers."""
        start = index * self._context
        piece = self._bytes[start : start + self._context + 1].long()
        return piece[:-1], piece[1:]
