"""Sentences about findings: what is wrong, with its figures, and what to do about it; used by all interfaces.

Those about GPUs and memory are in ``gpu_findings.py``.
"""

from __future__ import annotations

from typing import Any, Final

from orchestrator.core.diagnosis.definitions import WAITING_SHARE, severity_of
from orchestrator.core.facts import findings as f
from orchestrator.core.facts.codec import fact_to_dict
from orchestrator.core.sentences.base import advice, quoted, sentence
from orchestrator.core.sentences.gpu_findings import gpu_of, span_of
from orchestrator.units import plural, size

_COMPARE: Final = "compare its share of the data, its input pipeline and its host's load with another rank's"


def runbook(finding: f.Finding) -> str:
    """Return the link to the documentation of this kind of finding."""
    return f"docs/diagnosis.md#{finding.kind}"


def linked(page: str, docs_url: str) -> str:
    """Return a runbook as an address below ``docs_url``, where docs/ is served; as it is without one."""
    return f"{docs_url}/{page.removeprefix('docs/')}" if docs_url and page.startswith("docs/") else page


def unmeasured_to_dict(finding: f.Finding, job_id: str) -> dict[str, Any]:
    """Return a finding that is open from before the daemon started, without its figures: they are those of its opening."""
    about = [
        *([] if finding.rank is None else [f"rank {finding.rank}"]),
        *([f"GPU {finding.gpu_uuid}"] if finding.gpu_uuid else []),
    ]
    subject = f" ({', '.join(about)})" if about else ""
    text = f"{finding.kind}{subject}: open since before the daemon started, and not measured again yet"
    return {**finding_to_dict(finding, job_id), "sentence": text, "advice": "", "fact": {"kind": finding.kind}}


def finding_to_dict(finding: f.Finding, job_id: str) -> dict[str, Any]:
    """Return the finding for programs and users: its fact, its words, and a link to more."""
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


def _option(fact: f.Finding) -> str:
    return f" --rank {fact.rank}" if fact.rank is not None else ""


def _rank(fact: f.Finding) -> str:
    return "every rank" if fact.rank is None else f"rank {fact.rank}"


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
    return f"{_COMPARE}; `orch profile {job_id}{_option(fact)}` shows where its time goes"


@sentence.register
def _(fact: f.RankAwaited) -> str:
    if fact.busy is not None and fact.usual_busy is not None:
        return (
            f"{_rank(fact)} uses {fact.busy:.2g} processors and the others about {fact.usual_busy:.2g}, which wait in locks"
            " meanwhile: they probably wait for it in a collective"
        )
    if fact.locked is not None and fact.usual_locked is not None:
        return (
            f"{_rank(fact)} waits in a lock for {fact.locked:.0%} of the time and the others for about {fact.usual_locked:.0%}:"
            " they probably wait for it in a collective, while it works, sleeps or waits for something else"
        )
    return (
        f"all GPUs are busy, but {gpu_of(fact)} draws {fact.watts:.0f} W and the others about {fact.usual_watts:.0f} W: they"
        " probably spin in a collective, waiting for it"
    )


@advice.register
def _(fact: f.RankAwaited, job_id: str = "JOB") -> str:
    if fact.locked is not None:
        return f"{_COMPARE}; `orch stacks {job_id}{_option(fact)}` shows where it is meanwhile"
    return f"{_COMPARE}; step times that the script reports (`context().report`) say by how much it is slower"


@sentence.register
def _(fact: f.InputStarved) -> str:
    if not fact.reported:
        return (
            f"{_rank(fact)} waits for a file, a pipe or the network for {min(fact.share, 1.0):.0%} of the time:"
            " probably for its next batch"
        )
    return f"{_rank(fact)} waits for its next batch for {min(fact.share, 1.0):.0%} of a step"


@advice.register
def _(fact: f.InputStarved, job_id: str = "JOB") -> str:
    if not fact.reported:
        return (
            f"`orch stacks {job_id}` shows what it waits for; for data, give the loaders more workers and prefetching, or a"
            " faster disk"
        )
    if fact.rank is None:
        return "give the data loaders more workers, prefetching and pinned memory, or put the data on a faster disk"
    return "compare this rank's data loader, its host's load and its disk with another rank's"


@sentence.register(f.RankStopped)
@sentence.register(f.WrongWorldSize)
@sentence.register(f.RendezvousIncomplete)
@sentence.register(f.NoStep)
def _(fact: f.NoStep) -> str:
    return f"{sentence(fact.late)}; {sentence(fact.seen)}"


@advice.register
def _(fact: f.RankStopped, job_id: str = "JOB") -> str:
    return f"`kill -CONT {fact.seen.pid}` on its node continues it" if fact.seen.pid else "end the debugger's session"


@sentence.register
def _(fact: f.RankAtBreakpoint) -> str:
    return f"{_rank(fact)} waits at a breakpoint"


@advice.register
def _(fact: f.RankAtBreakpoint, job_id: str = "JOB") -> str:
    return (
        f"`orch attach {job_id} --rank {fact.rank or 0}` opens its debugger; after 10 minutes with no client attached its"
        " input ends, and the debugger raises BdbQuit"
    )


