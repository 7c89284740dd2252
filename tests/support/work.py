"""Counts work, for tests of costs: a count is the same on a busy machine, a time is not.

The garbage collector is disabled meanwhile: its runs depend on the other allocations of the process, and its callbacks of
libraries, and the finalisers of the objects that it finds, would be counted.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def collector_rests() -> Iterator[None]:
    """Disable the garbage collector in the block, so that a count does not include garbage of other tests."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def descriptors() -> set[str]:
    """Return the numbers of this process's open files, including the one from which they are read."""
    return set(os.listdir("/proc/self/fd"))


@contextmanager
def descriptors_stay() -> Iterator[set[str]]:
    """Yield the open descriptors; fail when others are open at the end."""
    with collector_rests():
        before = descriptors()
        yield before
        after = descriptors()
    assert after == before


@contextmanager
def _profiled(note: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Pass every call of this thread to ``note``, except calls that the garbage collector makes."""
    before = sys.getprofile()
    with collector_rests():
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(before)


def calls(work: Callable[[], object]) -> int:
    """Return the number of functions, of Python and of C, that ``work`` calls in this thread."""
    counts: Counter[str] = Counter()

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        counts[event] += 1

    with _profiled(count):
        work()
    return counts["call"] + counts["c_call"]


def lines(work: Callable[[], object]) -> int:
    """Return the number of lines of Python that ``work`` runs in this thread, including loops that call nothing."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    with collector_rests():
        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(before)
    return count
