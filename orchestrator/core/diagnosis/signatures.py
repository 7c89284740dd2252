"""Recognises known failures in a rank's output: its exception, else its last lines.

It turns text of scripts and their libraries into typed facts. Evidence of the kernel and the GPU's driver takes
precedence (``evidence.py``). The patterns are ours and cheap; those of a job file are matched elsewhere, with a time
limit (``runtime.ranks.output.log_policies``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from msgspec.structs import replace

from orchestrator.core.facts.faults import (
    PROGRAM_XIDS,
    SIGNAL_NAMES,
    Backend,
    ChildKilled,
    CollectiveTimeout,
    CudaOutOfMemory,
    DiskFull,
    GpuEcc,
    GpuLost,
    NonFiniteLoss,
    OomCount,
    OomKill,
    PeerLost,
    Problem,
    RankEnd,
    RendezvousTimeout,
    ScriptProblem,
    Xid,
)
from orchestrator.core.states import FailureClass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.core.events import Exit

    Build = Callable[[int, str], RankEnd]

_SIGABRT, _SIGBUS, _SIGKILL = 6, 7, 9
SHELL_BASE: Final = 128
"""A shell's exit code for a child that a signal ended is this plus the signal."""
_LAST_LINES: Final = 5
_TRACEBACK: Final = "Traceback (most recent call last):"
_ABORT_LINES: Final = 15  # an abort prints the C++ stack after its reason


@dataclass(frozen=True, slots=True)
class Signature:
    """A recognisable failure: its class, the pattern of its text, and the function from rank and quote to the fact."""

    failure_class: FailureClass
    pattern: re.Pattern[str]
    build: Build


_LINE_CHARACTERS: Final = 1000
_EXCEPTION: Final = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: (?P<said>.*))?")
_NOT_FOUND: Final = re.compile(
    r"No such file or directory: '(?P<python>[^']+)'|(?:^|[ :])'?(?P<program>[^ :']+)'?: No such file or directory$"
)


_IN_USE: Final = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_PORTS: Final = (
    re.compile(r"\b[Pp]ort[:= ]{1,2}(?P<port>\d{1,5})\b"),
    re.compile(r"\('[^']*', (?P<port>\d{1,5})[,)]"),
    re.compile(r"(?:\]|\*|localhost|\b\d{1,3}(?:\.\d{1,3}){3}):(?P<port>\d{1,5})\b"),
)
"""Patterns of the address that torch, Python's sockets or a server could not bind."""
_LAST_PORT: Final = 65535


def _signature(failure_class: FailureClass, pattern: str, build: Build) -> Signature:
    return Signature(failure_class, re.compile(pattern, re.MULTILINE), build)


def _quoting(cls: Any) -> Build:
    return lambda rank, text: cls(rank=rank, said=text)


def _problem(problem: Problem) -> Build:
    return lambda rank, text: ScriptProblem(rank=rank, problem=problem, said=text)


def _timeout(backend: Backend) -> Build:
    return lambda rank, text: CollectiveTimeout(rank=rank, backend=backend, said=text)


_USER, _INFRA = FailureClass.USER, FailureClass.INFRA

