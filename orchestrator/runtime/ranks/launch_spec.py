"""The launch plan of one rank of one attempt, as the daemon sends it to the rank's actor (``gangs/launching.py`` makes it).

A plan extends the request to the fork server, so it is the only form of what a rank needs to start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping  # noqa: TC003  # msgspec reads the annotations
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from orchestrator.checkpoint.external.external_checkpoints import WatchSettings  # noqa: TC001
from orchestrator.checkpoint.repository.persister import StoreSettings  # noqa: TC001
from orchestrator.runtime.forkserver.wire import SpawnRequest
from orchestrator.runtime.ranks.logs import LogLimits

_MADE_BY_RAY: Final = "/runtime_resources/"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlan:
    """Directory of the ranks' snapshots in shared memory, and settings for writing them to storage."""

    directory: str
    settings: StoreSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan(SpawnRequest):
    """Everything that one rank of one attempt needs to start: the request for its process, and its other settings.

    ``record`` follows from job, attempt and rank.
    """

    job_id: str
    attempt: int
    rank: int
    record: Mapping[str, Any] = field(init=False, repr=False)
    python: str
    fork_socket: str
    log_dir: str
    exit_record: str
    page: str
    previous_step: int
    runtime_env: tuple[str, ...] = ()
    snapshots: SnapshotPlan | None = None
    watch: WatchSettings | None = None
    progress_pattern: str = ""
    log_policies: tuple[tuple[str, str], ...] = ()
    log_limits: LogLimits = field(default_factory=LogLimits)
    idle_seconds: float | None = None
    """The rank runs on a terminal, and is idle after this long; None: the job is not interactive."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "record", {"job": self.job_id, "attempt": self.attempt, "rank": self.rank})


def inside(plan: RankPlan, environ: Mapping[str, str], executable: str) -> RankPlan:
    """Return a rank's plan for an actor that runs in what Ray installed: its modules, its interpreter, a cold start.

    ``environ`` and ``executable`` are the actor's own.
    """
    if not plan.runtime_env:
        return plan
    env = dict(plan.env)
    search = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if _MADE_BY_RAY in part]
    if search:
        env["PYTHONPATH"] = os.pathsep.join([*search, *filter(None, [env.get("PYTHONPATH")])])
    if "pip" not in plan.runtime_env:
        return replace(plan, env=env, cold=True)
    home = Path(executable).parent
    env |= {"VIRTUAL_ENV": str(home.parent), "PATH": f"{home}{os.pathsep}{env.get('PATH', '')}"}
    env.setdefault("PYTHONUNBUFFERED", "1")
    if plan.mode == "command":
        target = executable if plan.target == plan.python else plan.target
        return replace(plan, env=env, cold=True, target=target)
    program = ("-m", plan.target) if plan.mode == "module" else (plan.target,)
    args = (*plan.python_options, *program, *plan.args)
    return replace(plan, env=env, cold=True, mode="command", target=executable, args=args, python_options=())
