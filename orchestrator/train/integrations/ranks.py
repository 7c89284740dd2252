"""Checks that another library trains with all ranks of the job; otherwise each rank would train and save by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.train.errors import ConfigError

if TYPE_CHECKING:
    from orchestrator.train.script.training_context import Context


def require_all_ranks(ctx: Context, processes: int, *, library: str, remedy: str) -> None:
    """Raise ConfigError unless the library counts as many processes as the job has ranks. ``remedy``: what to write."""
    if processes == ctx.world_size:
        return
    have = "process" if processes == 1 else "processes"
    raise ConfigError(
        f"{library} trains with {processes} {have}, the job has {ctx.world_size} ranks: they would not train together"
        f" and would overwrite each other's files; {remedy}"
    )
