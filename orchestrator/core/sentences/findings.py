"""Sentences about findings: what is wrong, with its figures, and what to do about it. The same words everywhere."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from orchestrator.core.diagnosis.definitions import severity_of
from orchestrator.core.facts import findings as f
from orchestrator.core.facts.codec import fact_to_dict
from orchestrator.core.sentences.base import advice, plural, quoted, sentence
from orchestrator.core.sentences.machines import size
from orchestrator.spec.units import format_duration

_THROTTLE_ADVICE: Final = {
    "power_cap": "raise the power limit (`nvidia-smi -pl`), or give every GPU the same limit",
    "thermal": "check the airflow and the temperature of this GPU's neighbours",
    "hardware_thermal": "check the cooler and the airflow at once: the hardware protects itself",
    "hardware_slowdown": "check cooling and power supply: the hardware protects itself",
    "power_brake": "check the power supply: it asked the GPU to slow down",
    "current": "check the power supply and its cables",
    "reliability": "the voltage limit is reached: lower the clocks of the other GPUs, or accept it",
}
_COMPARE: Final = "compare its share of the data, its input pipeline and its host's load with another rank's"


def runbook(finding: f.Finding) -> str:
    """Where the documentation speaks of this kind of finding."""
    return f"docs/diagnosis.md#{finding.kind}"


def finding_to_dict(finding: f.Finding, job_id: str) -> dict[str, Any]:
    """The finding for programs and people: its fact, its words, and where more is said."""
    return {
        "kind": finding.kind,
        "severity": severity_of(finding).value,
        "confidence": finding.confidence.value,
        "rank": finding.rank,
        "gpu_uuid": finding.gpu_uuid,
        "node": finding.node,
        "since": finding.since,
        "sentence": sentence(finding),
        "advice": advice(finding, job_id),
        "runbook": runbook(finding),
        "fact": fact_to_dict(finding),
    }


def _gpu(fact: f.Finding) -> str:
    of = f" of rank {fact.rank}" if fact.rank is not None else ""
    return f"the GPU{of}" + (f" ({fact.gpu_uuid})" if fact.gpu_uuid else "")


def _rank(fact: f.Finding) -> str:
    return "every rank" if fact.rank is None else f"rank {fact.rank}"


def _span(seconds: float) -> str:
    return format_duration(timedelta(seconds=round(seconds)))


# -- GPUs


@sentence.register
def _(fact: f.GpuIdle) -> str:
    return f"{_gpu(fact)} is {fact.utilization:.0%} busy, and the job's others {fact.usual_utilization:.0%}"


@advice.register
def _(fact: f.GpuIdle, job_id: str = "JOB") -> str:
    return (
        "check that this rank moves its model and its data to its GPU (`cuda:{LOCAL_RANK}`) and that the job needs so"
        f" many GPUs; `orch stacks {job_id}` shows where the rank is"
    )


@sentence.register
def _(fact: f.GpuSlow) -> str:
    return (
        f"{_gpu(fact)} runs at {fact.hertz / 1e6:.0f} MHz, and the job's others of its model at"
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
    return f"{_gpu(fact)} holds its clocks down for {reasons}, {min(fact.share, 1.0):.0%} of the time"


@advice.register
def _(fact: f.GpuThrottled, job_id: str = "JOB") -> str:
    known = [_THROTTLE_ADVICE[reason] for reason in fact.reasons if reason in _THROTTLE_ADVICE]
    return known[0] if known else "see `nvidia-smi -q -d PERFORMANCE` on its node"


@sentence.register
def _(fact: f.GpuShared) -> str:
    pids = ", ".join(map(str, fact.pids))
    what = "a process that belongs" if len(fact.pids) == 1 else "processes that belong"
    return f"{what} to no job here use{'s' if len(fact.pids) == 1 else ''} {_gpu(fact)}: {pids}"


@advice.register
def _(fact: f.GpuShared, job_id: str = "JOB") -> str:
    node = fact.node or "its node"
    return f"find its owner on {node} (`ps -o user,pid,cmd -p PID`), and stop it or cordon the node"


@sentence.register
def _(fact: f.GpuFaulty) -> str:
    return f"{_gpu(fact)} reports an error: {sentence(fact.fault)}"


@advice.register
def _(fact: f.GpuFaulty, job_id: str = "JOB") -> str:
    return advice(fact.fault, job_id) or "see `orch gpus` and the kernel's log on its node"


@sentence.register
def _(fact: f.ExporterSilent) -> str:
    return f"the exporter of {_gpu(fact)} does not answer: nothing is known of this GPU"


@advice.register
def _(fact: f.ExporterSilent, job_id: str = "JOB") -> str:
    return "orch replaces the exporter; where that does not help, the driver hangs: see `nvidia-smi` on its node"


@sentence.register
def _(fact: f.GpuMemoryGrowing) -> str:
    return (
        f"the memory used on {_gpu(fact)} grows by {size(round(fact.bytes_per_second * 60.0))} a minute: of"
        f" {size(round(fact.total_bytes))} it uses {size(round(fact.used_bytes))}, and is full in"
        f" about {_span(fact.seconds_left)}"
    )


@advice.register
def _(fact: f.GpuMemoryGrowing, job_id: str = "JOB") -> str:
    return (
        "look for tensors that are kept from step to step (a sum of losses without `.item()`, lists of outputs);"
        " `torch.cuda.memory_summary()` shows whether they or the allocator's cache grow"
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


# -- ranks


@sentence.register
def _(fact: f.RankSlow) -> str:
    times = f"{fact.seconds:.3g} s against {fact.usual_seconds:.3g} s"
    if fact.awaited:
        return (
            f"{_rank(fact)} takes {fact.factor:.1f} times as long for its part of a step as the others ({times}), and they"
            " wait for it"
        )
    return f"{_rank(fact)} takes {fact.factor:.1f} times as long for a step as the others ({times})"


@advice.register
def _(fact: f.RankSlow, job_id: str = "JOB") -> str:
    rank = f" --rank {fact.rank}" if fact.rank is not None else ""
    return f"{_COMPARE}; `orch profile {job_id}{rank}` shows where its time goes"


@sentence.register
def _(fact: f.RankAwaited) -> str:
    return (
        f"all GPUs are busy, but {_gpu(fact)} draws {fact.watts:.0f} W and the others about {fact.usual_watts:.0f} W: they"
        " probably spin in a collective, waiting for it"
    )


@advice.register
def _(fact: f.RankAwaited, job_id: str = "JOB") -> str:
    return f"{_COMPARE}; step times that the script reports (`context().report`) say by how much it is slower"


@sentence.register
def _(fact: f.InputStarved) -> str:
    return f"{_rank(fact)} waits for its next batch for {min(fact.share, 1.0):.0%} of a step"


@advice.register
def _(fact: f.InputStarved, job_id: str = "JOB") -> str:
    if fact.rank is None:
        return "give the data loaders more workers, prefetching and pinned memory, or put the data on a faster disk"
    return "compare this rank's data loader, its host's load and its disk with another rank's"


@sentence.register(f.RankStopped)
@sentence.register(f.NoStep)
def _(fact: f.NoStep) -> str:
    return f"{sentence(fact.late)}; {sentence(fact.seen)}"


@advice.register
def _(fact: f.RankStopped, job_id: str = "JOB") -> str:
    return f"`kill -CONT {fact.seen.pid}` on its node lets it go on" if fact.seen.pid else "end the debugger's session"


@advice.register
def _(fact: f.NoStep, job_id: str = "JOB") -> str:
    return f"`orch stacks {job_id}` shows where every rank stands; health.heartbeat_timeout ends a job that is still"


# -- the whole job


@sentence.register
def _(fact: f.LossNotFinite) -> str:
    return f"{fact.metric} is {fact.value}: the model has diverged, and every further step is lost"


@advice.register
def _(fact: f.LossNotFinite, job_id: str = "JOB") -> str:
    return (
        "cancel it and go back to a checkpoint from before"
        f" (`orch checkpoints {job_id}`, `orch submit --resume-from {job_id}@STEP`), with a lower learning rate, gradient"
        " clipping or bf16 instead of fp16"
    )


@sentence.register
def _(fact: f.LossFlat) -> str:
    return f"{fact.metric} is {fact.value:g}, the same to the last bit, for {plural(fact.steps, 'step')}"


@advice.register
def _(fact: f.LossFlat, job_id: str = "JOB") -> str:
    return "check that the optimizer has the model's parameters, that gradients reach them, and that the batch changes"


@sentence.register
def _(fact: f.SavesFailing) -> str:
    return f"checkpoints do not reach storage: {plural(fact.failures, 'save')} failed{quoted(fact.said)}"


@advice.register
def _(fact: f.SavesFailing, job_id: str = "JOB") -> str:
    return f"free or repair checkpoint.storage_path; until then a restart begins at the newest of `orch checkpoints {job_id}`"


@sentence.register
def _(fact: f.SavesRare) -> str:
    meant = f", where {_span(fact.interval_seconds)} is meant" if fact.interval_seconds else ""
    return f"no checkpoint for {_span(fact.seconds)}{meant}: a failure now would lose that much work"


@advice.register
def _(fact: f.SavesRare, job_id: str = "JOB") -> str:
    if fact.interval_seconds:
        return "see whether saves wait for storage or fail (`orch events`), or lower checkpoint.interval"
    return "save with `context().save` or set checkpoint.watch, so that a restart does not begin at step 0"


@sentence.register
def _(fact: f.SavesSlow) -> str:
    share = fact.seconds / fact.interval_seconds if fact.interval_seconds else 1.0
    return (
        f"the newest save stalled training for {fact.seconds:.3g} s, and one is meant every"
        f" {_span(fact.interval_seconds)}: {min(share, 1.0):.0%} of the time"
    )


@advice.register
def _(fact: f.SavesSlow, job_id: str = "JOB") -> str:
    return (
        "save less often (checkpoint.interval: auto weighs a save against the work that a failure loses), or put"
        " checkpoint.storage_path on a faster disk"
    )


@sentence.register
def _(fact: f.RestartLoop) -> str:
    return f"{plural(fact.restarts, 'restart')} in {_span(fact.seconds)}, the last because {sentence(fact.cause)}"


@advice.register
def _(fact: f.RestartLoop, job_id: str = "JOB") -> str:
    return advice(fact.cause, job_id) or f"`orch events {job_id}` lists each failure; retry.max_restarts bounds them"


@sentence.register
def _(fact: f.JobIdle) -> str:
    count = "its GPU does" if fact.gpus == 1 else f"its {fact.gpus} GPUs do"
    return f"it is RUNNING, reports no step, and {count} nothing"


@advice.register
def _(fact: f.JobIdle, job_id: str = "JOB") -> str:
    return f"`orch stacks {job_id}` shows what it waits for; `orch cancel {job_id}` frees its GPUs"


@sentence.register
def _(fact: f.GpusUnused) -> str:
    return f"it makes steps, and {'its GPU does' if fact.gpus == 1 else f'its {fact.gpus} GPUs do'} nothing"


@advice.register
def _(fact: f.GpusUnused, job_id: str = "JOB") -> str:
    return (
        "check that the script moves its model and its data to the GPU (`cuda:{LOCAL_RANK}`) and that"
        " `torch.cuda.is_available()` is true; a job for processors asks for `gpu: 0`"
    )


# -- nodes


@sentence.register
def _(fact: f.NodeSlow) -> str:
    return (
        f"all {fact.ranks} ranks on node {fact.node} take {fact.factor:.1f} times as long for their part of a step as"
        " those on the other nodes"
    )


@advice.register
def _(fact: f.NodeSlow, job_id: str = "JOB") -> str:
    return (
        f"compare the load, the processor clocks and the storage of {fact.node} with another node's;"
        f" `orch nodes cordon {fact.node}` keeps new jobs away from it"
    )


@sentence.register
def _(fact: f.ClockSkewed) -> str:
    where = "ahead of" if fact.seconds > 0 else "behind"
    return f"the clock of node {fact.node} is {abs(fact.seconds):.0f} s {where} the daemon's"


@advice.register
def _(fact: f.ClockSkewed, job_id: str = "JOB") -> str:
    return f"synchronize the clocks (`chronyc tracking` or `timedatectl` on {fact.node} and on the daemon's node)"
