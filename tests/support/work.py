"""Work counted, for tests of what something costs: a count is the same on a busy machine, a time is not."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls(work: Callable[[], object]) -> int:
    """How many functions, of Python and of C, ``work`` calls in this thread."""
    counts: Counter[str] = Counter()

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        counts[event] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return counts["call"] + counts["c_call"]


def calls_of_c(work: Callable[[], object]) -> Counter[str]:
    """The functions of C that ``work`` calls in this thread, by their full names (``posix.fsync``)."""
    counts: Counter[str] = Counter()

    def count(_frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            counts[f"{argument.__module__}.{argument.__qualname__}"] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return counts
