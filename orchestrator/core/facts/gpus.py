"""Faults of a GPU. ``GpuCondition`` alone states whether a GPU is in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from orchestrator.core.codec import Integer, Number, Text, Time
from orchestrator.core.facts.fact import Fact
from orchestrator.core.facts.rank_ends import RankEnd
from orchestrator.core.facts.words import CUT, of_rank, quoted
from orchestrator.units import plural

_XID_ADVICE: Final = {
    "gpu_lost": "see the GPU's Xid messages in dmesg; reset or cordon the node before it is used again",
    "gpu_ecc": "reset the GPU (nvidia-smi -r) when nothing runs there; if it comes back, have the GPU replaced",
    "gpu_xid": "look the Xid number up in NVIDIA's list of Xid errors; the job goes on elsewhere if the GPU fails again",
}

_XID_MEANS: Final = {
    "gpu_lost": "its GPU went away",
    "gpu_ecc": "its GPU's memory has an error that it cannot correct",
    "gpu_xid": "its GPU's driver reported an error",
}


BUS_XID: Final = 79
ECC_XIDS: Final = frozenset({48, 63, 64, 92, 94, 95})
PROGRAM_XIDS: Final = frozenset({13, 31, 43, 45, 68, 69})
"""Xids that follow from the program's own errors, which explain more."""


class GpuFault(RankEnd):
    """Base of the hardware's reports about one GPU; ``gpu_uuid`` is empty where unknown.

    ``rank`` is the rank that it ended, if any.
    """

    gpu_uuid: Text = ""

    def advice(self, job_id: str = "JOB") -> str:
        return _XID_ADVICE.get(self.code, "")


class Xid(GpuFault, tag="xid"):
    """The driver reported an Xid event, at ``at`` (seconds since the epoch), ``seconds_before`` the query.

    ``bus_id`` is the PCI address that the kernel's log names instead of a UUID; ``said`` is that log's line.
    """

    number: Integer
    at: Time | None = None
    seconds_before: Number | None = None
    bus_id: Text = ""
    said: Text = ""

    @property
    def code(self) -> str:
        """Return the code of the GPU's fault that the number means."""
        if self.number == BUS_XID:
            return GpuLost.kind
        return GpuEcc.kind if self.number in ECC_XIDS else "gpu_xid"

    def sentence(self) -> str:
        subject = f"gpu {self.gpu_uuid}" if self.gpu_uuid else f"gpu at PCI {self.bus_id}" if self.bus_id else "its GPU"
        before = f", {self.seconds_before:.0f} s before" if self.seconds_before is not None else ""
        line = f"kernel: {self.said[:CUT]}" if self.said else f"{subject}: Xid {self.number}{before}"
        return line if self.rank is None else of_rank(self.rank, f"{_XID_MEANS[self.code]} ({line})")


class GpuLost(GpuFault, tag="gpu_lost"):
    """The driver no longer has the GPU. ``said``: the rank's output is the source, not the driver."""

    said: Text = ""

    def sentence(self) -> str:
        if self.rank is None:
            return "the driver no longer has this GPU; reset it or restart the node"
        known = f"gpu {self.gpu_uuid}: the driver no longer has this GPU" if self.gpu_uuid else ""
        return of_rank(self.rank, f"its GPU went away{quoted(self.said or known)}")


class GpuEcc(GpuFault, tag="gpu_ecc"):
    """The GPU's memory has an error that it cannot correct; ``errors`` is how many it has counted, where that is known."""

    said: Text = ""
    errors: Integer = 0

    def sentence(self) -> str:
        errors = f"{plural(self.errors, 'error')} that it cannot" if self.errors > 1 else "an error that it cannot"
        return of_rank(self.rank, f"its GPU's memory has {errors} correct{quoted(self.said)}")


class GpuSilent(GpuFault, tag="gpu_silent"):
    """The GPU's exporter does not answer."""

    def sentence(self) -> str:
        return "its exporter does not answer; it is restarted by itself"


class GpuFailing(GpuFault, tag="gpu_failing"):
    """The GPU's driver answers with an error; ``said`` is what the driver says."""

    said: Text = ""

    def sentence(self) -> str:
        return self.said or "its driver answers with an error"


class Quarantined(GpuFault, tag="gpu_quarantined"):
    """The GPU takes no ranks until it is checked, for ``cause``."""

    cause: Fact

    def sentence(self) -> str:
        return f"quarantined: {self.cause.sentence()}"


class GpuState(StrEnum):
    """Usability of a GPU, the best first."""

    OK = "ok"
    FAILING = "failing"
    QUARANTINED = "quarantined"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCondition:
    """Condition of one GPU, from all sources. ``causes`` are the facts against it, the most severe first."""

    gpu_uuid: str
    causes: tuple[GpuFault, ...] = ()

    @property
    def state(self) -> GpuState:
        """Return the state of the most severe cause."""
        return max((_state_of(cause) for cause in self.causes), key=list(GpuState).index, default=GpuState.OK)

    @property
    def healthy(self) -> bool:
        """Whether there is no cause against it."""
        return self.state is GpuState.OK

    @property
    def placeable(self) -> bool:
        """Whether new ranks may use it: a silent exporter alone is no reason to leave it idle."""
        return self.state in (GpuState.OK, GpuState.FAILING)

    @property
    def cause(self) -> GpuFault | None:
        """Return the most severe cause; None for a GPU in order."""
        return self.causes[0] if self.causes else None


def condition_of(gpu_uuid: str, causes: tuple[GpuFault, ...]) -> GpuCondition:
    """Return the condition of one GPU, with ``causes`` sorted."""
    order = list(GpuState)
    return GpuCondition(gpu_uuid=gpu_uuid, causes=tuple(sorted(causes, key=lambda c: -order.index(_state_of(c)))))


def _state_of(cause: GpuFault) -> GpuState:
    match cause:
        case GpuLost():
            return GpuState.LOST
        case Xid(number=number) if number == BUS_XID:
            return GpuState.LOST
        case Quarantined():
            return GpuState.QUARANTINED
        case Xid(number=number) if number in PROGRAM_XIDS:
            return GpuState.OK
        case _:
            return GpuState.FAILING
