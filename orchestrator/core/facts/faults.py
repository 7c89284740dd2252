"""Faults: why a rank's process ended, what is wrong with a GPU or a node, and what makes a gang unusable.

``said`` is text of a program other than orch: the first line of an exception, a line of the kernel's log. ``GpuCondition`` alone states
whether a GPU is in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final

from orchestrator.core.codec import Integer, Number, Text, Time
from orchestrator.core.facts.fact import CUT, Fact, FactRecord, of_rank, quoted
from orchestrator.core.states import StopScope  # conformance.py reads the annotations when it runs
from orchestrator.spec.units import format_memory
from orchestrator.units import duration, plural, size

SIGNAL_NAMES: Final = {
    1: "SIGHUP",
    2: "SIGINT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    13: "SIGPIPE",
    15: "SIGTERM",
}

_LATE_ADVICE: Final = (
    "look for the rank that was late: orch logs JOB --rank N of the others; then for a slow disk or a lost network link"
)

_SIGBUS: Final = 7

_KILLED_ADVICE: Final = (
    "a user or the kernel killed it; if memory ran out, `dmesg` says so: ask for more with resources_per_worker.memory"
)

_IN_THE_RANK: Final = "with num_workers=0, and PYTHONFAULTHANDLER: '1' in env:, the rank prints the line that crashes"

_STOPPED_ADVICE: Final = "the job resumes from its last checkpoint; to stop a job, use `orch pause` or `orch cancel`"


class RankEnd(FactRecord):
    """Base of the causes of a rank's end; ``rank`` is None in evidence that is not yet assigned to one."""

    rank: Integer | None = None


class SaidEnd(RankEnd):
    """Base of the causes for which ``words`` say it all, and ``said`` what the rank's output says."""

    said: Text = ""

    def sentence(self) -> str:
        return of_rank(self.rank, self.words + quoted(self.said))


class PythonException(RankEnd, tag="exception"):
    """The script raised ``error_type``; ``said`` is the first line of its message."""

    error_type: Text
    said: Text = ""

    def sentence(self) -> str:
        return f"rank {self.rank} raised {self.error_type}" + (f": {self.said[:CUT]}" if self.said else "")

    def advice(self, job_id: str = "JOB") -> str:
        return f"read the traceback: orch logs {job_id} --rank {self.rank}"


class ExitCode(RankEnd, tag="exit_code"):
    """The process ended by itself with a code other than 0."""

    exit_code: Integer | None

    def sentence(self) -> str:
        return f"rank {self.rank} ended with exit code {self.exit_code}"

    def advice(self, job_id: str = "JOB") -> str:
        return f"read its last lines: orch logs {job_id} --rank {self.rank}"


class RetryExitCode(RankEnd, tag="retry_exit_code"):
    """The process ended with a code that the job file lists in retry.exit_codes."""

    exit_code: Integer

    def sentence(self) -> str:
        return f"rank {self.rank} requested a retry (exit code {self.exit_code}, in retry.exit_codes)"


class ProcessSignal(RankEnd, tag="signal"):
    """A signal ended the process, or a child of it; then ``exit_code`` is the process's exit code for that end."""

    signal: Integer
    exit_code: Integer | None = None

    def sentence(self) -> str:
        name = SIGNAL_NAMES.get(self.signal, f"signal {self.signal}")
        if self.exit_code is None:
            return f"rank {self.rank} was killed by {name}"
        return f"rank {self.rank} ended with exit code {self.exit_code}, as a process killed by {name}"

    def advice(self, job_id: str = "JOB") -> str:
        match self.signal:
            case 9:
                return _KILLED_ADVICE
            case 7:
                return (
                    "probably /dev/shm is full, or a file that it had mapped into memory became shorter: df -h /dev/shm"
                )
            case 11:
                return "a native library crashed; the last lines of its log may say where"
            case _:
                return ""


class TerminatedFromOutside(ProcessSignal, tag="terminated"):
    """SIGTERM that orch did not send ended the process."""

    failure_code: ClassVar[str] = "stopped_from_outside"

    def advice(self, job_id: str = "JOB") -> str:
        return _STOPPED_ADVICE


