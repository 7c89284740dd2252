"""Sentences about the ends of ranks."""

from __future__ import annotations

from typing import Final

from orchestrator.core.facts import rank_ends as f  # noqa: TC001  # singledispatch reads the annotations
from orchestrator.core.facts.rank_ends import Backend, Problem
from orchestrator.core.sentences.base import CUT, advice, of_rank, quoted, sentence
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


@sentence.register
def _(fact: f.PythonException) -> str:
    return f"rank {fact.rank} raised {fact.error_type}" + (f": {fact.said[:CUT]}" if fact.said else "")


@advice.register
def _(fact: f.PythonException, job_id: str = "JOB") -> str:
    return f"read the traceback: orch logs {job_id} --rank {fact.rank}"


@sentence.register
def _(fact: f.ExitCode) -> str:
    return f"rank {fact.rank} ended with exit code {fact.exit_code}"


@advice.register
def _(fact: f.ExitCode, job_id: str = "JOB") -> str:
    return f"read its last lines: orch logs {job_id} --rank {fact.rank}"


@sentence.register
def _(fact: f.RetryExitCode) -> str:
    return f"rank {fact.rank} requested a retry (exit code {fact.exit_code}, in retry.exit_codes)"


@sentence.register
def _(fact: f.ProcessSignal) -> str:
    name = _SIGNAL_NAMES.get(fact.signal, f"signal {fact.signal}")
    if fact.exit_code is None:
        return f"rank {fact.rank} was killed by {name}"
    return f"rank {fact.rank} ended with exit code {fact.exit_code}, as a process killed by {name}"


@advice.register
def _(fact: f.ProcessSignal, job_id: str = "JOB") -> str:
    match fact.signal:
        case 9:
            return (
                "a user or the kernel killed it; if memory ran out, `dmesg` says so: ask for more with"
                " resources_per_worker.memory"
            )
        case 11:
            return "a native library crashed; the last lines of its log may say where"
        case _:
            return ""


@advice.register
def _(fact: f.TerminatedFromOutside, job_id: str = "JOB") -> str:
    return _STOPPED_ADVICE


@sentence.register
def _(fact: f.RepeatedCrash) -> str:
    where = "before its first step" if fact.step is None else f"at step {fact.step}"
    again = f"the same crash {where} in two attempts in a row, so a restart does not help"
    return of_rank(fact.rank, f"{again} ({sentence(fact.crash)})")


@advice.register
def _(fact: f.RepeatedCrash, job_id: str = "JOB") -> str:
    todo = advice(fact.crash, job_id) or "run the step under a debugger, or with CUDA_LAUNCH_BLOCKING=1"
    if fact.step is None:
        return todo
    return f"{todo}; `orch submit --resume-from {job_id}@STEP` begins at an older checkpoint"


@sentence.register
def _(fact: f.LeftEarly) -> str:
    what = "SIGTERM to the processes of its node" if fact.scope is StopScope.MACHINE else "a request to stop"
    total = f" of {fact.total_steps}" if fact.total_steps is not None else ""
    at = "" if fact.step is None else f" at step {fact.step}{total}"
    return f"rank {fact.rank} ended{at} after {what} that orch did not send"


@advice.register
def _(fact: f.LeftEarly, job_id: str = "JOB") -> str:
    return _STOPPED_ADVICE


@sentence.register
def _(fact: f.NoExitStatus) -> str:
    if fact.rank is None:
        return "its processes went away without an exit status"
    return f"rank {fact.rank} went away without an exit status"


@sentence.register
def _(fact: f.FileLeftOut) -> str:
    return f"rank {fact.rank} did not find {fact.path[:CUT]}, which {fact.ignore_file} leaves out of the job's copy"


@advice.register
def _(fact: f.FileLeftOut, job_id: str = "JOB") -> str:
    name = fact.path.rpartition("/")[2]
    return f"add the line !{name[:CUT]} to a file .orchignore beside the {fact.ignore_file}, or read data by an absolute path"


@sentence.register
def _(fact: f.CollectiveTimeout) -> str:
    library = {Backend.NCCL: "NCCL", Backend.GLOO: "gloo"}[fact.backend]
    return of_rank(
        fact.rank, f"a collective of {library} timed out: another rank did not reach it in time{quoted(fact.said)}"
    )


@advice.register
def _(fact: f.CollectiveTimeout, job_id: str = "JOB") -> str:
    return _LATE_ADVICE.replace("JOB", job_id)


@sentence.register
def _(fact: f.DiskFull) -> str:
    return of_rank(fact.rank, f"the disk is full{quoted(fact.said)}")


@advice.register
def _(fact: f.DiskFull, job_id: str = "JOB") -> str:
    return "free space under the job's working or checkpoint directory"


@sentence.register
def _(fact: f.CudaOutOfMemory) -> str:
    return of_rank(fact.rank, f"CUDA ran out of memory{quoted(fact.said)}")


@advice.register
def _(fact: f.CudaOutOfMemory, job_id: str = "JOB") -> str:
    return "use a smaller batch per rank, gradient accumulation or checkpointing, or a GPU with more memory"


@sentence.register
def _(fact: f.NonFiniteLoss) -> str:
    return of_rank(fact.rank, f"the loss is no longer a finite number{quoted(fact.said)}")


@advice.register
def _(fact: f.NonFiniteLoss, job_id: str = "JOB") -> str:
    return (
        "lower the learning rate, clip gradients, or look at the last batch; torch.autograd.set_detect_anomaly finds the"
        " operation"
    )


@sentence.register
def _(fact: f.PeerLost) -> str:
    return of_rank(fact.rank, f"another rank went away in the middle of a collective{quoted(fact.said)}")


@advice.register
def _(fact: f.PeerLost, job_id: str = "JOB") -> str:
    return "the cause is in that rank's log; if none failed by itself, in the network between the nodes"


@sentence.register
def _(fact: f.RendezvousTimeout) -> str:
    return of_rank(fact.rank, f"the ranks did not find each other in time{quoted(fact.said)}")


@advice.register
def _(fact: f.RendezvousTimeout, job_id: str = "JOB") -> str:
    return "look at the rank that is missing; between nodes, whether a firewall keeps them apart"


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


@sentence.register
def _(fact: f.PortTaken) -> str:
    process = f"process {fact.pid}" + (f" ({fact.program[:CUT]})" if fact.program else "")
    by = f" by {process}" if fact.pid is not None else ""
    of = ", which follows from MASTER_PORT," if fact.chosen_by_orch else ""
    return of_rank(fact.rank, f"port {fact.port}{of} is in use{by}{quoted(fact.said)}")


@advice.register
def _(fact: f.PortTaken, job_id: str = "JOB") -> str:
    if fact.chosen_by_orch:
        return "orch serves the rendezvous at MASTER_PORT, and gives every attempt another one: begin at MASTER_PORT + 1, or bind port 0"
    holder = (
        ""
        if fact.pid is not None
        else f"`ss -tlnp 'sport = :{fact.port}'` on its node, as root, shows what listens there; "
    )
    return f"{holder}bind port 0, which the kernel replaces by a free one, or count on from MASTER_PORT, which differs in every attempt"


@sentence.register
def _(fact: f.ScriptProblem) -> str:
    return of_rank(fact.rank, _PROBLEMS[fact.problem][0] + quoted(fact.said))


@advice.register
def _(fact: f.ScriptProblem, job_id: str = "JOB") -> str:
    return _PROBLEMS[fact.problem][1].replace("JOB", job_id)
