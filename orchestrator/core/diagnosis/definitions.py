"""Every kind of finding in one table: the figure it uses, where it opens and closes, and for how long.

A rule computes a figure, larger for worse; a finding opens when the figure is at ``opens_at`` or above, was so ``open_seconds``
ago, and has not been below ``closes_at`` since; it closes when the figure has been below ``closes_at`` for ``close_seconds``.
Figures are taken over windows, so the time to a finding is about half a window longer. Nothing else in the daemon has a threshold of its own for findings.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from orchestrator.core.facts import findings as f

if TYPE_CHECKING:
    from collections.abc import Mapping

WINDOW_SECONDS: Final = 30.0
"""GPUs' figures are means and medians over this time."""
LEAST_SAMPLES: Final = 8
"""A window with fewer samples gives no figure."""
RANK_WINDOW_SECONDS: Final = 40.0
LONG_WINDOW_SECONDS: Final = 120.0
"""A rank's times are means over both windows: the long one shows what noise hides in the short one."""
LEAST_STEPS: Final = 5
"""A mean covers at least this many moments with new steps, however long they take."""
CERTAIN_DEVIATIONS: Final = 4.5
"""A rank or a node that is slower by less than this many standard errors may be so by chance: its figure counts for less."""
BUSY_UTILIZATION: Final = 0.4
"""GPUs are compared while the job's typical one is busy for this share of the time."""
SPINNING_UTILIZATION: Final = 0.8
"""GPUs that wait in a collective are busy for at least this share of the time."""
IDLE_UTILIZATION: Final = 0.02
BALANCE_SECONDS: Final = 60.0
"""A job's balance compares its GPUs' averages over this time."""
SETTLED_SECONDS: Final = 10.0
"""A job that has run for less than this has no balance: its ranks do not all start at once."""
UNUSED_UTILIZATION: Final = 0.05
"""Nor has a job whose GPUs are on average busy for no more than this share of the time."""
BALANCE_BANDS: Final = (0.05, 0.10, 0.20)
"""The bands of a balance end at these coefficients of variation: excellent, good, fair. Above them it is poor."""
LOCKSTEP: Final = 1.1
"""Ranks with steps that take the same time to within this factor meet in a collective at every step."""
LEAST_STEP_SHARE: Final = 0.05
"""The extra time of a rank must be this share of a step: less has no effect."""
LOWER_LIMIT: Final = 0.95
"""A power cap counts where the GPU's limit or clock is below this share of its neighbours'."""
STILL_SECONDS: Final = 30.0
STILL_STEPS: Final = 10.0
STILL_PAUSES: Final = 3.0
"""Limits on stillness with idle ranks: seconds, multiples of the longest step, of the longest pause in the phase."""
WORKING_FACTOR: Final = 10.0
"""Factor on those limits for a job in which a rank works."""
WORLD_SIZE_SECONDS: Final = 10.0
RENDEZVOUS_SECONDS: Final = 30.0
"""Longest waits of ranks for a process group: for one of a wrong size, and for one that lacks an idle rank."""
FLAT_FACTOR: Final = 5.0
"""A loss is flat after this many times the longest interval between its changes."""
FLAT_STEPS: Final = 10
NEVER_CHANGED_STEPS: Final = 1000
"""A loss that has never changed may be reported once per epoch: it needs this many steps, and ten minutes."""
NEVER_CHANGED_SECONDS: Final = 600.0
UNSAVED_SECONDS: Final = 1800.0
"""A job that saves is reported after three of its intervals, and not before this."""
SAVES_MISSED: Final = 3.0
NEVER_SAVED_SECONDS: Final = 7200.0
LEAST_STALL_SECONDS: Final = 1.0
"""A save that stalls training for less is no problem, however often it occurs."""
GROWTH_SLOTS: Final = 10
"""Memory grows steadily when it has grown through this many minutes."""
GROWTH_SLOT_SECONDS: Final = 60.0
GROWING_SHARE: Final = 0.8
"""It grew in at least this share of them, and shrank in none."""
FAST_SLOTS: Final = 6
FAST_SLOT_SECONDS: Final = 10.0
FAST_HORIZON_SECONDS: Final = 600.0
FAST_USED: Final = 0.4
"""Host memory that would be full within ten minutes is reported after one, where it is already filled to this share."""
PROCESS_WINDOW_SECONDS: Final = 60.0
LEAST_LOOKS: Final = 30
"""Minimum number of looks at a rank's training thread from which a share is computed."""
LEAST_BUSY: Final = 0.02
"""A rank that uses less of a processor is idle, and does not wait for its input."""
LOCKED_MORE: Final = 0.1
"""Waiting ranks wait in a lock for this share of the time more than the rank that they wait for."""
STEADY_GROWTH: Final = 0.7
"""The later half of the growth is at least this share of the earlier half: a filling cache grows ever more slowly."""
GROWTH_HORIZON_SECONDS: Final = 6 * 3600.0
"""Memory that would be full only later is not reported."""
EXPORTER_SECONDS: Final = 30.0
"""An exporter that has not answered for this long is stopped or hangs; on a machine with a load of 50 on each processor one may take 20 s."""
STARTING: Final = 0.5
"""An exporter that starts is no evidence: the finding neither opens nor closes."""
FOREIGN_BYTES: Final = 2.0 * 2**30
FOREIGN_SHARE: Final = 0.05
"""Memory that no process accounts for: drivers and contexts take up to this, or this share of the GPU's memory."""
COUNTED_SECONDS: Final = 600.0
"""Memory errors that are corrected are counted over this time."""
CORRECTED: Final = 60.0
"""This many corrected errors in that time, one every ten seconds, show a failing cell; single ones are cosmic rays."""
LOSS_WINDOW: Final = 300
"""A loss is compared with this many of its newest values, ten minutes of them."""
LEAST_LOSSES: Final = 40
JUMPED_VALUES: Final = 6
"""This many values in a row represent the present loss: single batches do not."""
JUMPED_DEVIATIONS: Final = 6.0
JUMPED_FACTOR: Final = 0.5
"""A jump is at least this share of the usual loss, and at least ``JUMPED_DEVIATIONS`` robust standard deviations."""
JUMP_ENDS_AFTER: Final = 300
"""A loss that stays at the level of its jump for this many values has that level as its usual value."""
STORAGE_FULL: Final = frozenset({"ENOSPC", "EDQUOT"})
LEAST_WRITE_SECONDS: Final = 20.0
USUAL_WRITES: Final = 5.0
"""A write takes too long after this many times the attempt's usual time, and at least ``LEAST_WRITE_SECONDS``."""
FIRST_WRITE_SECONDS: Final = 600.0
"""The first writes, for which no usual time is known, may take this long."""
WAITING_SHARE: Final = 0.1
WAITING_SECONDS: Final = 120.0
"""Saves that wait for storage for ``WAITING_SHARE`` of the newest ``WAITING_SECONDS`` make training slower."""
LATE_SECONDS: Final = 0.5
"""A daemon is overloaded if its loop is late by more than this."""
LATE_LOOKS: Final = 8
"""The daemon's lateness is the median of this many looks, so that one pause of the machine does not count."""
AGAIN_FACTOR: Final = 2.0
"""After each close a finding takes this many times as long to open again, at most ``LONGEST_AGAIN_SECONDS``."""
LONGEST_AGAIN_SECONDS: Final = 1800.0
MOST_FINDINGS: Final = 16
"""Maximum number of findings that one job has open at a time; of new ones, the most severe open."""


