"""Computes how much memory new snapshots may take. Standard library only."""

from __future__ import annotations

import contextlib
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")


def available_memory_bytes(meminfo: Path = MEMINFO, cgroups: Path = CGROUPS) -> int | None:
    """Return the memory that new pages may take on this machine and in this process's control group; None if unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        lines = meminfo.read_text().splitlines()
        found.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError, LookupError):
        group = cgroups / Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Page cache is freed on demand; pages of shared memory are not.
        found.append(limit - used + int(stat["active_file"]) + int(stat["inactive_file"]))
    with contextlib.suppress(OSError, ValueError, LookupError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        path = next(line.split(":", 2)[2] for line in lines if "memory" in line.split(":")[1].split(","))
        group = cgroups / "memory" / path.lstrip("/")
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.usage_in_bytes").read_text())
        files = int(stat["total_active_file"]) + int(stat["total_inactive_file"])
        found.append(int(stat["hierarchical_memory_limit"]) - used + files)
    return min(found, default=None)
