"""Why a job is out of balance, as far as the numbers tell: who is slow, what holds it back, and what to do about it.

A pure function from what is known of each rank to findings, the most certain ones first. It says nothing rather than
guess: a job whose numbers explain nothing gets the general advice of its band.
"""

from __future__ import annotations

import enum
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.core.diagnosis.straggler import Pace, find_straggler
from orchestrator.gpu.balance.balance import ADVICE, Balance, Band, GpuLoad, Quantity
from orchestrator.gpu.sample import Throttle

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SPIN_FACTOR: Final = 1.15
"""How much more power than the others a GPU must draw to be called the one that works while they spin."""
STARVED_SHARE: Final = 0.2
SPINNING_UTILIZATION: Final = 0.8
_HARMLESS: Final = frozenset({Throttle.CLOCK_SETTING, Throttle.SYNC_BOOST})


class Cause(enum.StrEnum):
    """What puts a job out of balance."""

    SILENT_GPU = "silent_gpu"
    THROTTLED = "throttled"
    FOREIGN_PROCESS = "foreign_process"
    STARVED_INPUT = "starved_input"
    STRAGGLER = "straggler"
    WAITING = "waiting"
    UNEVEN_MEMORY = "uneven_memory"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """What is known of one rank over the window.

    `step_seconds` is the rank's time for a step, `own_seconds` what it worked itself in it, waiting for others left out,
    and `data_seconds` what it spent getting the next batch; None where nothing tells. `foreign_pids` are processes on the
    rank's GPU that do not belong to the job. A rank with several GPUs has a view for each.
    """

    rank: int
    gpu_uuid: str
    load: GpuLoad | None
    throttle: tuple[Throttle, ...] = ()
    foreign_pids: tuple[int, ...] = ()
    step_seconds: float | None = None
    own_seconds: float | None = None
    data_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause: who, how much (a factor or a share, where there is one), in a sentence, and what to do."""

    cause: Cause
    rank: int | None
    gpu_uuid: str | None
    factor: float | None
    text: str
    advice: str


_THROTTLE_ADVICE: Final = {
    Throttle.POWER_CAP: "Raise the power limit (`nvidia-smi -pl`) or give every rank the same limit.",
    Throttle.THERMAL: "Check the airflow and the temperature of this GPU's neighbours.",
    Throttle.HARDWARE_THERMAL: "Check the cooler and the airflow at once: the hardware protects itself.",
    Throttle.HARDWARE_SLOWDOWN: "Check cooling and power supply: the hardware protects itself.",
    Throttle.POWER_BRAKE: "Check the power supply: it asked the GPU to slow down.",
    Throttle.CURRENT: "Check the power supply and its cables.",
    Throttle.RELIABILITY: "The voltage limit is reached; lower the clocks of the other ranks or accept it.",
}


def diagnose(ranks: Sequence[RankView], balance: Balance) -> tuple[Finding, ...]:
    """Causes of a job's imbalance, the most certain first; empty for a job that is balanced and complete."""
    findings = [*_silent(ranks), *_throttled(ranks), *_foreign(ranks), *_starved(ranks), *_stragglers(ranks)]
    worst = balance.worst
    unbalanced = worst is not None and worst.band is Band.POOR
    if unbalanced and not any(finding.cause is Cause.STRAGGLER for finding in findings):
        findings += _waiting(ranks)
    findings += _uneven_memory(balance)
    if unbalanced and not findings:
        findings.append(
            Finding(
                cause=Cause.UNKNOWN,
                rank=None,
                gpu_uuid=None,
                factor=None,
                text="The GPUs' load differs, and nothing that is measured says why.",
                advice=ADVICE[Band.POOR],
            )
        )
    return tuple(findings)


def _silent(ranks: Sequence[RankView]) -> Iterator[Finding]:
    for view in ranks:
        if view.load is None:
            yield Finding(
                cause=Cause.SILENT_GPU,
                rank=view.rank,
                gpu_uuid=view.gpu_uuid,
                factor=None,
                text=f"The GPU of rank {view.rank} reports nothing; it is missing from every figure here.",
                advice="See `orch gpus` for its state and the kernel log for Xid 79.",
            )