class ChildKilled(ProcessSignal, tag="child_killed"):
    """The rank's error says that a process it had started, with ``loader`` a data loader's, was ended by ``signal``; 0: by which is unknown."""

    said: Text = ""
    loader: bool = False

    @property
    def code(self) -> str:
        """Return the code of what the signal means: that of a rank's own end, or of full shared memory."""
        return Problem.SHARED_MEMORY.value if self.signal == _SIGBUS else ProcessSignal.kind

    def sentence(self) -> str:
        process = "a data loader worker" if self.loader else "a process that it had started"
        how = (
            f"was killed by {SIGNAL_NAMES.get(self.signal, f'signal {self.signal}')}" if self.signal else "ended early"
        )
        probably = ": probably the machine's shared memory (/dev/shm) is full" if self.signal == _SIGBUS else ""
        return of_rank(self.rank, f"{process} {how}{probably}{quoted(self.said)}")

    def advice(self, job_id: str = "JOB") -> str:
        match self.signal:
            case 0 | 9:
                fewer = ", or use fewer data loader workers" if self.loader else ""
                return f"{_KILLED_ADVICE}{fewer}"
            case 7:
                return _PROBLEMS[Problem.SHARED_MEMORY][1]
            case _:
                return _IN_THE_RANK if self.loader else super().advice(job_id)


class RepeatedCrash(RankEnd, tag="repeated_crash"):
    """The rank ended with the same ``crash`` at the same step in two attempts in a row; ``step`` None: before its first."""

    crash: Fact
    step: Integer | None

    def sentence(self) -> str:
        where = "before its first step" if self.step is None else f"at step {self.step}"
        again = f"the same crash {where} in two attempts in a row, so a restart does not help"
        return of_rank(self.rank, f"{again} ({self.crash.sentence()})")

    def advice(self, job_id: str = "JOB") -> str:
        todo = self.crash.advice(job_id) or "run the step under a debugger, or with CUDA_LAUNCH_BLOCKING=1"
        if self.step is None:
            return todo
        return f"{todo}; `orch submit --resume-from {job_id}@STEP` begins at an older checkpoint"


class LeftEarly(RankEnd, tag="left_early"):
    """The rank ended, in any way, after a request to stop that orch had not sent."""

    failure_code: ClassVar[str] = "stopped_from_outside"
    scope: StopScope
    step: Integer | None = None
    total_steps: Integer | None = None

    def sentence(self) -> str:
        what = "SIGTERM to the processes of its node" if self.scope is StopScope.MACHINE else "a request to stop"
        total = f" of {self.total_steps}" if self.total_steps is not None else ""
        at = "" if self.step is None else f" at step {self.step}{total}"
        return f"rank {self.rank} ended{at} after {what} that orch did not send"

    def advice(self, job_id: str = "JOB") -> str:
        return _STOPPED_ADVICE


class EndedAlone(RankEnd, tag="ended_alone"):
    """The rank ended with exit code 0 while another one, ``waiting`` where it is known, needed it for a collective; ``said`` is that one's error."""

    waiting: Integer | None = None
    step: Integer | None = None
    said: Text = ""

    def sentence(self) -> str:
        after = "" if self.step is None else f" after step {self.step}"
        other = "the others" if self.waiting is None else f"rank {self.waiting}"
        return f"rank {self.rank} ended with exit code 0{after}, while {other} waited for it in a collective{quoted(self.said)}"

    def advice(self, job_id: str = "JOB") -> str:
        return (
            "all ranks have to make the same number of steps: give each as many batches (DistributedSampler, drop_last), or use"
            f" torch.distributed.algorithms.Join; its last lines: orch logs {job_id} --rank {self.rank}"
        )


class NoExitStatus(RankEnd, tag="no_exit_status"):
    """The process ended and left no exit status; without a rank: all of them did."""

    failure_code: ClassVar[str] = "gang_lost"

    def sentence(self) -> str:
        if self.rank is None:
            return "its processes went away without an exit status"
        return f"rank {self.rank} went away without an exit status"


class FileLeftOut(RankEnd, tag="file_left_out"):
    """The script misses a file that an ignore file kept out of the job's copy of its working directory."""

    path: Text
    ignore_file: Text

    def sentence(self) -> str:
        return f"rank {self.rank} did not find {self.path[:CUT]}, which {self.ignore_file} leaves out of the job's copy"

    def advice(self, job_id: str = "JOB") -> str:
        name = self.path.rpartition("/")[2]
        return f"add the line !{name[:CUT]} to a file .orchignore beside the {self.ignore_file}, or read data by an absolute path"


class Backend(StrEnum):
    """The library of a collective."""

    NCCL = "nccl"
    GLOO = "gloo"


