"""Names of what orch keeps in Ray. A namespace per ORCH_HOME, so that two daemons on one cluster never meet."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path


SERVICES: Final = ("agent-", "exporter-")  # how the names begin of what serves all jobs


def namespace(home: Path) -> str:
    """The Ray namespace of a daemon."""
    return f"orch-{hashlib.sha256(str(home).encode()).hexdigest()[:12]}"


def agent_name(node_id: str) -> str:
    """The node agent's actor name."""
    return f"agent-{node_id}"


def rank_actor_name(job_id: str, gang: int, rank: int) -> str:
    """A rank actor's name."""
    return f"rank-{job_id}-g{gang}-r{rank}"


def placement_group_name(job_id: str, gang: int) -> str:
    """A gang's placement group; prefixed, because placement groups of all namespaces share their names."""
    return f"gang-{job_id}-g{gang}"


def exporter_name(gpu_uuid: str) -> str:
    """A GPU's exporter actor."""
    return f"exporter-{gpu_uuid}"
