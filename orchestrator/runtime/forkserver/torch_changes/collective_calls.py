"""Counts the collectives that a rank enters, and writes the newest one into its progress page.

Two ranks that wait in different calls of the same collective have the same stacks, so the diagnosis of hangs needs the number of the
call and its group. torch's own counters can be read only by calls in the process itself, which waits. Instead a private function of torch
that each collective calls first, ``_rank_not_in_group``, is replaced by one that records its caller: no public function is replaced, no
frame is added while a rank waits, and torch.compile traces neither. Where torch has no such function nothing is counted. Calls from C++
(the exchange of gradients by DistributedDataParallel) are not counted.

The layout is that of train/script/progress_layout.py, which the user's interpreter may lack; a test compares the numbers.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import sys
import zlib
from typing import Any

from ..page import EXPECTED_HEADER, HEADER, PAGE_BYTES

ENTERED = struct.Struct("<IQI24s40s")
"""Process, number of the call in its group, identity of the group, name of the collective, name of the group."""
ENTERED_AT = 192
GROUP = struct.Struct("<IQ")
"""Identity of a group, and how many of its collectives were entered."""
GROUPS_AT = ENTERED_AT + ENTERED.size
MAX_GROUPS = 12
MAX_LABEL_BYTES = 40

COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)
"""Functions that every rank of a group calls. Sends and receives are left out: each rank makes its own."""


class _Group:
    """One process group: its identity in the page, and how many of its collectives were entered."""

    __slots__ = ("identity", "label", "number", "offset")

    def __init__(self, name: str, label: str, place: int) -> None:
        self.identity = zlib.crc32(name.encode())
        self.label = label.encode(errors="replace")[:MAX_LABEL_BYTES]
        self.offset = GROUPS_AT + place * GROUP.size if place < MAX_GROUPS else None
        self.number = 0


class CollectiveCalls:
    """Collective calls of this process. ``world`` returns the default group, ``ranks_of`` the ranks of a group."""

    def __init__(self, world: Any, ranks_of: Any) -> None:
        self._world = world
        self._ranks_of = ranks_of
        self._groups: dict[str, _Group] = {}
        self._page: mmap.mmap | None = None
        self._opened = False

    def enter(self, name: bytes, group: Any) -> None:
        """Note that the process enters the collective. A process without a progress page notes nothing."""
        if not self._opened:
            self._page, self._opened = _map(os.environ.get("ORCH_PROGRESS_PATH", "")), True
        page = self._page
        if page is None:
            return
        known = self._known(group)
        known.number += 1
        ENTERED.pack_into(page, ENTERED_AT, os.getpid(), known.number, known.identity, name, known.label)
        if known.offset is not None:
            GROUP.pack_into(page, known.offset, known.identity, known.number)

    def _known(self, group: Any) -> _Group:
        default = self._world()
        name = str((default if group is None else group).group_name)
        known = self._groups.get(name)
        if known is None:
            label = "" if group is None or group is default else self._label(group)
            known = self._groups[name] = _Group(name, label, len(self._groups))
        return known

    def _label(self, group: Any) -> str:
        description = str(getattr(group, "group_desc", ""))
        if description not in ("", "undefined"):
            return description
        ranks = ",".join(map(str, self._ranks_of(group)))
        return f"ranks {ranks}" if len(ranks) < MAX_LABEL_BYTES - len("ranks ") else f"{group.size()} ranks"


def count_collectives(distributed: Any) -> None:
    """Count the collectives of ``torch.distributed`` from now on."""
    c10d = distributed.distributed_c10d
    original = getattr(c10d, "_rank_not_in_group", None)
    if original is None:
        return
    calls = CollectiveCalls(lambda: c10d.GroupMember.WORLD, distributed.get_process_group_ranks)
    names = {name: name.encode() for name in COLLECTIVES}

    @functools.wraps(original)
    def _rank_not_in_group(*args: Any, **kwargs: Any) -> Any:
        name = names.get(sys._getframe(1).f_code.co_name)  # noqa: SLF001 - the cheapest way to find the caller
        if name is not None:
            try:
                calls.enter(name, args[0] if args else kwargs.get("group"))
            except Exception:  # a count that fails must not end a training; torch reports what is wrong with the group
                return original(*args, **kwargs)
        return original(*args, **kwargs)

    c10d._rank_not_in_group = _rank_not_in_group  # noqa: SLF001 - torch has no public hook for collectives


def _map(path: str) -> mmap.mmap | None:
    """Map the progress page at ``path``; None without one of this version."""
    if not path:
        return None
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(handle).st_size != PAGE_BYTES:
            return None
        page = mmap.mmap(handle, PAGE_BYTES)
    except (OSError, ValueError):
        return None
    finally:
        os.close(handle)
    if HEADER.unpack_from(page) != EXPECTED_HEADER:
        page.close()
        return None
    return page