class CollectiveTimeout(RankEnd, tag="collective_timeout"):
    """Another rank did not reach a collective in time."""

    backend: Backend
    said: Text = ""

    @property
    def code(self) -> str:
        """Return the code, by the library."""
        return f"{self.backend}_timeout"

    def sentence(self) -> str:
        library = {Backend.NCCL: "NCCL", Backend.GLOO: "gloo"}[self.backend]
        return of_rank(
            self.rank, f"a collective of {library} timed out: another rank did not reach it in time{quoted(self.said)}"
        )

    def advice(self, job_id: str = "JOB") -> str:
        return _LATE_ADVICE.replace("JOB", job_id)


class DiskFull(SaidEnd, tag="disk_full"):
    """A write failed because the disk is full."""

    words: ClassVar[str] = "the disk is full"
    todo: ClassVar[str] = "free space under the job's working or checkpoint directory"


class CudaOutOfMemory(SaidEnd, tag="cuda_oom"):
    """The rank's GPU had no free memory for an allocation."""

    words: ClassVar[str] = "CUDA ran out of memory"
    todo: ClassVar[str] = (
        "use a smaller batch per rank, gradient accumulation or checkpointing, or a GPU with more memory"
    )


class NonFiniteLoss(SaidEnd, tag="nonfinite_loss"):
    """The loss, a gradient or a parameter became NaN or infinite."""

    words: ClassVar[str] = "the loss is no longer a finite number"
    todo: ClassVar[str] = (
        "lower the learning rate, clip gradients, or look at the last batch; torch.autograd.set_detect_anomaly finds the"
        " operation"
    )


class PeerLost(SaidEnd, tag="peer_lost"):
    """Another rank ended in the middle of a collective."""

    words: ClassVar[str] = "another rank went away in the middle of a collective"
    todo: ClassVar[str] = "the cause is in that rank's log; if none failed by itself, in the network between the nodes"


class RendezvousTimeout(SaidEnd, tag="rendezvous_timeout"):
    """The ranks did not find each other in time."""

    words: ClassVar[str] = "the ranks did not find each other in time"
    todo: ClassVar[str] = "look at the rank that is missing; between nodes, whether a firewall keeps them apart"


DERIVED_PORTS: Final = 100
"""A script that needs more ports counts on from MASTER_PORT, by less than this."""


class PortTaken(RankEnd, tag="port_taken"):
    """The rank could not bind ``port``. ``rendezvous_port`` is its MASTER_PORT, which is another one in every attempt.

    ``listening``: a socket waits at the port after the rank has ended. ``pid`` and ``program`` are its process, where it can be seen.
    """

    failure_code: ClassVar[str] = "port_in_use"
    port: Integer
    rendezvous_port: Integer | None = None
    listening: bool = False
    pid: Integer | None = None
    program: Text = ""
    said: Text = ""

    @property
    def chosen_by_orch(self) -> bool:
        """Whether the port is MASTER_PORT, or one of those after it."""
        return self.rendezvous_port is not None and 0 <= self.port - self.rendezvous_port < DERIVED_PORTS

    def sentence(self) -> str:
        process = f"process {self.pid}" + (f" ({self.program[:CUT]})" if self.program else "")
        by = f" by {process}" if self.pid is not None else ""
        of = ", which follows from MASTER_PORT," if self.chosen_by_orch else ""
        return of_rank(self.rank, f"port {self.port}{of} is in use{by}{quoted(self.said)}")

    def advice(self, job_id: str = "JOB") -> str:
        if self.chosen_by_orch:
            return "orch serves the rendezvous at MASTER_PORT, and gives every attempt another one: begin at MASTER_PORT + 1, or bind port 0"
        holder = (
            ""
            if self.pid is not None
            else f"`ss -tlnp 'sport = :{self.port}'` on its node, as root, shows what listens there; "
        )
        return f"{holder}bind port 0, which the kernel replaces by a free one, or count on from MASTER_PORT, which differs in every attempt"


class Problem(StrEnum):
    """Mistakes and shortages that only the text of an exception identifies."""

    SHARED_MEMORY = "shared_memory"
    HOST_MEMORY = "host_memory"
    RESUME_MISMATCH = "resume_mismatch"
    CHECKPOINT_MISMATCH = "checkpoint_mismatch"
    CHECKPOINT_BROKEN = "checkpoint_broken"
    SHAPE_MISMATCH = "shape_mismatch"
    DEVICE_ASSERT = "device_assert"
    IMPORT_ERROR = "import_error"
    PERMISSION = "permission"
    MISSING_FILE = "missing_file"
    NOT_EXECUTABLE = "not_executable"
    PORT_IN_USE = "port_in_use"


