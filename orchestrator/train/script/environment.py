"""Reads the environment of a training process: once, typed, with the reason where a value is invalid.

The variables are torchrun's, and ORCH_* ones from the runtime. Nothing else in this package reads the
environment.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.train.script.elastic import parse_range
from orchestrator.train.script.save_schedule import (
    AUTO,
    DEFAULT_RECOVERY_SECONDS,
    PRIOR_FAILURE_SECONDS,
    IntervalSetting,
    IntervalSettingError,
    parse_interval,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_CHECKPOINT_DIR = "checkpoints"
DEFAULT_KEEP = 3
METADATA_VARIABLE = "ORCH_TRAINING_METADATA"
"""Names the file of `orch record -- COMMAND` into which rank 0 writes the labels of the run."""


class EnvironmentValueError(ValueError):
    """A variable that the launcher sets has an invalid value; unset it or correct it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """One rank's place and settings. ``attempt`` is None, and ``job_id`` empty, outside of orch.

    ``token`` is equal on all ranks of one run and differs between runs; None when that cannot be ensured. ``elastic``
    is the fewest and the most ranks that the job may get; None when their number is fixed.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    job_id: str = ""
    attempt: int | None = None
    token: str | None = None
    device: str | None = None
    progress_path: str | None = None
    previous_step: int | None = None
    snapshot_dir: str | None = None
    checkpoint_dir: str = DEFAULT_CHECKPOINT_DIR
    resume_from: str | None = None
    keep: int | None = DEFAULT_KEEP
    keep_best: int | None = None
    score_attribute: str | None = None
    score_order: str = "max"
    interval: IntervalSetting = AUTO
    recovery_seconds: float = DEFAULT_RECOVERY_SECONDS
    failure_seconds: float = PRIOR_FAILURE_SECONDS
    metadata_path: str | None = None
    elastic: tuple[int, int] | None = None

    @property
    def on_one_node(self) -> bool:
        """Whether all ranks share this machine, and with it the memory of snapshots."""
        return self.local_world_size == self.world_size


def read_environment(environ: Mapping[str, str]) -> RankEnvironment:
    """Read ``environ``. Raises EnvironmentValueError naming the variable."""
    rank, world_size = _number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise EnvironmentValueError(f"RANK={rank} is not one of WORLD_SIZE={world_size} ranks; correct or unset both")
    attempt = _optional_number(environ, "ORCH_ATTEMPT")
    job_id = environ.get("ORCH_JOB_ID", "")
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", 1 if world_size == 1 else world_size)
    keep = environ.get("ORCH_CHECKPOINT_KEEP", "")
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", 0),
        local_world_size=local_world_size,
        job_id=job_id,
        attempt=attempt,
        token=_token(environ, job_id, attempt, one_node=local_world_size == world_size),
        device=environ.get("ORCH_DEVICE") or None,
        progress_path=environ.get("ORCH_PROGRESS_PATH") or None,
        previous_step=_optional_number(environ, "ORCH_PREVIOUS_STEP"),
        snapshot_dir=environ.get("ORCH_SNAPSHOT_DIR") or None,
        checkpoint_dir=environ.get("ORCH_CHECKPOINT_DIR") or DEFAULT_CHECKPOINT_DIR,
        resume_from=environ.get("ORCH_RESUME_FROM") or None,
        keep=None if keep == "all" else _number(environ, "ORCH_CHECKPOINT_KEEP", DEFAULT_KEEP),
        keep_best=_optional_number(environ, "ORCH_CHECKPOINT_KEEP_BEST"),
        score_attribute=environ.get("ORCH_CHECKPOINT_SCORE_ATTRIBUTE") or None,
        score_order=environ.get("ORCH_CHECKPOINT_SCORE_ORDER") or "max",
        interval=_interval(environ),
        recovery_seconds=_seconds(environ, "ORCH_RECOVERY_SECONDS", DEFAULT_RECOVERY_SECONDS),
        failure_seconds=_seconds(environ, "ORCH_FAILURE_SECONDS", PRIOR_FAILURE_SECONDS),
        metadata_path=environ.get(METADATA_VARIABLE) or None,
        elastic=_elastic(environ),
    )


def _interval(environ: Mapping[str, str]) -> IntervalSetting:
    try:
        return parse_interval(environ.get("ORCH_CHECKPOINT_INTERVAL", ""))
    except IntervalSettingError as error:
        raise EnvironmentValueError(f"ORCH_CHECKPOINT_INTERVAL: {error}") from error


def _elastic(environ: Mapping[str, str]) -> tuple[int, int] | None:
    text = environ.get("ORCH_ELASTIC", "")
    try:
        return parse_range(text) if text else None
    except ValueError as error:
        raise EnvironmentValueError(f"ORCH_ELASTIC: {error}") from error


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise EnvironmentValueError(f"{name}={text!r} is not a positive number of seconds; correct or unset it")
    return value


def _token(environ: Mapping[str, str], job_id: str, attempt: int | None, *, one_node: bool) -> str | None:
    if attempt is not None:
        facts = [job_id, str(attempt)]
    elif one_node:  # all ranks have one parent, the launcher, which numbers their restarts
        parent = os.getppid()
        facts = [str(parent), _started(parent), environ.get("TORCHELASTIC_RESTART_COUNT", "0")]
        # A shell may start one run after another: these differ when the runs' ranks meet at different addresses.
        facts += [environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    else:
        return None
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]


def _started(pid: int) -> str:
    """Return when a process started, in clock ticks since boot, because process ids are reused."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    value = _optional_number(environ, name)
    return default if value is None else value


def _optional_number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise EnvironmentValueError(f"{name}={text!r} is not a whole number; correct or unset it") from error
