"""Facts about why a rank's process ended.

``said`` is text of a program other than orch: the first line of an exception, a line of the kernel's log.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, Final

from orchestrator.core.codec import Integer, Text
from orchestrator.core.facts.fact import Fact, FactRecord
from orchestrator.core.facts.words import CUT, of_rank, quoted
from orchestrator.core.states import StopScope

_SIGNAL_NAMES: Final = {
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

_STOPPED_ADVICE: Final = "the job resumes from its last checkpoint; to stop a job, use `orch pause` or `orch cancel`"


class RankEnd(FactRecord):
    """Base of the causes of a rank's end; ``rank`` is None in evidence that is not yet assigned to one."""

    rank: Integer | None = None


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
        name = _SIGNAL_NAMES.get(self.signal, f"signal {self.signal}")
        if self.exit_code is None:
            return f"rank {self.rank} was killed by {name}"
        return f"rank {self.rank} ended with exit code {self.exit_code}, as a process killed by {name}"

    def advice(self, job_id: str = "JOB") -> str:
        match self.signal:
            case 9:
                return (
                    "a user or the kernel killed it; if memory ran out, `dmesg` says so: ask for more with"
                    " resources_per_worker.memory"
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


class DiskFull(RankEnd, tag="disk_full"):
    """A write failed because the disk is full."""

    said: Text = ""

    def sentence(self) -> str:
        return of_rank(self.rank, f"the disk is full{quoted(self.said)}")

    def advice(self, job_id: str = "JOB") -> str:
        return "free space under the job's working or checkpoint directory"


class CudaOutOfMemory(RankEnd, tag="cuda_oom"):
    """The rank's GPU had no free memory for an allocation."""

    said: Text = ""

    def sentence(self) -> str:
        return of_rank(self.rank, f"CUDA ran out of memory{quoted(self.said)}")

    def advice(self, job_id: str = "JOB") -> str:
        return "use a smaller batch per rank, gradient accumulation or checkpointing, or a GPU with more memory"


class NonFiniteLoss(RankEnd, tag="nonfinite_loss"):
    """The loss, a gradient or a parameter became NaN or infinite."""

    said: Text = ""

    def sentence(self) -> str:
        return of_rank(self.rank, f"the loss is no longer a finite number{quoted(self.said)}")

    def advice(self, job_id: str = "JOB") -> str:
        return (
            "lower the learning rate, clip gradients, or look at the last batch; torch.autograd.set_detect_anomaly finds the"
            " operation"
        )


class PeerLost(RankEnd, tag="peer_lost"):
    """Another rank ended in the middle of a collective."""

    said: Text = ""

    def sentence(self) -> str:
        return of_rank(self.rank, f"another rank went away in the middle of a collective{quoted(self.said)}")

    def advice(self, job_id: str = "JOB") -> str:
        return "the cause is in that rank's log; if none failed by itself, in the network between the nodes"


class RendezvousTimeout(RankEnd, tag="rendezvous_timeout"):
    """The ranks did not find each other in time."""

    said: Text = ""

    def sentence(self) -> str:
        return of_rank(self.rank, f"the ranks did not find each other in time{quoted(self.said)}")

    def advice(self, job_id: str = "JOB") -> str:
        return "look at the rank that is missing; between nodes, whether a firewall keeps them apart"


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
    Problem.PORT_IN_USE: (
        "a port that it needs is in use",
        "do not set MASTER_PORT or fixed ports in the script; orch gives a fresh rendezvous to every attempt",
    ),
}
