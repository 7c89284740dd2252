"""Chooses the piece of evidence that explains a rank's end: reports of the kernel and the GPU's driver. Pure.

Evidence near a death must also explain it: the kernel kills with SIGKILL, and a GPU makes calls fail or hang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeGuard

from msgspec.structs import replace

from orchestrator.core.diagnosis.signatures import abort_words
from orchestrator.core.facts.gpus import PROGRAM_XIDS, GpuEcc, GpuLost, Xid
from orchestrator.core.facts.memory import OomCount, OomKill

if TYPE_CHECKING:
    from orchestrator.core.events import Exit
    from orchestrator.core.facts.rank_ends import RankEnd

_SIGKILL: Final = 9
_CHILD_KILLED: Final = "killed by signal"
"""The error of torch's DataLoader in the rank when one of its own processes was killed."""
_GRAVEST: Final = (GpuLost.kind, GpuEcc.kind, "gpu_xid", OomKill.failure_code)


def explaining(ended: Exit) -> RankEnd | None:
    """Return the most severe fact that explains the end, with the rank filled in; None where none does."""
    found = [fact for fact in ended.evidence if _explains(fact, ended)]
    grave = min(found, key=lambda fact: _GRAVEST.index(fact.code), default=None)
    return None if grave is None else replace(grave, rank=ended.rank)


def _explains(fact: object, ended: Exit) -> TypeGuard[RankEnd]:
    match fact:
        case OomKill() | OomCount():
            return ended.signal == _SIGKILL or _CHILD_KILLED in abort_words(ended)
        case Xid(number=number) if number in PROGRAM_XIDS:
            return False
        case Xid() | GpuLost() | GpuEcc():
            return ended.signal is not None or _speaks_of_gpu(ended)
        case _:
            return False


def _speaks_of_gpu(ended: Exit) -> bool:
    text = abort_words(ended)
    return "CUDA" in text or "NCCL" in text or "cu" in ended.error_type.lower()