class ScriptProblem(RankEnd, tag="script_problem"):
    """The rank's output names a known problem."""

    problem: Problem
    said: Text = ""

    @property
    def code(self) -> str:
        """Return the code, by the problem."""
        return self.problem.value

    def sentence(self) -> str:
        return of_rank(self.rank, _PROBLEMS[self.problem][0] + quoted(self.said))

    def advice(self, job_id: str = "JOB") -> str:
        return _PROBLEMS[self.problem][1].replace("JOB", job_id)


_PROBLEMS: Final[dict[Problem, tuple[str, str]]] = {
    Problem.SHARED_MEMORY: (
        "the machine's shared memory (/dev/shm) is full",
        "start the container with a larger --shm-size, or use fewer data loader workers",
    ),
    Problem.HOST_MEMORY: (
        "the machine had no free memory for it",
        "request more with resources_per_worker.memory; if it needs more than any machine has, check the shapes of its arrays",
    ),
    Problem.RESUME_MISMATCH: (
        "it could not load the checkpoint that the other ranks resume from",
        "nothing: the next attempt chooses again",
    ),
    Problem.CHECKPOINT_MISMATCH: (
        "the checkpoint does not fit the model",
        "the model was changed since it was saved: go back to that version, or start without the checkpoint",
    ),
    Problem.CHECKPOINT_BROKEN: (
        "a checkpoint file that the script reads is broken",
        "point the script at an older file; checkpoints saved with orch are verified: orch checkpoints JOB --verify",
    ),
    Problem.SHAPE_MISMATCH: (
        "two tensors have shapes that do not match",
        "the traceback names the line; print the shapes there, and check the last, smaller batch (drop_last)",
    ),
    Problem.DEVICE_ASSERT: (
        "an index is out of range, often a label beyond the number of classes",
        "check labels against the number of classes; CUDA_LAUNCH_BLOCKING=1 in env: names the line",
    ),
    Problem.IMPORT_ERROR: (
        "a Python module is missing",
        "install it into the interpreter that the job uses (orch status shows which)",
    ),
    Problem.PERMISSION: (
        "it has no permission to use a file",
        "ranks run as the user of the daemon: give that user access, or name another path",
    ),
    Problem.MISSING_FILE: (
        "a file or directory is missing",
        "paths are relative to the job's copy of working_dir; name others in full, on every node that the job may use",
    ),
    Problem.NOT_EXECUTABLE: (
        "a program cannot be executed",
        "is it installed where the job runs, executable (chmod +x) and built for that machine, and does its first line's interpreter exist?",
    ),
    Problem.PORT_IN_USE: (
        "a port that it needs is in use",
        "do not set MASTER_PORT or fixed ports in the script; orch gives a fresh rendezvous to every attempt",
    ),
}


PAGE_BYTES: Final = 4096

_OOM: Final = "the kernel killed it because the machine's memory ran out"

_OOM_ADVICE: Final = (
    "ask for more with resources_per_worker.memory, or lower num_workers, prefetching or caching in the data loader"
)


class MemoryLimit(RankEnd, tag="memory_limit"):
    """The kernel killed the rank because its control group reached its limit."""

    todo: ClassVar[str] = (
        "raise resources_per_worker.memory, or use a smaller batch, fewer data loader workers or less prefetching; snapshots"
        " in shared memory count too"
    )

    used_bytes: Integer
    limit_bytes: Integer
    asked_bytes: Integer | None = None

    def sentence(self) -> str:
        used = _used(self.used_bytes, self.asked_bytes)
        # The kernel rounds a limit down to whole pages.
        as_asked = self.asked_bytes is not None and 0 <= self.asked_bytes - self.limit_bytes < PAGE_BYTES
        limit = format_memory(self.asked_bytes) if as_asked and self.asked_bytes else size(self.limit_bytes)
        return of_rank(self.rank, f"the kernel killed it because it reached its memory limit of {limit} ({used})")


