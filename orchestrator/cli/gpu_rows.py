"""Where `orch gpus` and `orch top` get their rows: from the daemon for every node, from this machine's drivers without one.

A daemon that does not serve loads yet still says which GPUs there are and who holds them; the loads of those on this
machine are then read here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.api.errors import DaemonUnreachableError, NotFoundError, ProtocolMismatchError
from orchestrator.api.protocol import API_PREFIX
from orchestrator.gpu.sampler import Health
from orchestrator.gpu.view import GpuHolder, GpuRow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestrator.api.views import JobView, NodeView
    from orchestrator.cli.session import Session

LIVE_STATES = ("STARTING", "RUNNING", "RECOVERING", "DRAINING")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPicture:
    """The GPUs in view, the jobs that hold some, and what could not be seen. ``daemon`` tells whether one answered."""

    rows: tuple[GpuRow, ...]
    jobs: tuple[JobView, ...] = ()
    problems: tuple[str, ...] = ()
    daemon: bool = False


def picture(session: Session, local: Callable[[], tuple[Sequence[GpuRow], Sequence[str]]]) -> GpuPicture:
    """Ask the daemon; without one, ``local`` gives this machine's rows and problems."""
    try:
        jobs = session.client().jobs(states=LIVE_STATES).jobs
        served = _rows_of_daemon(session)
        if served is not None:
            return GpuPicture(rows=tuple(served), jobs=tuple(jobs), daemon=True)
        nodes = session.client().nodes()
    except DaemonUnreachableError:
        here, problems = local()
        return GpuPicture(rows=tuple(here), problems=tuple(problems))
    here, problems = local()
    rows = merged(nodes, {row.gpu_uuid: row for row in here})
    return GpuPicture(rows=tuple(rows), jobs=tuple(jobs), problems=tuple(problems), daemon=True)


def _rows_of_daemon(session: Session) -> list[GpuRow] | None:
    """Rows with their loads from the daemon; None from one that does not serve them."""
    from orchestrator.api import wire

    try:
        document: Any = wire.call(session.endpoint, "GET", f"{API_PREFIX}/gpus")
    except NotFoundError:
        return None
    try:
        return [GpuRow.from_json(row) for row in document["gpus"]]
    except (KeyError, TypeError) as error:
        raise ProtocolMismatchError(f"the daemon's answer is not a list of GPUs: {error}") from error


def merged(nodes: Sequence[NodeView], local: Mapping[str, GpuRow]) -> list[GpuRow]:
    """Every GPU of every node, with the holder that the daemon names and the load that was read here."""
    rows: list[GpuRow] = []
    for node in nodes:
        for gpu in node.gpus:
            holders = () if gpu.job_id is None else (GpuHolder(job=gpu.job_id, rank=gpu.rank or 0),)
            known = local.get(gpu.uuid) or GpuRow(
                gpu_uuid=gpu.uuid,
                node=node.name,
                index=gpu.index,
                vendor="simulated" if gpu.uuid.startswith("simulated") else "",
                model=gpu.model,
                simulated=gpu.uuid.startswith("simulated"),
                memory_total_bytes=gpu.memory_total_bytes,
                health=Health.OK if gpu.healthy else Health.FAILING,
                problem=gpu.problem or None,
            )
            job, rank = (holders[0].job, holders[0].rank) if holders else (None, None)
            rows.append(dataclasses.replace(known, node=node.name, job=job, rank=rank, holders=holders))
    return rows
