"""The claims of the training system's documentation as values, and their comparison with measured ones. Pure.

They are about GPUs that the documentation does not name. Measurements on processors are shown beside them and decide nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.bench.statistics import Interval


class Quantity(enum.StrEnum):
    """Subjects of the claims."""

    DATA_PARALLEL_SPEED_UP = "data_parallel_speed_up"
    DATA_PARALLEL_MEMORY = "data_parallel_memory"
    DDP_SPEED_UP = "ddp_speed_up"
    DDP_MEMORY = "ddp_memory"
    DDP_AGAINST_DATA_PARALLEL = "ddp_against_data_parallel"
    EFFICIENCY = "efficiency"
    MIXED_SPEED_UP = "mixed_speed_up"
    MIXED_MEMORY = "mixed_memory"
    ACCUMULATED_SPEED_UP = "accumulated_speed_up"
    ACCUMULATED_MEMORY = "accumulated_memory"
    COMMUNICATION_SHARE = "communication_share"


class Finding(enum.StrEnum):
    """Result of comparing a claim with the measurement."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNCLEAR = "unclear"
    NEEDS_HARDWARE = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Statement that a quantity on a number of GPUs is at least, or at most, a value."""

    quantity: Quantity
    gpus: int
    value: float
    at_least: bool
    text: str
    note: str = ""


def _speed_up(quantity: Quantity, gpus: int, value: float, text: str, note: str = "") -> Claim:
    return Claim(quantity=quantity, gpus=gpus, value=value, at_least=True, text=text, note=note)


def _at_most(quantity: Quantity, gpus: int, value: float, text: str, note: str = "") -> Claim:
    return Claim(quantity=quantity, gpus=gpus, value=value, at_least=False, text=text, note=note)


CLAIMS: Final = (
    _speed_up(
        Quantity.DATA_PARALLEL_SPEED_UP, 4, 4100 / 1200, "DataParallel on 4 GPUs: 4,100 samples/s, one GPU 1,200"
    ),
    _at_most(Quantity.DATA_PARALLEL_MEMORY, 4, 16.8 / 4.2, "DataParallel on 4 GPUs: 16.8 GB, one GPU 4.2 GB"),
    _speed_up(Quantity.DDP_SPEED_UP, 4, 4300 / 1200, "DistributedDataParallel on 4 GPUs: 4,300 samples/s"),
    _speed_up(Quantity.DDP_SPEED_UP, 8, 8200 / 1200, "DistributedDataParallel on 8 GPUs: 8,200 samples/s"),
    _at_most(Quantity.DDP_MEMORY, 4, 1.0, "DistributedDataParallel: 4.2 GB on each GPU, as on one"),
    _speed_up(
        Quantity.DDP_AGAINST_DATA_PARALLEL, 4, 4300 / 4100, "DistributedDataParallel is faster than DataParallel on 4"
    ),
    _speed_up(
        Quantity.EFFICIENCY, 8, 0.9, "linear scaling: over 90 % efficiency up to 8 GPUs", "its own table makes it 85 %"
    ),
    _speed_up(Quantity.MIXED_SPEED_UP, 1, 1.8, "mixed precision: 1.8x", "2x elsewhere in the same document"),
    _at_most(Quantity.MIXED_MEMORY, 1, 4.2 / 8.4, "mixed precision: half of the memory"),
    _speed_up(Quantity.ACCUMULATED_SPEED_UP, 1, 1.6, "mixed precision with accumulation: 1.6x"),
    _at_most(Quantity.ACCUMULATED_MEMORY, 1, 2.1 / 8.4, "mixed precision with accumulation: a quarter of the memory"),
    _at_most(Quantity.COMMUNICATION_SHARE, 2, 0.05, "communication is under 5 % of a step for most models"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A quantity as measured with a number of ranks or GPUs. ``on_gpus``: whether the claims are about such devices."""

    quantity: Quantity
    gpus: int
    interval: Interval
    on_gpus: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A claim, its measurement, and the finding. ``needs`` names the hardware that is missing for it."""

    claim: Claim
    measured: Measured | None
    finding: Finding
    needs: str = ""


def check_claim(claim: Claim, found: Mapping[tuple[Quantity, int], Measured]) -> Checked:
    """Compare a claim with the measurement of the same quantity on the same number of GPUs."""
    measured = found.get((claim.quantity, claim.gpus))
    if measured is None or not measured.on_gpus:
        needs = f"needs {claim.gpus} GPU{'s' * (claim.gpus != 1)}"
        return Checked(claim=claim, measured=measured, finding=Finding.NEEDS_HARDWARE, needs=needs)
    return Checked(claim=claim, measured=measured, finding=_finding(claim, measured.interval))


def _finding(claim: Claim, interval: Interval) -> Finding:
    if interval.low is None or interval.high is None:
        return Finding.UNCLEAR
    better, worse = (interval.low >= claim.value, interval.high < claim.value)
    if not claim.at_least:
        better, worse = interval.high <= claim.value, interval.low > claim.value
    if better:
        return Finding.HOLDS
    return Finding.FAILS if worse else Finding.UNCLEAR
