"""Failures that have a name of their own: patterns over a rank's exception or its last lines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.core.states import FailureClass

if TYPE_CHECKING:
    from orchestrator.core.job import Exit


@dataclass(frozen=True, slots=True)
class Signature:
    """A recognised failure: its class, a code for machines, one sentence and advice for people."""

    code: str
    failure_class: FailureClass
    pattern: re.Pattern[str]
    sentence: str
    advice: str


def _signature(code: str, failure_class: FailureClass, pattern: str, sentence: str, advice: str) -> Signature:
    return Signature(code, failure_class, re.compile(pattern), sentence, advice)


_USER, _INFRA = FailureClass.USER, FailureClass.INFRA

SIGNATURES: tuple[Signature, ...] = (
    _signature(
        "cuda_oom",
        _USER,
        r"CUDA out of memory|torch\.OutOfMemoryError|CUDA error: out of memory",
        "CUDA ran out of memory",
        "use a smaller batch per rank, gradient accumulation or checkpointing, or a GPU with more memory",
    ),
    _signature(
        "gpu_lost",
        _INFRA,
        r"GPU is lost|fallen off the bus|CUDA error: (?:unknown error|device-side hardware|uncorrectable ECC)",
        "its GPU went away",
        "see the GPU's Xid messages in dmesg; reset or cordon the node before it is used again",
    ),
    _signature(
        "disk_full",
        _INFRA,
        r"No space left on device|Disk quota exceeded",
        "the disk is full",
        "free space under the job's working or checkpoint directory",
    ),
    _signature(
        "resume_mismatch",
        _INFRA,
        r"ResumeMismatchError",
        "it could not load the checkpoint that the other ranks resume from",
        "nothing: the next attempt chooses again",
    ),
    _signature(
        "import_error",
        _USER,
        r"ModuleNotFoundError|ImportError: cannot import name",
        "a Python module is missing",
        "install it into the interpreter that the job uses (orch status shows which)",
    ),
    _signature(
        "port_in_use",
        _INFRA,
        r"EADDRINUSE|Address already in use",
        "a port that it wants is taken",
        "do not set MASTER_PORT or fixed ports in the script; orch hands a fresh rendezvous to every attempt",
    ),
)


def match_signature(ended: Exit) -> Signature | None:
    """The first signature that the rank's exception matches, or, when there is none, its last lines."""
    if ended.error_type:
        text = f"{ended.error_type}: {ended.error_message}"
    elif ended.signal is None:
        text = "\n".join(ended.log_tail[-5:])
    else:
        return None
    return next((s for s in SIGNATURES if s.pattern.search(text)), None)
