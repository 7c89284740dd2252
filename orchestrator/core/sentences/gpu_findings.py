"""Sentences about findings on GPUs and memory: what is wrong, with its figures, and what to do about it."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from orchestrator.core.facts import findings as f  # noqa: TC001  # singledispatch reads the annotations
from orchestrator.core.sentences.base import advice, sentence
from orchestrator.spec.units import format_duration
from orchestrator.units import plural, size

_THROTTLE_ADVICE: Final = {
    "power_cap": "raise the power limit (`nvidia-smi -pl`), or give every GPU the same limit",
    "thermal": "check the airflow and the temperature of this GPU's neighbours",
    "hardware_thermal": "check the cooler and the airflow at once: the hardware protects itself",
    "hardware_slowdown": "check cooling and power supply: the hardware protects itself",
    "power_brake": "check the power supply: it asked the GPU to slow down",
    "current": "check the power supply and its cables",
    "reliability": "the voltage limit is reached: lower the clocks of the other GPUs, or accept it",
}


def gpu_of(fact: f.Finding) -> str:
    """Return the GPU of a finding."""
    of = f" of rank {fact.rank}" if fact.rank is not None else ""
    return f"the GPU{of}" + (f" ({fact.gpu_uuid})" if fact.gpu_uuid else "")


def span_of(seconds: float) -> str:
    """Return seconds as users write durations."""
    return format_duration(timedelta(seconds=round(seconds)))


@sentence.register
def _(fact: f.GpuIdle) -> str:
    return f"{gpu_of(fact)} is {fact.utilization:.0%} busy, and the job's others {fact.usual_utilization:.0%}"


@advice.register
def _(fact: f.GpuIdle, job_id: str = "JOB") -> str:
    return (
        "check that this rank moves its model and its data to its GPU (`cuda:{LOCAL_RANK}`), that nothing else takes most of"
        f" its steps, and that the job needs so many GPUs; `orch stacks {job_id}` shows where the rank is"
    )


@sentence.register
def _(fact: f.GpuSlow) -> str:
    return (
        f"{gpu_of(fact)} runs at {fact.hertz / 1e6:.0f} MHz, and the job's others of its model at"
        f" {fact.usual_hertz / 1e6:.0f} MHz"
    )


@advice.register
def _(fact: f.GpuSlow, job_id: str = "JOB") -> str:
    return (
        "check its application clocks and its slot (`nvidia-smi -q -d CLOCK,PERFORMANCE`; `nvidia-smi -rgc` resets them),"
        " or cordon its node"
    )


@sentence.register
def _(fact: f.GpuThrottled) -> str:
    reasons = " and ".join(reason.replace("_", " ") for reason in fact.reasons) or "an unknown reason"
    return f"{gpu_of(fact)} holds its clocks down for {reasons}, {min(fact.share, 1.0):.0%} of the time"


@advice.register
def _(fact: f.GpuThrottled, job_id: str = "JOB") -> str:
    known = [_THROTTLE_ADVICE[reason] for reason in fact.reasons if reason in _THROTTLE_ADVICE]
    return known[0] if known else "see `nvidia-smi -q -d PERFORMANCE` on its node"


@sentence.register
def _(fact: f.GpuShared) -> str:
    pids = ", ".join(map(str, fact.pids))
    what = "a process that belongs" if len(fact.pids) == 1 else "processes that belong"
    return f"{what} to no job here use{'s' if len(fact.pids) == 1 else ''} {gpu_of(fact)}: {pids}"


@advice.register
def _(fact: f.GpuShared, job_id: str = "JOB") -> str:
    node = fact.node or "its node"
    return f"find its owner on {node} (`ps -o user,pid,cmd -p PID`), and stop it or cordon the node"


@sentence.register
def _(fact: f.GpuMemoryTaken) -> str:
    return (
        f"{size(round(fact.used_bytes - fact.own_bytes))} of {gpu_of(fact)} is used by no process that can be seen:"
        f" {size(round(fact.used_bytes))} of {size(round(fact.total_bytes))} is in use, and the job's processes use"
        f" {size(round(fact.own_bytes))}"
    )


@advice.register
def _(fact: f.GpuMemoryTaken, job_id: str = "JOB") -> str:
    node = fact.node or "its node"
    return (
        f"`nvidia-smi` on {node}, outside of containers, shows processes that are hidden here; where there is none, memory of a"
        " process that was killed is left (`fuser -v /dev/nvidia*`)"
    )


@sentence.register
def _(fact: f.GpuMemoryErrors) -> str:
    found = [f"has corrected {plural(fact.corrected, 'error')} of its memory in ten minutes"] if fact.corrected else []
    found += (
        [f"has replaced {plural(fact.remapped, 'row')} of its memory since the attempt began"] if fact.remapped else []
    )
    return f"{gpu_of(fact)} {' and '.join(found)}"


@advice.register
def _(fact: f.GpuMemoryErrors, job_id: str = "JOB") -> str:
    return (
        "results are right so far; reset the GPU when the job is over (`nvidia-smi --gpu-reset`), and have it replaced if the"
        " errors continue (`nvidia-smi -q -d ECC,ROW_REMAPPER`)"
    )


@sentence.register
def _(fact: f.GpuFaulty) -> str:
    return f"{gpu_of(fact)} reports an error: {sentence(fact.fault)}"


@advice.register
def _(fact: f.GpuFaulty, job_id: str = "JOB") -> str:
    return advice(fact.fault, job_id) or "see `orch gpus` and the kernel's log on its node"


@sentence.register
def _(fact: f.ExporterSilent) -> str:
    return f"the exporter of {gpu_of(fact)} does not answer: nothing is known of this GPU"


@advice.register
def _(fact: f.ExporterSilent, job_id: str = "JOB") -> str:
    return "orch replaces the exporter; where that does not help, the driver hangs: see `nvidia-smi` on its node"


@sentence.register
def _(fact: f.GpuMemoryGrowing) -> str:
    return (
        f"the memory used on {gpu_of(fact)} grows by {size(round(fact.bytes_per_second * 60.0))} a minute: of"
        f" {size(round(fact.total_bytes))} it uses {size(round(fact.used_bytes))}, and is full in"
        f" about {span_of(fact.seconds_left)}"
    )


@advice.register
def _(fact: f.GpuMemoryGrowing, job_id: str = "JOB") -> str:
    return (
        "look for tensors that are kept from step to step (a sum of losses without `.item()`, lists of outputs);"
        " `torch.cuda.memory_summary()` shows whether they or the allocator's cache grow"
    )


@sentence.register
def _(fact: f.HostMemoryGrowing) -> str:
    whose = "every rank's processes" if fact.rank is None else f"rank {fact.rank}'s processes"
    return (
        f"the memory of {whose} grows by {size(round(fact.bytes_per_second * 60.0))} a minute: of"
        f" {size(round(fact.limit_bytes))} they use {size(round(fact.used_bytes))}, and the kernel kills a rank in about"
        f" {span_of(fact.seconds_left)}"
    )


@advice.register
def _(fact: f.HostMemoryGrowing, job_id: str = "JOB") -> str:
    return (
        "look for lists that grow from step to step, datasets that cache what they read, and loader workers that copy"
        " their parent's objects; resources_per_worker.memory sets the limit"
    )


@sentence.register
def _(fact: f.LoadUneven) -> str:
    return f"the load differs between the job's GPUs (CV {fact.cv:.0%}), and nothing that is measured says why"


@advice.register
def _(fact: f.LoadUneven, job_id: str = "JOB") -> str:
    return (
        "check how the data is split over the ranks; a script that reports its steps (`context().report`) tells which"
        " rank the others wait for"
    )