SIGNATURES: Final[tuple[Signature, ...]] = (
    _signature(
        _USER,
        r"CUDA out of memory|HIP out of memory|XPU out of memory|torch\.OutOfMemoryError|CUDA error: out of memory"
        r"|orchestrator\.train\.errors\.OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        _quoting(CudaOutOfMemory),
    ),
    _signature(
        _INFRA,
        r"GPU is lost|fallen off the bus|CUDA error: (?:unknown error|device-side hardware|no CUDA-capable device)"
        r"|Unable to determine the device handle for GPU",
        _quoting(GpuLost),
    ),
    _signature(
        _INFRA,
        r"uncorrectable ECC error|double[- ]bit ECC|ECC error encountered",
        _quoting(GpuEcc),
    ),
    _signature(
        _USER,
        r"(?<!caused by )insufficient shared memory|unable to (?:open|allocate) shared memory(?!.*Too many open files)"
        r"|Error while creating shared memory segment|(?:/dev/shm/|</torch_).*No space left|No space left.*'/dev/shm/",
        _problem(Problem.SHARED_MEMORY),
    ),
    _signature(
        _INFRA,
        r"^MemoryError\b|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory",
        _problem(Problem.HOST_MEMORY),
    ),
    _signature(
        _INFRA,
        r"No space left on device|Disk quota exceeded|InsufficientSpaceError|PytorchStreamWriter failed writing"
        r"|inline_container\.cc.*unexpected pos",
        _quoting(DiskFull),
    ),
    _signature(
        _INFRA,
        r"ResumeMismatchError",
        _problem(Problem.RESUME_MISMATCH),
    ),
    _signature(
        _USER,
        r"Error\(s\) in loading state_dict for|loaded state dict (?:contains|has) a(?: different)? (?:number of )?parameter group"
        r"|size mismatch for \S+: copying a param|Missing key\(s\) in state_dict|Unexpected key\(s\) in state_dict",
        _problem(Problem.CHECKPOINT_MISMATCH),
    ),
    _signature(
        _USER,
        r"PytorchStreamReader failed|SafetensorError|CorruptCheckpointError|UnpicklingError|invalid load key",
        _problem(Problem.CHECKPOINT_BROKEN),
    ),
    _signature(
        _USER,
        r"NonFiniteLossError|Function '\w+' returned nan values|gradients from `parameters` is non-finite"
        r"|contains either `inf`, `nan` or element < 0|found invalid values:\s+.*nan"
        r"|(?i:\bloss\b[^\n]{0,40}\b(?:is|was|became|=|:)\s*(?:not finite|non-?finite|nan|-?inf(?:inite|inity)?)\b)"
        r"|(?i:\b(?:nan|non-?finite|infinite|inf) loss\b)",
        _quoting(NonFiniteLoss),
    ),
    _signature(
        _USER,
        r"shapes cannot be multiplied|must match the size of tensor|Sizes of tensors must match"
        r"|is invalid for input of size|each tensor to be equal size|to match target batch_size"
        r"|different to the input size|to have \d+ channels, but got|mismatch in its core dimension"
        r"|could not be broadcast together|shape mismatch:|size mismatch, got",
        _problem(Problem.SHAPE_MISMATCH),
    ),
    _signature(
        _USER,
        r"device-side assert triggered|Target -?\d+ is out of bounds",
        _problem(Problem.DEVICE_ASSERT),
    ),
    _signature(
        _USER,
        r"ModuleNotFoundError|ImportError: |cannot open shared object file",
        _problem(Problem.IMPORT_ERROR),
    ),
    _signature(
        _USER,
        # Of orch's launcher; of a shell or env that reads a script with Windows line ends.
        r"^CannotExecute: |\$'[^'\n]*\\r'|(?:\^M|\\r): bad interpreter|['‘][^'’\n]*\\r['’]: No such file",
        _problem(Problem.NOT_EXECUTABLE),
    ),
    _signature(
        _USER,
        r"PermissionError|Permission denied|Operation not permitted",
        _problem(Problem.PERMISSION),
    ),
    _signature(
        _USER,
        r"FileNotFoundError|No such file or directory|NotADirectoryError|Parent directory \S+ does not exist",
        _problem(Problem.MISSING_FILE),
    ),
    _signature(
        _INFRA,
        _IN_USE.pattern,
        _problem(Problem.PORT_IN_USE),
    ),
    _signature(
        _INFRA,
        r"Watchdog caught collective operation timeout|ProcessGroupNCCL.*(?:[Tt]imed? ?out|timeout)|NCCL timeout",
        _timeout(Backend.NCCL),
    ),
    _signature(
        _INFRA,
        r"(?:gloo|unbound_buffer|pair\.cc).*[Tt]imed out|failed to pass monitoredBarrier"
        r"|Application timeout caused pair closure",
        _timeout(Backend.GLOO),
    ),
    _signature(
        _INFRA,
        r"client socket has timed out|wait timeout after \d+ ?ms, keys|RecoveryTimeoutError|DistStoreError",
        _quoting(RendezvousTimeout),
    ),
    _signature(
        _INFRA,
        r"Connection (?:closed|reset) by (?:remote )?peer|NCCL communicator was aborted|ncclRemoteError|ncclSystemError"
        r"|remote process exited|recvBytes failed|failed to recv, got 0 bytes|DistBackendError",
        _quoting(PeerLost),
    ),
)
"""In the order in which they are tried: causes before their consequences."""