def _throttled(ranks: Sequence[RankView]) -> Iterator[Finding]:
    for view in ranks:
        harmful = [reason for reason in view.throttle if reason not in _HARMLESS]
        if harmful:
            words = " and ".join(reason.replace("_", " ") for reason in harmful)
            yield Finding(
                cause=Cause.THROTTLED,
                rank=view.rank,
                gpu_uuid=view.gpu_uuid,
                factor=None,
                text=f"The GPU of rank {view.rank} holds its clocks down: {words}.",
                advice=_THROTTLE_ADVICE[harmful[0]],
            )


def _foreign(ranks: Sequence[RankView]) -> Iterator[Finding]:
    for view in ranks:
        if view.foreign_pids:
            pids = ", ".join(str(pid) for pid in view.foreign_pids)
            yield Finding(
                cause=Cause.FOREIGN_PROCESS,
                rank=view.rank,
                gpu_uuid=view.gpu_uuid,
                factor=None,
                text=f"Another process uses the GPU of rank {view.rank}: {pids}.",
                advice="Find out whose it is (`orch top`), and stop it or cordon the GPU's node.",
            )


def _starved(ranks: Sequence[RankView]) -> Iterator[Finding]:
    for view in ranks:
        if not view.step_seconds or view.data_seconds is None:
            continue
        share = view.data_seconds / view.step_seconds
        if share > STARVED_SHARE:
            yield Finding(
                cause=Cause.STARVED_INPUT,
                rank=view.rank,
                gpu_uuid=view.gpu_uuid,
                factor=share,
                text=f"Rank {view.rank} spends {share:.0%} of its step waiting for data.",
                advice="Give the data loader more workers, prefetching and pinned memory, or a faster disk.",
            )


def _stragglers(ranks: Sequence[RankView]) -> Iterator[Finding]:
    first = {view.rank: view for view in reversed(ranks)}
    found = find_straggler(
        [
            Pace(rank=rank, step_seconds=view.step_seconds, own_seconds=view.own_seconds)
            for rank, view in sorted(first.items())
        ]
    )
    if found is not None:
        yield Finding(
            cause=Cause.STRAGGLER,
            rank=found.rank,
            gpu_uuid=first[found.rank].gpu_uuid,
            factor=found.factor,
            text=(
                f"Rank {found.rank} takes {found.factor:.1f} times as long for its part of a step as the others"
                f" ({found.seconds:.3g} s against {found.usual_seconds:.3g} s), and they wait for it."
            ),
            advice="Compare its share of the data, its input pipeline and its host's load with another rank's.",
        )


def _waiting(ranks: Sequence[RankView]) -> Iterator[Finding]:
    """Without each rank's own times: every GPU is busy, one draws more power than the rest. Those spin, and it is what they wait for."""
    loads = [(view, view.load) for view in ranks if view.load is not None]
    if len(loads) < 2 or len(loads) < len(ranks):
        return
    powers = [load.power for _, load in loads]
    busy = [load.utilization for _, load in loads]
    if None in powers or min(value or 0.0 for value in busy) < SPINNING_UTILIZATION:
        return
    watts = [value or 0.0 for value in powers]
    usual, top = statistics.median_low(watts), max(watts)
    if usual <= 0.0 or top / usual < SPIN_FACTOR:
        return
    view = loads[watts.index(top)][0]
    timed = all(one.step_seconds for one in ranks)
    yield Finding(
        cause=Cause.WAITING,
        rank=view.rank,
        gpu_uuid=view.gpu_uuid,
        factor=top / usual,
        text=(
            f"All GPUs are busy, but that of rank {view.rank} draws {top:.0f} W and the others about {usual:.0f} W: they"
            " probably spin in a collective, waiting for it."
            + (" Their steps take equally long, waiting included." if timed else "")
        ),
        advice=(
            "Compare this rank's share of the data, its input pipeline and its host's load with another rank's."
            if timed
            else "Let the script report its step times (`context().report`) to see by how much, and compare its input."
        ),
    )


def _uneven_memory(balance: Balance) -> Iterator[Finding]:
    spread = balance.spread(Quantity.MEMORY)
    if spread is not None and spread.band is Band.POOR:
        yield Finding(
            cause=Cause.UNEVEN_MEMORY,
            rank=None,
            gpu_uuid=None,
            factor=spread.cv,
            text=f"Memory in use differs between the GPUs (CV {spread.cv:.0%}).",
            advice="Check that no rank keeps extra tensors or loads onto another rank's GPU (`map_location`).",
        )
