"""Finds every GPU of this host, of any vendor, and creates its reader.

Vendors are queried concurrently, each with a deadline, so that one driver that hangs or is broken hides only its own
GPUs. No number of GPUs is configured here, except how many to simulate.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.gpu.drivers.amd import open_amd
from orchestrator.gpu.drivers.intel import open_intel
from orchestrator.gpu.drivers.simulated import SimulatedAssignments, open_simulated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.gpu.sample import GpuInfo, GpuReader

DRIVER_DEADLINE_SECONDS: Final = 15.0
"""A driver that wakes a GPU from persistence-off takes seconds; one that takes longer hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The GPUs of a host: a reader per GPU, and for each vendor that failed a sentence with the reason."""

    readers: tuple[GpuReader, ...]
    problems: tuple[str, ...]

    @property
    def gpus(self) -> tuple[GpuInfo, ...]:
        """Return the identities in the order of the readers."""
        return tuple(reader.info for reader in self.readers)

    def close(self) -> None:
        """Close every reader."""
        for reader in self.readers:
            reader.close()


def node_name() -> str:
    """Return the host's name as in labels."""
    return socket.gethostname().partition(".")[0]


def discover(
    *,
    simulate: int = 0,
    node: str | None = None,
    sysfs: Path = Path("/sys"),
    deadline_seconds: float = DRIVER_DEADLINE_SECONDS,
) -> tuple[GpuInfo, ...]:
    """Return the GPUs of this host, all vendors concurrently, in a stable order; empty on a host without one.

    With `simulate` > 0 the host has that many simulated GPUs and no other. Never raises for a broken driver: `survey` reports it.
    """
    found = survey(simulate=simulate, node=node, sysfs=sysfs, deadline_seconds=deadline_seconds)
    try:
        return found.gpus
    finally:
        found.close()


def survey(
    *,
    simulate: int = 0,
    assignments: Path | None = None,
    node: str | None = None,
    sysfs: Path = Path("/sys"),
    deadline_seconds: float = DRIVER_DEADLINE_SECONDS,
) -> Survey:
    """Return readers for the GPUs of this host, and the vendors that failed.

    `assignments` is the file of processes on simulated GPUs; see `orchestrator.gpu.drivers.simulated`.
    """
    node = node or node_name()
    if simulate > 0:
        source = SimulatedAssignments(assignments) if assignments is not None else None
        return Survey(readers=tuple(open_simulated(simulate, node, source)), problems=())
    vendors: tuple[tuple[str, Callable[[], Sequence[GpuReader]]], ...] = (
        ("NVIDIA", _open_nvidia),
        ("AMD", lambda: open_amd(sysfs, node)),
        ("Intel", lambda: open_intel(sysfs, node)),
    )
    readers: list[GpuReader] = []
    problems: list[str] = []
    for name, outcome in _ask(vendors, deadline_seconds):
        if isinstance(outcome, str):
            problems.append(f"{name} GPUs cannot be read: {outcome}")
        else:
            readers += outcome
    for index, reader in enumerate(readers):
        reader.info = dataclasses.replace(reader.info, index=index)
    return Survey(readers=tuple(readers), problems=tuple(problems))


def open_readers(
    uuids: Sequence[str] | None = None,
    *,
    simulate: int = 0,
    assignments: Path | None = None,
    node: str | None = None,
    sysfs: Path = Path("/sys"),
) -> tuple[GpuReader, ...]:
    """Return readers for these GPUs, or for all. Raises LookupError with the UUIDs that this host does not have."""
    found = survey(simulate=simulate, assignments=assignments, node=node, sysfs=sysfs)
    if uuids is None:
        return found.readers
    by_uuid = {reader.info.uuid: reader for reader in found.readers}
    for uuid, reader in by_uuid.items():
        if uuid not in uuids:
            reader.close()
    missing = [uuid for uuid in uuids if uuid not in by_uuid]
    if missing:
        for uuid in by_uuid.keys() & set(uuids):
            by_uuid[uuid].close()
        here = ", ".join(by_uuid) or "none"
        reasons = " ".join(found.problems)
        raise LookupError(f"this host has no GPU {', '.join(missing)}; it has: {here}. {reasons}".rstrip())
    return tuple(by_uuid[uuid] for uuid in uuids)


def _open_nvidia() -> Sequence[GpuReader]:
    """Open NVIDIA's GPUs; where all are simulated, the process does without pynvml's five megabytes."""
    from orchestrator.gpu.drivers.nvidia import open_nvidia

    return open_nvidia()


def _ask(
    vendors: Sequence[tuple[str, Callable[[], Sequence[GpuReader]]]], deadline_seconds: float
) -> list[tuple[str, Sequence[GpuReader] | str]]:
    """Return each vendor's readers, or the reason of a failure; one thread each, abandoned when its driver hangs."""
    outcomes: dict[str, Sequence[GpuReader] | str] = {}

    def ask(name: str, opener: Callable[[], Sequence[GpuReader]]) -> None:
        try:
            outcomes[name] = opener()
        except Exception as error:
            outcomes[name] = str(error) or type(error).__name__

    threads = [
        threading.Thread(target=ask, args=vendor, name=f"orch-survey-{vendor[0]}", daemon=True) for vendor in vendors
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_seconds)
    late = f"its driver has not answered within {deadline_seconds:g} s. Check the kernel log; a reboot may be needed."
    return [(name, outcomes.get(name, late)) for name, _ in vendors]
