"""Failures that have a name of their own: patterns over what is known of a rank's end.

Three places are looked at, the surest first: the evidence that the runtime gathered (the kernel's and the driver's own
words), the rank's exception, and, when there is none, its last lines. The patterns are ours and cheap; those of a job
file are matched elsewhere, with a limit on their time (``runtime.log_policies``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.core.states import FailureClass

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orchestrator.core.attempt import Exit

_SIGABRT, _SIGBUS, _SIGKILL = 6, 7, 9
_LAST_LINES = 5
_ABORT_LINES = 15  # an abort prints the C++ stack after its reason


@dataclass(frozen=True, slots=True)
class Signature:
    """A recognised failure: its class, a code for machines, one sentence and advice for people.

    ``evidence`` is looked for in what the runtime found out, ``pattern`` in what the rank said itself.
    """

    code: str
    failure_class: FailureClass
    pattern: re.Pattern[str] | None
    sentence: str
    advice: str
    evidence: re.Pattern[str] | None = None


def _signature(
    code: str, failure_class: FailureClass, pattern: str, sentence: str, advice: str, evidence: str = ""
) -> Signature:
    return Signature(
        code,
        failure_class,
        re.compile(pattern, re.MULTILINE) if pattern else None,
        sentence,
        advice,
        re.compile(evidence) if evidence else None,
    )


_USER, _INFRA = FailureClass.USER, FailureClass.INFRA

# Xid 13, 31, 43, 45, 68 and 69 follow from what the program did: its own error tells more than they do.
_XID = r"Xid(?: \(PCI:[\w:.]+\):)? (?!(?:13|31|43|45|68|69)\b)\d+"
_XID_ECC = r"Xid(?: \(PCI:[\w:.]+\):)? (?:48|63|64|92|94|95)\b"
_XID_BUS = r"Xid(?: \(PCI:[\w:.]+\):)? 79\b"

SIGNATURES: tuple[Signature, ...] = (
    _signature(
        "cuda_oom",
        _USER,
        r"CUDA out of memory|HIP out of memory|XPU out of memory|torch\.OutOfMemoryError|CUDA error: out of memory"
        r"|orchestrator\.train\.errors\.OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        "CUDA ran out of memory",
        "use a smaller batch per rank, gradient accumulation or checkpointing, or a GPU with more memory",
    ),
    _signature(
        "gpu_lost",
        _INFRA,
        r"GPU is lost|fallen off the bus|CUDA error: (?:unknown error|device-side hardware|no CUDA-capable device)"
        r"|Unable to determine the device handle for GPU",
        "its GPU went away",
        "see the GPU's Xid messages in dmesg; reset or cordon the node before it is used again",
        evidence=rf"{_XID_BUS}|GPU has fallen off the bus|no longer has this GPU",
    ),
    _signature(
        "gpu_ecc",
        _INFRA,
        r"uncorrectable ECC error|double[- ]bit ECC|ECC error encountered",
        "its GPU's memory has an error that it cannot correct",
        "reset the GPU (nvidia-smi -r) when nothing runs there; if it comes back, have the GPU replaced",
        evidence=_XID_ECC,
    ),
    _signature(
        "gpu_xid",
        _INFRA,
        "",
        "its GPU's driver reported an error",
        "look the Xid number up in NVIDIA's list of Xid errors; the job goes on elsewhere if the GPU fails again",
        evidence=_XID,
    ),
    _signature(
        "host_oom_kill",
        _INFRA,
        r"DataLoader worker \(pid[^)]*\) is killed by signal: Killed",
        "the kernel killed it because the machine's memory ran out",
        "ask for more with resources_per_worker.memory, or lower num_workers, prefetching or caching in the data loader",
        evidence=r"oom_kill|[Oo]ut of memory: Killed process",
    ),
    _signature(
        "shared_memory",
        _USER,
        r"insufficient shared memory \(shm\)|unable to (?:open|allocate) shared memory",
        "the machine's shared memory (/dev/shm) is full",
        "start the container with a larger --shm-size, or use fewer data loader workers",
    ),
    _signature(
        "host_memory",
        _INFRA,
        r"^MemoryError\b|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory",
        "the machine had no memory left for it",
        "ask for more with resources_per_worker.memory; if it wants more than any machine has, look for a wrong shape",
    ),
    _signature(
        "disk_full",
        _INFRA,
        r"No space left on device|Disk quota exceeded|InsufficientSpaceError|PytorchStreamWriter failed writing"
        r"|inline_container\.cc.*unexpected pos",
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
        "checkpoint_mismatch",
        _USER,
        r"Error\(s\) in loading state_dict for|loaded state dict (?:contains|has) a(?: different)? (?:number of )?parameter group"
        r"|size mismatch for \S+: copying a param|Missing key\(s\) in state_dict|Unexpected key\(s\) in state_dict",
        "the checkpoint does not fit the model",
        "the model or the optimizer was changed since it was saved: go back to that version, or start without the checkpoint",
    ),
    _signature(
        "checkpoint_broken",
        _USER,
        r"PytorchStreamReader failed|SafetensorError|CorruptCheckpointError|UnpicklingError|invalid load key",
        "a checkpoint file that the script reads is broken",
        "point the script at an older file; checkpoints saved with orch are verified: orch checkpoints JOB --verify",
    ),
    _signature(
        "nonfinite_loss",
        _USER,
        r"NonFiniteLossError|Function '\w+' returned nan values|gradients from `parameters` is non-finite"
        r"|contains either `inf`, `nan` or element < 0|found invalid values:\s+.*nan"
        r"|(?i:\bloss\b[^\n]{0,40}\b(?:is|was|became|=|:)\s*(?:not finite|non-?finite|nan|-?inf(?:inite|inity)?)\b)"
        r"|(?i:\b(?:nan|non-?finite|infinite|inf) loss\b)",
        "the loss is no longer a finite number",
        "lower the learning rate, clip gradients, or look at the last batch; torch.autograd.set_detect_anomaly finds the operation",
    ),
    _signature(
        "shape_mismatch",
        _USER,
        r"shapes cannot be multiplied|must match the size of tensor|Sizes of tensors must match"
        r"|is invalid for input of size|each tensor to be equal size|to match target batch_size"
        r"|different to the input size|to have \d+ channels, but got|mismatch in its core dimension"
        r"|could not be broadcast together|shape mismatch:|size mismatch, got",
        "two tensors have shapes that do not go together",
        "the traceback names the line; print the shapes there, and check the last, smaller batch (drop_last)",
    ),
    _signature(
        "device_assert",
        _USER,
        r"device-side assert triggered|Target -?\d+ is out of bounds",
        "an index is out of range, often a label beyond the number of classes",
        "check labels against the number of classes; CUDA_LAUNCH_BLOCKING=1 in env: names the line",
    ),
    _signature(
        "import_error",
        _USER,
        r"ModuleNotFoundError|ImportError: |cannot open shared object file",
        "a Python module is missing",
        "install it into the interpreter that the job uses (orch status shows which)",
    ),
    _signature(
        "permission",
        _USER,
        r"PermissionError|Permission denied|Operation not permitted",
        "it may not use a file",
        "ranks run as the user of the daemon: give that user access, or name another path",
    ),
    _signature(
        "missing_file",
        _USER,
        r"FileNotFoundError|No such file or directory|NotADirectoryError|Parent directory \S+ does not exist",
        "a file or directory is missing",
        "paths are relative to the job's copy of working_dir; name others in full, on every node that the job may use",
    ),
    _signature(
        "port_in_use",
        _INFRA,
        r"EADDRINUSE|[Aa]ddress already in use",
        "a port that it wants is taken",
        "do not set MASTER_PORT or fixed ports in the script; orch hands a fresh rendezvous to every attempt",
    ),
    _signature(
        "nccl_timeout",
        _INFRA,
        r"Watchdog caught collective operation timeout|ProcessGroupNCCL.*(?:[Tt]imed? ?out|timeout)|NCCL timeout",
        "a collective of NCCL timed out: another rank did not come to it in time",
        "look for the rank that was late: orch logs JOB --rank N of the others; then for a slow disk or a lost network link",
    ),
    _signature(
        "gloo_timeout",
        _INFRA,
        r"(?:gloo|unbound_buffer|pair\.cc).*[Tt]imed out|failed to pass monitoredBarrier"
        r"|Application timeout caused pair closure",
        "a collective of gloo timed out: another rank did not come to it in time",
        "look for the rank that was late: orch logs JOB --rank N of the others; then for a slow disk or a lost network link",
    ),
    _signature(
        "rendezvous_timeout",
        _INFRA,
        r"client socket has timed out|wait timeout after \d+ ?ms, keys|RecoveryTimeoutError|DistStoreError",
        "the ranks did not find each other in time",
        "look at the rank that is missing; between nodes, whether a firewall keeps them apart",
    ),
    _signature(
        "peer_lost",
        _INFRA,
        r"Connection (?:closed|reset) by (?:remote )?peer|NCCL communicator was aborted|ncclRemoteError|ncclSystemError"
        r"|remote process exited|recvBytes failed|failed to recv, got 0 bytes|DistBackendError",
        "another rank went away in the middle of a collective",
        "the cause is in that rank's log; if none failed by itself, in the network between the nodes",
    ),
)
"""In the order in which they are tried: what names a cause before what only follows from one."""


def match_signature(ended: Exit) -> Signature | None:
    """The first signature that the runtime's evidence fits; else the rank's exception, or its last lines without one."""
    found = _by_evidence(ended)
    if found is not None:
        return found
    text = _words(ended)
    return next((s for s in SIGNATURES if s.pattern is not None and s.pattern.search(text)), None) if text else None


def evidence_line(ended: Exit, signature: Signature) -> str:
    """The piece of evidence that ``signature`` rests on; empty when it rests on the rank's own words."""
    if signature.evidence is None:
        return ""
    return next((line for line in ended.evidence if signature.evidence.search(line)), "")


def _by_evidence(ended: Exit) -> Signature | None:
    for signature in SIGNATURES:
        if signature.evidence is None or not _counts(ended, signature.code):
            continue
        if any(signature.evidence.search(line) for line in ended.evidence):
            return signature
    return None


def _counts(ended: Exit, code: str) -> bool:
    """Evidence stands beside a death, it must also explain it: memory kills, a GPU makes calls fail or hang."""
    said = _text(ended.error_type, ended.error_message, ended.log_tail[-_ABORT_LINES:])
    if code == "host_oom_kill":
        return ended.signal == _SIGKILL or "killed by signal" in said
    return ended.signal is not None or "CUDA" in said or "NCCL" in said or "cu" in ended.error_type.lower()


def _words(ended: Exit) -> str:
    if ended.error_type:
        return f"{ended.error_type}: {ended.error_message}"
    if ended.signal in (_SIGABRT, _SIGBUS):
        return "\n".join(ended.log_tail[-_ABORT_LINES:])
    return "" if ended.signal is not None else "\n".join(ended.log_tail[-_LAST_LINES:])


def _text(error_type: str, message: str, lines: Iterable[str]) -> str:
    return "\n".join((error_type, message, *lines))