class OomKill(RankEnd, tag="oom_kill"):
    """The kernel killed the rank, or a process of it, because the machine's memory ran out.

    ``used_bytes`` is what the rank used, ``asked_bytes`` what the job requested; ``pid`` and ``process`` are from the
    kernel's log. ``said`` is the line of a program that reports it.
    """

    failure_code: ClassVar[str] = "host_oom_kill"
    used_bytes: Integer | None = None
    asked_bytes: Integer | None = None
    pid: Integer | None = None
    process: Text = ""
    said: Text = ""

    def sentence(self) -> str:
        if self.used_bytes is not None:
            return of_rank(self.rank, f"{_OOM} ({_used(self.used_bytes, self.asked_bytes)})")
        named = f"kernel: Out of memory: Killed process {self.pid} ({self.process})" if self.pid is not None else ""
        return of_rank(self.rank, _OOM + quoted(self.said or named))

    def advice(self, job_id: str = "JOB") -> str:
        if self.used_bytes is None:
            return _OOM_ADVICE
        return (
            "set resources_per_worker.memory to what each rank needs, so that no more ranks are placed on a machine than fit, or"
            " use a smaller batch, fewer data loader workers or less prefetching"
        )


class OomCount(RankEnd, tag="oom_count"):
    """The count of memory kills in the rank's control group, read from ``path``, rose."""

    failure_code: ClassVar[str] = "host_oom_kill"
    path: Text
    before: Integer
    count: Integer

    def sentence(self) -> str:
        count = f"cgroup: oom_kill rose from {self.before} to {self.count} in {self.path}"
        return of_rank(self.rank, f"{_OOM} ({count})")

    def advice(self, job_id: str = "JOB") -> str:
        return _OOM_ADVICE


class KernelMessage(RankEnd, tag="kernel_message"):
    """A line of the kernel's log that names the rank's process and has no known meaning."""

    said: Text

    def sentence(self) -> str:
        return of_rank(self.rank, f"kernel: {self.said}")


def _used(used_bytes: int, asked_bytes: int | None) -> str:
    wanted = f"it asked for {format_memory(asked_bytes)}" if asked_bytes else "it asked for none"
    return f"it used {size(used_bytes)}, {wanted}"


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
        before = f", {duration(self.seconds_before)} before" if self.seconds_before is not None else ""
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

    words: ClassVar[str] = "its exporter does not answer; it is restarted by itself"


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


class GangFault(FactRecord):
    """Base of a gang's faults; ``rank`` is the first affected one, where known."""

    failure_code: ClassVar[str] = "gang_lost"
    rank: Integer | None = None


class ActorLost(GangFault, tag="actor_lost"):
    """The actor of a rank died."""

    def sentence(self) -> str:
        return of_rank(self.rank, "its actor died")


class ActorMissing(GangFault, tag="actor_missing"):
    """The actor of a rank is missing for an unknown reason."""

    def sentence(self) -> str:
        return f"the actor of rank {self.rank} is gone"


class ResourcesTaken(GangFault, tag="resources_taken"):
    """Other users of the Ray cluster hold the resources of the gang."""

    words: ClassVar[str] = "other users of the Ray cluster hold the resources planned for its gang"


class NodeLost(GangFault, tag="node_lost"):
    """The node of a rank died, or is missing; ``node`` is its id where known."""

    node: Text = ""

    def sentence(self) -> str:
        if self.rank is None:
            return f"node {self.node[:12]} is gone" if self.node else "a node that it was to run on is gone"
        return of_rank(self.rank, "its node died")


class HeadLost(GangFault, tag="head_lost"):
    """Ray's head died."""

    words: ClassVar[str] = "Ray's head died"


class EnvironmentFailed(GangFault, tag="environment_failed"):
    """Ray could not install the job's runtime_env; ``said`` is the end of its installer's output."""

    said: Text

    def sentence(self) -> str:
        return f"runtime_env could not be installed for rank {self.rank}: {self.said}"


class ActorNotPlaced(GangFault, tag="actor_not_placed"):
    """Ray could not place the actor of a rank; ``said`` is its error."""

    said: Text

    def sentence(self) -> str:
        return f"rank {self.rank} could not be placed: {self.said}"


class StorageUnseen(GangFault, tag="storage_unseen"):
    """The directory that the job saves to is not visible on a node."""

    node: Text
    storage_path: Text

    def sentence(self) -> str:
        return of_rank(
            self.rank,
            f"node {self.node[:12]} does not see checkpoint.storage_path ({self.storage_path}), so what is saved there would be"
            " lost with it; mount the directory there, or drain the node",
        )