@advice.register
def _(fact: f.WrongWorldSize, job_id: str = "JOB") -> str:
    return (
        "call init_process_group without world_size and rank, and leave WORLD_SIZE and RANK as they are; or ask for as many"
        " ranks (resources.num_workers)"
    )


@advice.register
def _(fact: f.RendezvousIncomplete, job_id: str = "JOB") -> str:
    if fact.rank is None:
        return "see whether the ranks' nodes reach each other (firewall, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
    return f"`orch stacks {job_id} --rank {fact.rank}` and `orch logs {job_id} --rank {fact.rank}` show what it does instead"


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
def _(fact: f.LossJumped) -> str:
    return f"{fact.metric} has jumped from about {fact.usual:.3g} to {fact.value:.3g}, and stays there"


@advice.register
def _(fact: f.LossJumped, job_id: str = "JOB") -> str:
    return (
        "look at what changed at that step (learning rate, data, a restart of the optimizer); if it does not come back, continue"
        f" from a checkpoint from before (`orch checkpoints {job_id}`, `orch submit --resume-from {job_id}@STEP`) with gradient"
        " clipping or a lower learning rate"
    )


@sentence.register
def _(fact: f.StorageFull) -> str:
    room = f"{size(fact.free_bytes)} free" if fact.free_bytes is not None else "no room"
    needs = f", and a checkpoint takes {size(fact.needed_bytes)}" if fact.needed_bytes else ""
    return f"the storage of checkpoints has {room}{needs}{quoted(fact.said)}"


@advice.register
def _(fact: f.StorageFull, job_id: str = "JOB") -> str:
    return (
        "free space below checkpoint.storage_path or lower checkpoint.keep; until then a restart begins at the newest of"
        f" `orch checkpoints {job_id}`"
    )


@sentence.register
def _(fact: f.StorageSlow) -> str:
    whose = "" if fact.rank is None else f" of rank {fact.rank}"
    if fact.share >= WAITING_SHARE:
        return f"training waits for the storage of checkpoints for {fact.share:.0%} of the time"
    usual = f", where {span_of(fact.usual_seconds)} is usual" if fact.usual_seconds is not None else ""
    taken = "has taken" if fact.busy else "took"
    return f"storage is slow: the newest write of a checkpoint{whose} {taken} {span_of(fact.seconds)}{usual}"


@advice.register
def _(fact: f.StorageSlow, job_id: str = "JOB") -> str:
    where = "its node" if fact.rank is not None else "the ranks' nodes"
    return (
        f"see what else writes to checkpoint.storage_path from {where} (`iostat -x`, `nfsiostat`), save less often"
        " (checkpoint.interval), or take a faster storage"
    )


@sentence.register
def _(fact: f.SavesFailing) -> str:
    return f"checkpoints do not reach storage: {plural(fact.failures, 'try', 'tries')} failed{quoted(fact.said)}"


@advice.register
def _(fact: f.SavesFailing, job_id: str = "JOB") -> str:
    return f"free or repair checkpoint.storage_path; until then a restart begins at the newest of `orch checkpoints {job_id}`"


@sentence.register
def _(fact: f.SavesRare) -> str:
    meant = f", although the interval is {span_of(fact.interval_seconds)}" if fact.interval_seconds else ""
    return f"no checkpoint for {span_of(fact.seconds)}{meant}: a failure now would lose that much work"


@advice.register
def _(fact: f.SavesRare, job_id: str = "JOB") -> str:
    if fact.interval_seconds:
        return "see whether saves wait for storage or fail (`orch events`), or lower checkpoint.interval"
    return "save with `context().save` or set checkpoint.watch, so that a restart does not begin at step 0"


@sentence.register
def _(fact: f.SavesSlow) -> str:
    share = fact.seconds / fact.interval_seconds if fact.interval_seconds else 1.0
    return (
        f"the newest save stalled training for {fact.seconds:.3g} s, and one is planned every"
        f" {span_of(fact.interval_seconds)}: {min(share, 1.0):.0%} of the time"
    )


@advice.register
def _(fact: f.SavesSlow, job_id: str = "JOB") -> str:
    return (
        "save less often (checkpoint.interval: auto weighs a save against the work that a failure loses), or put"
        " checkpoint.storage_path on a faster disk"
    )


@sentence.register
def _(fact: f.RestartLoop) -> str:
    newest = f"in {span_of(fact.seconds)}, the last because {sentence(fact.cause)}"
    if fact.total > fact.restarts:
        return f"{plural(fact.total, 'restart')}, the newest {fact.restarts} {newest}"
    return f"{plural(fact.restarts, 'restart')} {newest}"


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


# -- the daemon


@sentence.register
def _(fact: f.DaemonOverloaded) -> str:
    return f"the daemon's loop is {fact.late_seconds:.1f} s late: the figures of this job may be late by as much"


@advice.register
def _(fact: f.DaemonOverloaded, job_id: str = "JOB") -> str:
    return "see what uses the processors of the daemon's node (`top`), and keep ranks off some of them (resources_per_worker.cpu)"