class Severity(StrEnum):
    """Urgency of a finding for the user."""

    CRITICAL = "critical"  # the job gets nothing done, or will lose its work
    WARNING = "warning"  # the job is slower or less safe than it could be


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """Figures and times at which findings of one class open and close. ``figure`` describes the figure.

    ``outlives``: the finding stays when the attempt ends. ``apart``: it neither is explained by another one about the same rank or
    GPU nor explains one.
    """

    figure: str
    opens_at: float
    closes_at: float
    open_seconds: float
    close_seconds: float
    severity: Severity = Severity.WARNING
    outlives: bool = False
    apart: bool = False


def _at_once(
    figure: str, close_seconds: float = 10.0, *, open_seconds: float = 0.0, outlives: bool = False
) -> Definition:
    return Definition(
        figure=figure,
        opens_at=1.0,
        closes_at=1.0,
        open_seconds=open_seconds,
        close_seconds=close_seconds,
        severity=Severity.CRITICAL,
        outlives=outlives,
    )


def _over(figure: str, opens_at: float, closes_at: float, seconds: tuple[float, float]) -> Definition:
    return Definition(
        figure=figure, opens_at=opens_at, closes_at=closes_at, open_seconds=seconds[0], close_seconds=seconds[1]
    )


DEFINITIONS: Final[Mapping[type[f.Finding], Definition]] = {
    f.GpuFaulty: _at_once("errors that the GPU or its driver reports", 600.0, open_seconds=4.0),
    f.RankStopped: _at_once("stopped processes of a rank that makes no step"),
    f.RankAtBreakpoint: _at_once("ranks at a prompt of their debugger", 4.0),
    f.WrongWorldSize: _at_once("time that ranks wait for their process group, over 10 s"),
    f.RendezvousIncomplete: _at_once("time that ranks wait for their process group, over 30 s"),
    f.NoStep: _at_once("time without a step, over the time that this job may take for one"),
    f.ExporterSilent: Definition(
        figure="1 while its exporter does not answer, 0.5 while that starts",
        opens_at=1.0,
        closes_at=STARTING,
        open_seconds=EXPORTER_SECONDS,
        close_seconds=6.0,
    ),
    f.GpuShared: Definition(
        figure="processes of none of the daemon's jobs",
        opens_at=1.0,
        closes_at=1.0,
        open_seconds=12.0,
        close_seconds=20.0,
    ),
    f.GpuMemoryTaken: Definition(
        figure="memory that no process accounts for, over what drivers take",
        opens_at=1.0,
        closes_at=0.8,
        open_seconds=20.0,
        close_seconds=30.0,
    ),
    f.GpuMemoryErrors: Definition(
        figure="corrected errors in ten minutes, over 60, or remapped rows since the attempt began",
        opens_at=1.0,
        closes_at=0.2,
        open_seconds=4.0,
        close_seconds=600.0,
        apart=True,
    ),
    f.GpuThrottled: _over("share of the window in which clocks are held down", 0.5, 0.2, (10.0, 30.0)),
    f.GpuSlow: _over("how far its clock is below its neighbours', as a share", 0.08, 0.05, (10.0, 30.0)),
    f.InputStarved: _over("share of a step spent waiting for the next batch", 0.3, 0.2, (12.0, 30.0)),
    f.NodeSlow: _over("own part of a step of the node's ranks, over that of the other nodes'", 1.15, 1.1, (14.0, 30.0)),
    f.RankSlow: _over("own part of a step, over that of the other ranks", 1.15, 1.1, (14.0, 30.0)),
    f.RankAwaited: _over(
        "power or processor time, over the others'; or their share of time in locks, less its own, plus 1",
        1.25,
        1.15,
        (20.0, 30.0),
    ),
    f.GpuIdle: _over("how far its utilization is below its neighbours', as a share", 0.75, 0.5, (14.0, 30.0)),
    f.JobIdle: Definition(
        figure="GPUs without work", opens_at=1.0, closes_at=1.0, open_seconds=24.0, close_seconds=10.0
    ),
    f.GpusUnused: Definition(
        figure="GPUs without work while steps are made",
        opens_at=1.0,
        closes_at=1.0,
        open_seconds=24.0,
        close_seconds=10.0,
    ),
    f.GpuMemoryGrowing: Definition(
        figure="minutes in a row of steady growth, over ten",
        opens_at=1.0,
        closes_at=1.0,
        open_seconds=0.0,
        close_seconds=60.0,
        apart=True,
    ),
    f.HostMemoryGrowing: Definition(
        figure="steady growth of host memory that reaches its limit",
        opens_at=1.0,
        closes_at=1.0,
        open_seconds=0.0,
        close_seconds=60.0,
        apart=True,
    ),
    f.LoadUneven: _over("coefficient of variation of utilization or power", BALANCE_BANDS[-1], 0.15, (60.0, 60.0)),
    f.LossNotFinite: Definition(
        figure="metrics that are NaN or infinite",
        opens_at=1.0,
        closes_at=1.0,
        open_seconds=4.0,
        close_seconds=30.0,
        severity=Severity.CRITICAL,
    ),
    f.LossFlat: _over("steps without a change of the loss, over what is usual", 1.0, 1.0, (4.0, 0.0)),
    f.LossJumped: _over("how far the loss is above its usual value, over what counts as a jump", 1.0, 0.5, (6.0, 10.0)),
    f.StorageFull: Definition(
        figure="size of a checkpoint, over what its storage has left",
        opens_at=1.0,
        closes_at=0.9,
        open_seconds=10.0,
        close_seconds=20.0,
        severity=Severity.CRITICAL,
    ),
    f.SavesFailing: Definition(
        figure="saves that failed, the newest among them",
        opens_at=2.0,
        closes_at=1.0,
        open_seconds=0.0,
        close_seconds=0.0,
        severity=Severity.CRITICAL,
    ),
    f.SavesRare: _over("time since the newest checkpoint, over the intended interval", 1.0, 1.0, (30.0, 0.0)),
    f.StorageSlow: _over("time that storage takes for a checkpoint, over what it may take", 1.0, 0.5, (10.0, 30.0)),
    f.SavesSlow: _over("time that a save stalls training, over the interval of saves", 0.2, 0.1, (10.0, 0.0)),
    f.ClockSkewed: _over("seconds between the clocks of the node and the daemon", 10.0, 5.0, (10.0, 30.0)),
    f.DaemonOverloaded: _over(
        "seconds by which the daemon's loop is late", LATE_SECONDS, LATE_SECONDS / 2.0, (20.0, 30.0)
    ),
    f.RestartLoop: _at_once("restarts in an hour, over three", 0.0, outlives=True),
}
"""Ordered by severity and information: of two about the same rank or GPU, the first explains the other."""

PRECEDENCE: Final[Mapping[str, int]] = {cls.kind: place for place, cls in enumerate(DEFINITIONS)}


def definition_of(finding: f.Finding) -> Definition:
    """Return the definition of a finding's kind."""
    return DEFINITIONS[type(finding)]


def severity_of(finding: f.Finding) -> Severity:
    """Return the severity of a finding."""
    return definition_of(finding).severity
