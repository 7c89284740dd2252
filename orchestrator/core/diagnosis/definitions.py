"""Every kind of finding in one table: the figure it uses, where it opens and closes, and for how long.

A rule computes a figure, larger for worse; a finding opens when the figure is at ``opens_at`` or above, was so ``open_seconds``
ago, and has not been below ``closes_at`` since; it closes when the figure has been below ``closes_at`` for ``close_seconds``.
Figures are taken over windows, so the time to a finding is about half a window longer. Nothing else in the daemon has a threshold of its own for findings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.core.facts import findings as f
from orchestrator.core.thresholds import BALANCE_BANDS, EXPORTER_SECONDS, LATE_SECONDS, STARTING

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    outlives: bool = False
    apart: bool = False


def _over(figure: str, opens_at: float, closes_at: float, seconds: tuple[float, float], **also: bool) -> Definition:
    return Definition(
        figure=figure, opens_at=opens_at, closes_at=closes_at, open_seconds=seconds[0], close_seconds=seconds[1], **also
    )


def _at_once(figure: str, close_seconds: float = 10.0, *, open_seconds: float = 0.0, **also: bool) -> Definition:
    return _over(figure, 1.0, 1.0, (open_seconds, close_seconds), **also)


DEFINITIONS: Final[Mapping[type[f.Finding], Definition]] = {
    f.GpuFaulty: _at_once("errors that the GPU or its driver reports", 600.0, open_seconds=4.0),
    f.RankStopped: _at_once("stopped processes of a rank that makes no step"),
    f.RankAtBreakpoint: _at_once("ranks at a prompt of their debugger", 4.0),
    f.WrongWorldSize: _at_once("time that ranks wait for their process group, over 10 s"),
    f.RendezvousIncomplete: _at_once("time that ranks wait for their process group, over 30 s"),
    f.NoStep: _at_once("time without a step, over the time that this job may take for one"),
    f.ExporterSilent: _over(
        "1 while its exporter does not answer, 0.5 while that starts", 1.0, STARTING, (EXPORTER_SECONDS, 6.0)
    ),
    f.GpuShared: _at_once("processes of none of the daemon's jobs", 20.0, open_seconds=12.0),
    f.GpuMemoryTaken: _over("memory that no process accounts for, over what drivers take", 1.0, 0.8, (20.0, 30.0)),
    f.GpuMemoryErrors: _over(
        "corrected errors in ten minutes, over 60, or remapped rows since the attempt began",
        1.0,
        0.2,
        (4.0, 600.0),
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
    f.JobIdle: _at_once("GPUs without work", 10.0, open_seconds=24.0),
    f.GpusUnused: _at_once("GPUs without work while steps are made", 10.0, open_seconds=24.0),
    f.GpuMemoryGrowing: _at_once("minutes in a row of steady growth, over ten", 60.0, apart=True),
    f.HostMemoryGrowing: _at_once("steady growth of host memory that reaches its limit", 60.0, apart=True),
    f.LoadUneven: _over("coefficient of variation of utilization or power", BALANCE_BANDS[-1], 0.15, (60.0, 60.0)),
    f.LossNotFinite: _at_once("metrics that are NaN or infinite", 30.0, open_seconds=4.0),
    f.LossFlat: _over("steps without a change of the loss, over what is usual", 1.0, 1.0, (4.0, 0.0)),
    f.LossJumped: _over("how far the loss is above its usual value, over what counts as a jump", 1.0, 0.5, (6.0, 10.0)),
    f.StorageFull: _over("size of a checkpoint, over what its storage has left", 1.0, 0.9, (10.0, 20.0)),
    f.SavesFailing: _over("saves that failed, the newest among them", 2.0, 1.0, (0.0, 0.0)),
    f.StartedOver: _at_once("an attempt's step below nine tenths of the checkpoint's that it could begin with"),
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
