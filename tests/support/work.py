"""Work counted, for tests of what something costs: a count is the same on a busy machine, a time is not.

The garbage collector rests meanwhile: when it runs depends on what else the process has allocated, and the functions that
it calls for libraries, and the finalisers of what it finds, would be counted.
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
    """What is counted inside is of what runs there, and not of what other tests have left to be collected."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def descriptors() -> set[str]:
    """The numbers of the files that this process has open, and of the one that it reads them from."""
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
    """``note`` is told of every call of this thread, and of none that the garbage collector makes."""
    before = sys.getprofile()
    with collector_rests():
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(before)


def calls(work: Callable[[], object]) -> int:
    """How many functions, of Python and of C, ``work`` calls in this thread."""
    counts: Counter[str] = Counter()

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        counts[event] += 1

    with _profiled(count):
        work()
    return counts["call"] + counts["c_call"]


def lines(work: Callable[[], object]) -> int:
    """How many lines of Python ``work`` runs in this thread, those of loops that call nothing too."""
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


def calls_of_c(work: Callable[[], object]) -> Counter[str]:
    """The functions of C that ``work`` calls in this thread, by their full names (``posix.fsync``)."""
    counts: Counter[str] = Counter()

    def count(_frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            counts[f"{argument.__module__}.{argument.__qualname__}"] += 1

    with _profiled(count):
        work()
    return counts