def match_signature(ended: Exit) -> tuple[FailureClass, RankEnd] | None:
    """Return class and fact of the first signature that matches the rank's exception, or its last lines without one."""
    child = child_end(ended)
    if child is not None:
        return _USER if child.signal == _SIGBUS else _INFRA, child
    text = _words(ended)
    found = next((s for s in SIGNATURES if s.pattern.search(text)), None) if text else None
    fact = None if found is None else found.build(ended.rank, first_words(ended.error_message))
    if fact is None or fact.code in (Problem.PERMISSION, Problem.MISSING_FILE):
        said = _of_shell(ended)
        if said:
            return _USER, ScriptProblem(rank=ended.rank, problem=Problem.NOT_EXECUTABLE, said=said)
    return None if found is None or fact is None else (found.failure_class, fact)


_NOT_EXECUTED: Final = (126, 127)
"""Exit codes of a shell, and of env, for a program that cannot be executed, and that is not found."""


def _of_shell(ended: Exit) -> str:
    """Return the last line of a shell that could not execute a program, by its exit code; empty for any other end."""
    if ended.exit_code not in _NOT_EXECUTED or ended.error_type or _uncaught(ended.log_tail):
        return ""
    return next((line.strip() for line in reversed(ended.log_tail) if line.strip()), "")


_SIGNALS: Final = {
    **{name: number for number, name in SIGNAL_NAMES.items()},
    "HANGUP": 1,
    "ILLEGAL INSTRUCTION": 4,
    "ABORTED": 6,
    "BUS ERROR": 7,
    "FLOATING POINT EXCEPTION": 8,
    "KILLED": 9,
    "SEGMENTATION FAULT": 11,
    "TERMINATED": 15,
}
_CHILD_SIGNAL: Final = re.compile(
    r"DataLoader worker \(pid[^)]*\) is killed by signal: (?P<loader>[A-Za-z -]+)"
    r"|ERROR: Unexpected (?P<printed>[a-z -]+) encountered in worker"
    r"|(?:terminated with signal |died with <Signals\.|workers are \{|Signal \d+ \()(?P<name>SIG[A-Z]+)"
)
"""What torch's data loader, a worker of it, torch.multiprocessing, subprocess, joblib and torchrun say of a process that a signal ended."""
_CHILD_ENDED: Final = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) exited unexpectedly(?! with exit code)|Pin memory thread exited unexpectedly"
    r"|process pool was terminated abruptly|A child process terminated abruptly|executor was unexpectedly terminated"
)
"""The same end, where the program did not learn by which signal, or whether by one: it often depends on which thread sees it first."""
_GOES_ON: Final = re.compile(
    r"^(?:The above exception was the direct cause of|During handling of the above exception)", re.MULTILINE
)


_LOST: Final = re.compile(r"(?:ConnectionReset|ConnectionRefused|EOF|FileNotFound|BrokenPipe)Error\b")
_FROM_LOADER: Final = re.compile(r"in _try_get_data\b|in rebuild_storage_\w+\n|in pin memory thread")


def _loader_lost(words: str, printed: str) -> bool:
    """Whether the rank's connection to a data loader worker broke: what the rank sees where it is just receiving a tensor from it."""
    lost = _LOST.match(words)
    return lost is not None and _FROM_LOADER.search(words + printed.rpartition(_TRACEBACK)[2]) is not None


def child_end(ended: Exit) -> ChildKilled | None:
    """Return which signal ended a process of the rank: by the rank's error, what it was raised from, or that process's last words."""
    words, printed = _words(ended), "\n".join(ended.log_tail)
    told, vague = _CHILD_SIGNAL.search(words), _CHILD_ENDED.search(words) is not None or _loader_lost(words, printed)
    if told is None and vague:
        told = _CHILD_SIGNAL.search(printed)
        if told is None and "exited unexpectedly with exit code" in printed:
            return None  # it ended by itself
    elif told is None and (ended.error_type or _uncaught(ended.log_tail)):
        *causes, _ = _GOES_ON.split(printed)
        told = _CHILD_SIGNAL.search(causes[-1].rpartition(_TRACEBACK)[2]) if causes else None
    if told is None and not vague:
        return None
    name = "" if told is None else (told["loader"] or told["printed"] or told["name"]).strip().upper().replace("-", " ")
    loader = told is not None and told["name"] is None
    loader = loader or re.search(r"DataLoader|[Pp]in memory", words) is not None or _loader_lost(words, printed)
    said = first_words(ended.error_message)
    return ChildKilled(rank=ended.rank, signal=_SIGNALS.get(name, 0), said=said, loader=loader)