class FilesNotSent(GangFault, tag="files_not_sent"):
    """The job's working copy could not be written to a rank's node; ``said`` is the system's error, ``host`` the node's name."""

    node: Text
    said: Text
    host: Text = ""

    def sentence(self) -> str:
        return of_rank(
            self.rank,
            f"the working copy could not be written to node {self.host or self.node[:12]} ({self.said}); make room there, or drain the node",
        )


class RecordRestored(GangFault, tag="record_restored"):
    """Later attempts than the job's record knows exist, up to number ``attempt`` where known: the store is an older copy."""

    attempt: Integer | None = None

    def sentence(self) -> str:
        upto = "" if self.attempt is None else f", up to attempt {self.attempt}"
        return f"the store was restored from an older copy: what runs of later attempts is ended{upto}"


class StoppedUnplaced(GangFault, tag="stopped_unplaced"):
    """The job was stopped before its gang was placed."""

    words: ClassVar[str] = "it was stopped before its gang was placed"


class StartupTimeout(FactRecord, tag="startup_timeout"):
    """The ranks did not come up within health.startup_timeout."""

    limit_seconds: Number

    def sentence(self) -> str:
        limit = duration(self.limit_seconds)
        return f"its ranks did not come up within health.startup_timeout ({limit})"


class MaxDuration(FactRecord, tag="max_duration"):
    """The job ran for longer than its max_duration."""

    limit_seconds: Number

    def sentence(self) -> str:
        return f"exceeded max_duration ({duration(self.limit_seconds)})"


class RepeatedFailures(FactRecord, tag="repeated_failures"):
    """Several failures began at one node or GPU within a few hours; ``cause`` is that of the last, in job ``job_id``."""

    failures: Integer
    job_id: Text
    cause: Fact

    def sentence(self) -> str:
        return f"{self.failures} failures began here, the last: {self.job_id}, {self.cause.sentence()}"


class HealthCheckFailed(FactRecord, tag="health_check_failed"):
    """A node's health check found problems."""

    problems: tuple[Fact, ...]

    def sentence(self) -> str:
        return f"its health check failed: {'; '.join(each.sentence() for each in self.problems)}"


class DiskDamaged(FactRecord, tag="disk_damaged"):
    """The disk under ``path`` returned other bytes than were written."""

    path: Text

    def sentence(self) -> str:
        return f"the disk under {self.path} does not keep what is written"


class DiskUnwritable(FactRecord, tag="disk_unwritable"):
    """Nothing can be written under ``path``; ``said`` is the system's error."""

    path: Text
    said: Text = ""

    def sentence(self) -> str:
        return f"nothing can be written to {self.path}" + (f": {self.said}" if self.said else "")


class DeviceWrong(FactRecord, tag="device_wrong"):
    """A device computes a wrong result: ``operation`` is multiply or reduce, ``off`` is the error."""

    device: Text
    operation: Text
    off: Number | None = None

    def sentence(self) -> str:
        off = f" (off by {self.off:g})" if self.off is not None else ""
        return f"{self.device} {'reduces' if self.operation == 'reduce' else 'multiplies'} wrongly{off}"


class DevicesSilent(FactRecord, tag="devices_silent"):
    """The devices did not compute within ``seconds``."""

    seconds: Number

    def sentence(self) -> str:
        return f"its devices did not compute within {duration(self.seconds)}"


class DevicesFailed(FactRecord, tag="devices_failed"):
    """The computation on the devices failed; ``said`` is the last line of its error."""

    said: Text

    def sentence(self) -> str:
        return f"its devices do not compute: {self.said[:CUT]}"


class DriverProblem(FactRecord, tag="driver_problem"):
    """A GPU's driver answers with the error ``said``."""

    said: Text

    def sentence(self) -> str:
        return self.said


class CheckFailed(FactRecord, tag="check_failed"):
    """The node could not be checked: its agent does not answer within ``seconds``, or at all; ``said`` is its error."""

    seconds: Number | None = None
    said: Text = ""

    def sentence(self) -> str:
        if self.seconds is not None:
            return f"its check took longer than {duration(self.seconds)}"
        return f"its check did not end: {self.said}" if self.said else "its agent does not answer"


class Closure(StrEnum):
    """Reasons why nothing new is placed on a node."""

    CORDONED = "cordoned"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    UNREACHABLE = "unreachable"
    DOWN = "down"


class NodeClosed(FactRecord, tag="node_closed"):
    """The node would suit a waiting job, but nothing new is placed on it."""

    node: Text
    state: Closure

    def sentence(self) -> str:
        return f"node {self.node} is {self.state.value}"
