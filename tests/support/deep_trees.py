"""Directories nested deeper than the interpreter's stack and than the longest path."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

MakeDeep: TypeAlias = Callable[[Path, int], None]
"""The fixture ``make_deep``."""


def make_deep(top: Path, levels: int) -> None:
    """Make ``levels`` directories ``d`` in one another below ``top``, and a file of three bytes in the last."""
    top.mkdir(parents=True, exist_ok=True)
    here = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    with os.fdopen(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=here), "wb") as file:
        file.write(b"end")
    os.close(here)
