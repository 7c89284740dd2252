"""Sentences about memory, GPUs, nodes and gangs."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from orchestrator.core.facts import gangs, gpus, memory, nodes
from orchestrator.core.facts.fact import UnreadableFact  # noqa: TC001  # singledispatch reads the annotations
from orchestrator.core.sentences.base import CUT, advice, of_rank, quoted, sentence
from orchestrator.spec.units import format_duration, format_memory
from orchestrator.units import plural, size

PAGE_BYTES: Final = 4096
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


@sentence.register
def _(fact: UnreadableFact) -> str:
    return fact.text


# -- memory


def _used(used_bytes: int, asked_bytes: int | None) -> str:
    wanted = f"it asked for {format_memory(asked_bytes)}" if asked_bytes else "it asked for none"
    return f"it used {size(used_bytes)}, {wanted}"


@sentence.register
def _(fact: memory.MemoryLimit) -> str:
    used = _used(fact.used_bytes, fact.asked_bytes)
    # The kernel rounds a limit down to whole pages.
    as_asked = fact.asked_bytes is not None and 0 <= fact.asked_bytes - fact.limit_bytes < PAGE_BYTES
    limit = format_memory(fact.asked_bytes) if as_asked and fact.asked_bytes else size(fact.limit_bytes)
    return of_rank(fact.rank, f"the kernel killed it because it reached its memory limit of {limit} ({used})")


@advice.register
def _(fact: memory.MemoryLimit, job_id: str = "JOB") -> str:
    return (
        "raise resources_per_worker.memory, or use a smaller batch, fewer data loader workers or less prefetching; snapshots"
        " in shared memory count too"
    )


_OOM: Final = "the kernel killed it because the machine's memory ran out"
_OOM_ADVICE: Final = (
    "ask for more with resources_per_worker.memory, or lower num_workers, prefetching or caching in the data loader"
)


@sentence.register
def _(fact: memory.OomKill) -> str:
    if fact.used_bytes is not None:
        return of_rank(fact.rank, f"{_OOM} ({_used(fact.used_bytes, fact.asked_bytes)})")
    named = f"kernel: Out of memory: Killed process {fact.pid} ({fact.process})" if fact.pid is not None else ""
    return of_rank(fact.rank, _OOM + quoted(fact.said or named))


@advice.register
def _(fact: memory.OomKill, job_id: str = "JOB") -> str:
    if fact.used_bytes is None:
        return _OOM_ADVICE
    return (
        "set resources_per_worker.memory to what each rank needs, so that no more ranks are placed on a machine than fit, or"
        " use a smaller batch, fewer data loader workers or less prefetching"
    )


@sentence.register
def _(fact: memory.OomCount) -> str:
    count = f"cgroup: oom_kill rose from {fact.before} to {fact.count} in {fact.path}"
    return of_rank(fact.rank, f"{_OOM} ({count})")


@advice.register
def _(fact: memory.OomCount, job_id: str = "JOB") -> str:
    return _OOM_ADVICE


@sentence.register
def _(fact: memory.KernelMessage) -> str:
    return of_rank(fact.rank, f"kernel: {fact.said}")


# -- GPUs


@sentence.register
def _(fact: gpus.Xid) -> str:
    subject = f"gpu {fact.gpu_uuid}" if fact.gpu_uuid else f"gpu at PCI {fact.bus_id}" if fact.bus_id else "its GPU"
    before = f", {fact.seconds_before:.0f} s before" if fact.seconds_before is not None else ""
    line = f"kernel: {fact.said[:CUT]}" if fact.said else f"{subject}: Xid {fact.number}{before}"
    return line if fact.rank is None else of_rank(fact.rank, f"{_XID_MEANS[fact.code]} ({line})")


@sentence.register
def _(fact: gpus.GpuLost) -> str:
    if fact.rank is None:
        return "the driver no longer has this GPU; reset it or restart the node"
    known = f"gpu {fact.gpu_uuid}: the driver no longer has this GPU" if fact.gpu_uuid else ""
    return of_rank(fact.rank, f"its GPU went away{quoted(fact.said or known)}")


@sentence.register
def _(fact: gpus.GpuEcc) -> str:
    errors = f"{plural(fact.errors, 'error')} that it cannot" if fact.errors > 1 else "an error that it cannot"
    return of_rank(fact.rank, f"its GPU's memory has {errors} correct{quoted(fact.said)}")


@advice.register(gpus.Xid)
@advice.register(gpus.GpuLost)
@advice.register(gpus.GpuEcc)
def _(fact: gpus.GpuFault, job_id: str = "JOB") -> str:
    return _XID_ADVICE[fact.code]


@sentence.register
def _(fact: gpus.GpuSilent) -> str:
    return "its exporter does not answer; it is restarted by itself"


@sentence.register
def _(fact: gpus.GpuFailing) -> str:
    return fact.said or "its driver answers with an error"


@sentence.register
def _(fact: gpus.Quarantined) -> str:
    return f"quarantined: {sentence(fact.cause)}"


# -- gangs and nodes


@sentence.register
def _(fact: gangs.ActorLost) -> str:
    return of_rank(fact.rank, "its actor died")


@sentence.register
def _(fact: gangs.ActorMissing) -> str:
    return f"the actor of rank {fact.rank} is gone"


@sentence.register
def _(fact: gangs.ResourcesTaken) -> str:
    return "other users of the Ray cluster hold the resources planned for its gang"


@sentence.register
def _(fact: gangs.NodeLost) -> str:
    if fact.rank is None:
        return f"node {fact.node[:12]} is gone" if fact.node else "a node that it was to run on is gone"
    return of_rank(fact.rank, "its node died")


@sentence.register
def _(fact: gangs.HeadLost) -> str:
    return "Ray's head died"


@sentence.register
def _(fact: gangs.EnvironmentFailed) -> str:
    return f"runtime_env could not be installed for rank {fact.rank}: {fact.said}"


@sentence.register
def _(fact: gangs.ActorNotPlaced) -> str:
    return f"rank {fact.rank} could not be placed: {fact.said}"


@sentence.register
def _(fact: gangs.StorageUnseen) -> str:
    return of_rank(
        fact.rank,
        f"node {fact.node[:12]} does not see checkpoint.storage_path ({fact.storage_path}), so what is saved there would be"
        " lost with it; mount the directory there, or drain the node",
    )


@sentence.register
def _(fact: gangs.FilesNotSent) -> str:
    return of_rank(
        fact.rank,
        f"the working copy could not be written to node {fact.host or fact.node[:12]} ({fact.said}); make room there, or drain the node",
    )


@sentence.register
def _(fact: gangs.RecordRestored) -> str:
    upto = "" if fact.attempt is None else f", up to attempt {fact.attempt}"
    return f"the store was restored from an older copy: what runs of later attempts is ended{upto}"


@sentence.register
def _(fact: gangs.StoppedUnplaced) -> str:
    return "it was stopped before its gang was placed"


@sentence.register
def _(fact: gangs.StartupTimeout) -> str:
    limit = format_duration(timedelta(seconds=fact.limit_seconds))
    return f"its ranks did not come up within health.startup_timeout ({limit})"


@sentence.register
def _(fact: gangs.MaxDuration) -> str:
    return f"exceeded max_duration ({format_duration(timedelta(seconds=fact.limit_seconds))})"


@sentence.register
def _(fact: nodes.RepeatedFailures) -> str:
    return f"{fact.failures} failures began here, the last: {fact.job_id}, {sentence(fact.cause)}"


@sentence.register
def _(fact: nodes.HealthCheckFailed) -> str:
    return f"its health check failed: {'; '.join(map(sentence, fact.problems))}"


@sentence.register
def _(fact: nodes.DiskDamaged) -> str:
    return f"the disk under {fact.path} does not keep what is written"


@sentence.register
def _(fact: nodes.DiskUnwritable) -> str:
    return f"nothing can be written to {fact.path}" + (f": {fact.said}" if fact.said else "")


@sentence.register
def _(fact: nodes.DeviceWrong) -> str:
    off = f" (off by {fact.off:g})" if fact.off is not None else ""
    return f"{fact.device} {'reduces' if fact.operation == 'reduce' else 'multiplies'} wrongly{off}"


@sentence.register
def _(fact: nodes.DevicesSilent) -> str:
    return f"its devices did not compute within {fact.seconds:g} s"


@sentence.register
def _(fact: nodes.DevicesFailed) -> str:
    return f"its devices do not compute: {fact.said[:CUT]}"


@sentence.register
def _(fact: nodes.DriverProblem) -> str:
    return fact.said


@sentence.register
def _(fact: nodes.CheckFailed) -> str:
    if fact.seconds is not None:
        return f"its check took longer than {fact.seconds:g} s"
    return f"its check did not end: {fact.said}" if fact.said else "its agent does not answer"
