"""Names of orch's actors and placement groups in Ray. One namespace per ORCH_HOME separates daemons on one cluster."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path


SERVICES: Final = ("agent-", "exporter-")  # prefixes of actors that serve all jobs


def namespace(home: Path) -> str:
    """Return the Ray namespace of a daemon."""
    return f"orch-{hashlib.sha256(str(home).encode()).hexdigest()[:12]}"


def agent_name(node_id: str) -> str:
    """Return the node agent's actor name."""
    return f"agent-{node_id}"


def gang_name(job_id: str, gang: int) -> str:
    """Return a gang's name in orch's own calls and files."""
    return f"{job_id}-g{gang}"


def rank_actor_name(job_id: str, gang: int, rank: int) -> str:
    """Return a rank actor's name."""
    return f"rank-{job_id}-g{gang}-r{rank}"


_RANK_ACTOR: Final = re.compile(r"rank-(?P<job>.+)-g(?P<gang>\d+)-r(?P<rank>\d+)")


def gang_of(actor_name: str) -> tuple[str, int, int] | None:
    """Return the job id, gang and rank of a rank actor's name; None for another actor's."""
    found = _RANK_ACTOR.fullmatch(actor_name)
    return None if found is None else (found["job"], int(found["gang"]), int(found["rank"]))


def placement_group_name(job_id: str, gang: int) -> str:
    """Return a placement group's name; prefixed, because placement groups of all namespaces share their names."""
    return f"gang-{job_id}-g{gang}"


def exporter_name(gpu_uuid: str) -> str:
    """Return the name of a GPU's exporter actor."""
    return f"exporter-{gpu_uuid}"
