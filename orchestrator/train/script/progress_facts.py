"""The content of a progress page as values, and the creation of a blank page."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.train.script import progress_layout as layout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """The rank's facts about its checkpoints on storage. Times are seconds since the epoch; None means not yet.

    Under orch the rank only takes snapshots in memory, and its rank actor has the state on storage.
    """

    saved_step: int | None = None
    saved_at: float | None = None
    saved_path: str = ""
    saved_bytes: int = 0
    failed_saves: int = 0
    failure: str = ""
    failure_kind: str = ""  # equal for all failures with one cause
    failed_at: float | None = None
    resumed_step: int | None = None
    resumed_path: str = ""
    resumed_seconds: float = 0.0
    quarantined: tuple[str, ...] = ()
    interval_steps: int | None = None
    interval_reason: str = ""
    snapshot_bytes: int = 0  # memory of all slots of the rank
    snapshots_off: str = ""  # why the newest save went to storage directly
    waits: int = 0  # saves that waited for storage to take an earlier one
    waited_seconds: float = 0.0
    left_out: int = 0  # saves that should have reached storage and were dropped because it failed
    left_out_step: int | None = None  # the newest of them


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSnapshot:
    """One consistent reading of a progress page.

    Wall times (``*_at``, ``*_since``) are seconds since the epoch, None until the thing has happened. ``step`` is the
    step reported last, ``max_step`` the highest one. ``new_step`` and ``new_step_at`` are of the first reported step
    above the one given as ORCH_PREVIOUS_STEP. ``step_seconds`` is a running mean; ``recent_step_seconds`` holds up to
    32 durations, oldest first. ``busy_seconds`` is a running mean, too: the processor time of a step in the thread that
    reports it. ``saving_since`` is set while a save to storage stalls the training loop.
    ``snapshot_step`` is the newest one in shared memory; ``save_seconds`` is how long the last save, of either kind,
    stalled the loop; ``saves`` counts both. ``unusable`` names the values that were on the page and are left out, because
    they have the wrong type, are not finite, or are out of range. ``guessed``: the script reports nothing, and its steps were
    recognised in what it prints.
    """

    writer_pid: int | None = None
    step: int | None = None
    max_step: int | None = None
    total_steps: int | None = None
    epoch: float | None = None
    phase: str = ""
    phase_since: float | None = None
    samples: int | None = None
    tokens: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_dropped: int = 0
    first_step_at: float | None = None
    new_step: int | None = None
    new_step_at: float | None = None
    last_step_at: float | None = None
    last_report_at: float | None = None
    steps_reported: int = 0
    step_seconds: float | None = None
    busy_seconds: float | None = None
    recent_step_seconds: tuple[float, ...] = ()
    saving_since: float | None = None
    snapshot_step: int | None = None
    snapshot_at: float | None = None
    save_seconds: float | None = None
    saves: int = 0
    checkpoint: CheckpointFacts = CheckpointFacts()
    stop_requested: bool = False
    stop_seen: bool = False
    unusable: tuple[str, ...] = ()
    guessed: bool = False


def create_page(target: Path) -> int:
    """Create a blank page at ``target``, replacing an existing one; mode 0600. Returns its descriptor, which the caller closes."""
    blank = bytearray(layout.PAGE_BYTES)
    layout.HEADER.pack_into(blank, 0, layout.MAGIC, layout.LAYOUT_VERSION, layout.PAGE_BYTES)
    draft = target.with_name(f"{target.name}.{os.getpid()}.new")
    draft.unlink(missing_ok=True)
    handle = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.write(handle, blank)
        draft.replace(target)  # a reader sees the old page or a whole new one
    except BaseException:
        os.close(handle)
        raise
    return handle
