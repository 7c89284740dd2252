"""Removes the directories that ended nodes of an existing cluster leave on a machine; notes each node's raylet."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Final

from orchestrator import trees
from orchestrator.runtime.forkserver import linux
from orchestrator.runtime.nodes.directories import LOCAL, ROUND_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

RAYLET_PID: Final = "RAY_RAYLET_PID"
"""The environment variable by which a raylet gives its process id to its workers."""

_NOTE: Final = "raylet"


def raylet_of(node_dir: Path) -> int | None:
    """Return the process id of the raylet with which an existing cluster's node ends; note it in the node's directory.

    None for an embedded head's node: its directory, and the fork server there, outlive the head.
    """
    raylet = os.environ.get(RAYLET_PID, "")
    if node_dir.name == LOCAL or not raylet.isdecimal():
        return None
    with contextlib.suppress(OSError):  # the raylet has ended already, and this process ends with it
        (node_dir / _NOTE).write_text(f"{raylet} {linux.start_ticks(int(raylet))}", encoding="ascii")
    return int(raylet)


def clear_ended_nodes(node_dir: Path) -> None:
    """Remove the directories of nodes that have ended on this machine, once their fork servers have too."""
    for other in node_dir.parent.iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid, ticks = map(int, (other / _NOTE).read_text(encoding="ascii").split())
            if other != node_dir and not _runs(pid, ticks) and not any((other / "fork").glob("*.sock")):
                trees.remove(other, until=time.monotonic() + ROUND_SECONDS)


def _runs(pid: int, ticks: int) -> bool:
    try:
        return linux.start_ticks(pid) == ticks
    except OSError:
        return False
