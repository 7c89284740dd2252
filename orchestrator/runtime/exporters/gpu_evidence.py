"""Collects what the driver reports of a rank's GPUs at the time of its death: Xid events and lost GPUs.

Queries the exporters, which receive an Xid at once; does not wait for an exporter that hangs with its GPU.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from orchestrator.core.facts.gpus import GpuLost, Xid
from orchestrator.gpu.sampler import Health

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.facts.gpus import GpuFault
    from orchestrator.gpu.exporter.exporter import GpuStatus
    from orchestrator.runtime.exporters.exporters import Exporters

ASK_SECONDS: Final = 0.5
RECENT_SECONDS: Final = 60.0  # an Xid precedes the program's failure: a collective may wait for long


async def gpu_evidence(exporters: Exporters, uuids: Sequence[str]) -> tuple[GpuFault, ...]:
    """Return what is wrong with these GPUs, by their newest values; empty where nothing is wrong or no exporter answers."""
    try:
        async with asyncio.timeout(ASK_SECONDS):
            reports = await exporters.ask(uuids)
    except TimeoutError:
        reports = {}
    missing = {uuid for _, uuid in exporters.missing()}
    faults: list[GpuFault] = [GpuLost(gpu_uuid=uuid) for uuid in uuids if uuid in missing]
    for uuid in uuids:
        report = reports.get(uuid)
        if report is not None and uuid not in missing:
            faults += evidence_of(uuid, report.status)
    return tuple(faults)


def evidence_of(uuid: str, status: GpuStatus) -> list[GpuFault]:
    """Return what one GPU's status shows of a failure now: the time of its newest sample, by the clock of its node."""
    now = status.sample.timestamp if status.sample else 0.0
    lost: list[GpuFault] = [GpuLost(gpu_uuid=uuid)] if status.health is Health.LOST else []
    recent = (x for x in (status.sample.xids if status.sample else ()) if now - x.last_timestamp <= RECENT_SECONDS)
    return lost + [
        Xid(gpu_uuid=uuid, number=xid.code, at=xid.last_timestamp, seconds_before=now - xid.last_timestamp)
        for xid in recent
    ]
