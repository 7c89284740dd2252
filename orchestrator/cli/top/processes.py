"""Tree of the processes of this machine that use its GPUs or are ranks: children under the process that started them.

A tree begins at most two levels above such a process (the keeper and the fork server of a rank, or torchrun and its shell)
and holds all of its descendants: data loaders use the host and not the GPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from orchestrator.gpu.balance.view import GpuRow

ABOVE = 2
MOST_LINES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLine:
    """A process; unknown values are empty or None. `branch` draws its place in the tree.

    `gpu_share` is its part of the GPU's memory. `utilization` is the GPU's, if no other process is on the GPU.
    """

    pid: int
    node: str
    gpu: int | None = None
    gpu_uuid: str = ""
    memory_bytes: int | None = None
    gpu_share: float | None = None
    utilization: float | None = None
    owner: str = ""
    branch: str = ""
    user: str = ""
    cpu_percent: float | None = None
    resident_bytes: int | None = None
    seconds: float | None = None
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnGpu:
    """A process as reported by a GPU's driver."""

    row: GpuRow
    memory_bytes: int | None
    alone: bool


class ProcessTree:
    """Reads this machine's processes; the processor share of each is that since the last reading."""

    def __init__(self, node: str) -> None:
        self._node = node

    def lines(self, rows: Sequence[GpuRow], owners: Mapping[int, str]) -> tuple[ProcessLine, ...]:
        """Return this machine's tree, then processes on GPUs of other nodes. `owners` names ranks by process id."""
        here: dict[int, list[OnGpu]] = {}
        away: list[ProcessLine] = []
        for row in rows:
            alone = len(row.processes) == 1
            for entry in row.processes:
                pid = entry.get("pid")
                if pid is None:
                    continue
                use = OnGpu(row=row, memory_bytes=entry.get("memory_bytes"), alone=alone)
                if row.node == self._node:
                    here.setdefault(pid, []).append(use)
                else:
                    away.append(_line(pid, row.node, use))
        wanted = here.keys() | owners.keys()
        tree = self._tree(wanted, here, owners) if wanted else []
        return tuple([*tree, *away][:MOST_LINES])

    def _tree(
        self, wanted: set[int], here: Mapping[int, Sequence[OnGpu]], owners: Mapping[int, str]
    ) -> list[ProcessLine]:
        processes, parents = _processes()
        children: dict[int, list[int]] = {}
        shown = _shown(wanted & processes.keys(), parents)
        for pid in sorted(shown):
            if parents.get(pid) in shown:
                children.setdefault(parents[pid], []).append(pid)
        roots = [pid for pid in sorted(shown) if parents.get(pid) not in shown]
        lines: list[ProcessLine] = []
        for pid, branch in _walk(roots, children):
            uses = here.get(pid, ())
            for use in uses or (None,):
                line = _line(pid, self._node, use, owner=owners.get(pid, ""), branch=branch)
                lines.append(_with_host(line, processes[pid]))
        # Processes that only a driver reports: in another container, or just ended.
        lines += [_line(pid, self._node, use) for pid in sorted(here.keys() - processes.keys()) for use in here[pid]]
        return lines


def _processes() -> tuple[dict[int, psutil.Process], dict[int, int]]:
    """Return every process and its parent. psutil keeps the objects, with the processor time at the last reading."""
    processes: dict[int, psutil.Process] = {}
    parents: dict[int, int] = {}
    for process in psutil.process_iter(["ppid"]):
        processes[process.pid] = process
        parents[process.pid] = process.info["ppid"] or 0
    return processes, parents


def _shown(wanted: set[int], parents: Mapping[int, int]) -> set[int]:
    """Return the wanted processes, at most two ancestors of each, and all descendants."""
    shown = set(wanted)
    for pid in wanted:
        above = pid
        for _ in range(ABOVE):
            above = parents.get(above, 0)
            if above <= 1:
                break
            shown.add(above)
    below = seen = set(wanted)
    while below:
        below = {pid for pid, parent in parents.items() if parent in below and pid not in seen}
        seen = seen | below
    return shown | seen


def _walk(roots: Sequence[int], children: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, str]]:
    """Yield each process after its parent, with the tree lines that lead to it."""
    todo = [(pid, "", "") for pid in reversed(roots)]
    while todo:
        pid, branch, below = todo.pop()
        yield pid, branch
        own = children.get(pid, ())
        todo += [
            (child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "))
            for child, last in reversed([(child, child == own[-1]) for child in own])
        ]


def _line(pid: int, node: str, use: OnGpu | None, *, owner: str = "", branch: str = "") -> ProcessLine:
    if use is None:
        return ProcessLine(pid=pid, node=node, owner=owner, branch=branch)
    row, memory = use.row, use.memory_bytes
    return ProcessLine(
        pid=pid,
        node=node,
        gpu=row.index,
        gpu_uuid=row.gpu_uuid,
        memory_bytes=memory,
        gpu_share=memory / row.memory_total_bytes if memory is not None and row.memory_total_bytes else None,
        utilization=row.utilization_ratio if use.alone else None,
        owner=owner,
        branch=branch,
    )


def _with_host(line: ProcessLine, process: psutil.Process) -> ProcessLine:
    """Return the line with the host's values; unchanged if the process may not be inspected or has ended."""
    try:
        with process.oneshot():
            return replace(
                line,
                user=process.username(),
                cpu_percent=process.cpu_percent(),
                resident_bytes=process.memory_info().rss,
                seconds=time.time() - process.create_time(),
                command=" ".join(process.cmdline()) or process.name(),
            )
    except psutil.Error:
        return line