def killed(ended: Exit) -> bool:
    """Whether SIGKILL ended the rank or a process of it, or may have: a shell's exit code, and errors of other processes, count as well."""
    child = child_end(ended)
    if child is not None:
        return child.signal in (0, _SIGKILL)
    return ended.signal == _SIGKILL or ended.exit_code == SHELL_BASE + _SIGKILL


def taken_port(ended: Exit) -> int | None:
    """Return the port that the rank could not bind, by its exception or its last lines; None where they name none."""
    for line in _words(ended).splitlines():
        if _IN_USE.search(line) is None:
            continue
        found = next(filter(None, (pattern.search(line[:_LINE_CHARACTERS]) for pattern in _PORTS)), None)
        if found is not None and 0 < int(found["port"]) <= _LAST_PORT:
            return int(found["port"])
    return None


def missing_file(ended: Exit) -> str:
    """Return the missing file, by a program's last lines; empty for none.

    A script in a fresh interpreter, or below a shell, reports no exception: its output is the only source.
    """
    if ended.error_type or ended.signal is not None or not ended.exit_code:
        return ""
    for line in reversed(ended.log_tail[-_LAST_LINES:]):
        found = _NOT_FOUND.search(line[:_LINE_CHARACTERS])
        if found is not None:
            return found["python"] or found["program"]
    return ""


def first_words(message: str) -> str:
    """Return the first line of an exception's message; with the second, where the first only announces it."""
    lines = [line.strip() for line in message.strip().splitlines()]
    if not lines:
        return ""
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def abort_words(ended: Exit) -> str:
    """Return the rank's last output."""
    return "\n".join((ended.error_type, ended.error_message, *ended.log_tail[-_ABORT_LINES:]))


def _words(ended: Exit) -> str:
    if ended.error_type:
        return f"{ended.error_type}: {ended.error_message}"
    if ended.signal in (_SIGABRT, _SIGBUS):
        return "\n".join(ended.log_tail[-_ABORT_LINES:])
    if ended.signal is not None:
        return ""
    return "\n".join(_uncaught(ended.log_tail) or ended.log_tail[-_LAST_LINES:])


def uncaught_exception(ended: Exit) -> tuple[str, str] | None:
    """Return type and first line of the exception that the rank's last lines show; None where they end in no traceback."""
    first = next(iter(_uncaught(ended.log_tail)), "")
    found = _EXCEPTION.fullmatch(first[:_LINE_CHARACTERS])
    return None if found is None else (found["type"], found["said"] or "")


def _uncaught(log_tail: Sequence[str]) -> Sequence[str]:
    """Return the last traceback's exception, with all lines of its message; nothing where the lines end in no traceback.

    A script in a fresh interpreter reports no exception, and messages of CUDA have more lines than are examined otherwise.
    """
    begins = [number for number, line in enumerate(log_tail) if line.startswith(_TRACEBACK)]
    for number, line in enumerate(log_tail[begins[-1] + 1 :], begins[-1] + 1) if begins else ():
        if line and not line[0].isspace():
            return log_tail[number:] if len(log_tail) - number <= _ABORT_LINES else ()
    return ()


_GRAVEST: Final = (GpuLost.kind, GpuEcc.kind, "gpu_xid", OomKill.failure_code)


def explaining(ended: Exit) -> RankEnd | None:
    """Return the most severe fact that explains the end, with the rank filled in; None where none does."""
    found = [fact for fact in ended.evidence if _explains(fact, ended)]
    grave = min(found, key=lambda fact: _GRAVEST.index(fact.code), default=None)
    return None if grave is None else replace(grave, rank=ended.rank)


def _explains(fact: object, ended: Exit) -> TypeGuard[RankEnd]:
    match fact:
        case OomKill() | OomCount():
            return killed(ended)
        case Xid(number=number) if number in PROGRAM_XIDS:
            return False
        case Xid() | GpuLost() | GpuEcc():
            return ended.signal is not None or _speaks_of_gpu(ended)
        case _:
            return False


def _speaks_of_gpu(ended: Exit) -> bool:
    text = abort_words(ended)
    return "CUDA" in text or "NCCL" in text or "cu" in ended.error_type.lower()
