"""Sentences about a job's reasons and notes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from orchestrator.core.facts import notes, reasons, requesters
from orchestrator.core.facts.nodes import Closure, NodeClosed
from orchestrator.core.sentences.base import sentence
from orchestrator.core.states import EndCondition, StopPurpose
from orchestrator.units import plural

if TYPE_CHECKING:
    from orchestrator.core.facts.fact import Fact

RAYLET_SILENT: Final = "its raylet does not answer; Ray has not declared it dead yet"


@sentence.register
def _(fact: reasons.Queued) -> str:
    return "waiting to be placed"


@sentence.register
def _(fact: reasons.PlacingGang) -> str:
    return "placing the gang"


@sentence.register
def _(fact: reasons.StartingRanks) -> str:
    return "starting the ranks again" if fact.again else "starting the ranks"


@sentence.register
def _(fact: reasons.RanksUp) -> str:
    return "every rank is up"


@sentence.register
def _(fact: reasons.RanksSucceeded) -> str:
    return "every rank ended with 0; releasing the GPUs" if fact.releasing else "every rank ended with exit code 0"


@sentence.register
def _(fact: reasons.CollectingFiles) -> str:
    return f"{sentence(fact.cause)}; copying its logs and outputs, its GPUs are free"


_STOPS: Final = {
    StopPurpose.CANCEL: "cancelled by {by}",
    StopPurpose.PAUSE: "paused by {by}",
    StopPurpose.PREEMPT: "making room {by}",
    StopPurpose.TIMEOUT: "exceeded max_duration",
    StopPurpose.RESIZE: "stopped by {by}",
}


@sentence.register
def _(fact: reasons.StopOrdered) -> str:
    by = _room(fact.by) if fact.purpose is StopPurpose.PREEMPT else sentence(fact.by)
    time = "are killed" if fact.at_once else "have time to save"
    return f"{_STOPS[fact.purpose].format(by=by)}; its processes {time}"


@sentence.register
def _(fact: reasons.Cancelled) -> str:
    if isinstance(fact.by, requesters.ByPruner):
        value = "not finite" if fact.by.value is None else f"{fact.by.value:.6g}, worse than the median of the trials"
        return f"pruned at step {fact.by.step}: {fact.by.metric} was {value}"
    return f"cancelled by {sentence(fact.by)}"


@sentence.register
def _(fact: reasons.Paused) -> str:
    if isinstance(fact.by, requesters.ByHold):
        return f"held by {fact.by.name}; `orch release` puts it into the queue"
    return f"paused by {sentence(fact.by)}"


@sentence.register
def _(fact: reasons.Resumed) -> str:
    return f"resumed by {fact.by}"


@sentence.register
def _(fact: reasons.MadeRoom) -> str:
    return f"stopped to make room {_room(fact.by)}"


def _room(by: Fact) -> str:
    """Return the job for which, or the cause for which, a job makes room."""
    for_a_job = isinstance(by, requesters.ByPreemption | requesters.ByTimeSharing | requesters.ByIdleReclaim)
    return sentence(by) if for_a_job else f"({sentence(by)})"


@sentence.register
def _(fact: requesters.ByUser) -> str:
    return fact.name


@sentence.register
def _(fact: requesters.ByForce) -> str:
    return f"{fact.name} by force: nothing has confirmed that its ranks have ended"


@sentence.register
def _(fact: requesters.ByGrowth) -> str:
    return f"the scheduler, to run on {fact.ranks} ranks instead of {fact.instead_of}"


@sentence.register
def _(fact: requesters.ByShrinking) -> str:
    return f"the scheduler, to run on {plural(fact.ranks, 'rank')} instead of {fact.instead_of}: {fact.job} waits for the rest"


@sentence.register
def _(fact: requesters.ByPreemption) -> str:
    return f"for {fact.job}, priority {fact.priority}"


@sentence.register
def _(fact: requesters.ByTimeSharing) -> str:
    why = "has waited for too long" if fact.overdue else "is expected to need less time"
    return f"for {fact.job}, which {why}"


@sentence.register
def _(fact: requesters.ByNodeDrain) -> str:
    return f"{fact.name} drains its node"


@sentence.register
def _(fact: requesters.ByShutdown) -> str:
    return "orch down --stop-jobs"


@sentence.register
def _(fact: requesters.ByLimit) -> str:
    return f"its limit {fact.key}"


@sentence.register
def _(fact: reasons.PlacedAnew) -> str:
    return f"to be placed again: {'lost its gang' if fact.cause is None else sentence(fact.cause)}"


@sentence.register
def _(fact: reasons.OthersAsked) -> str:
    return f"{sentence(fact.cause)}; the other ranks are asked to stop"


@sentence.register
def _(fact: reasons.NoRoom) -> str:
    return f"no room for {plural(fact.ranks, 'rank')} any more: {sentence(fact.cause)}"


@sentence.register
def _(fact: reasons.BackingOff) -> str:
    return f"tried again in {fact.seconds:.0f} s ({sentence(fact.cause)})"


A_LITTLE_OF_A_CPU: Final = 0.01


def _demand(gpus: float, cpus: float) -> str:
    # Ray reserves a thousandth of a CPU for each rank with ``cpu: 0``.
    some = plural(cpus, "CPU") if cpus >= A_LITTLE_OF_A_CPU or not cpus else "a CPU that is not fully reserved (cpu: 0)"
    return " and ".join([*([plural(gpus, "GPU")] if gpus else []), some])


@sentence.register
def _(fact: reasons.DoesNotFit) -> str:
    return f"does not fit on the nodes there are, even when they are empty: {_demand(fact.gpus, fact.cpus)}"


@sentence.register
def _(fact: reasons.AwaitsNodes) -> str:
    names, many = ", ".join(fact.nodes), len(fact.nodes) > 1
    there = f"node{'s' if many else ''} {names}, which {'are' if many else 'is'} down"
    return f"waiting for {there}; the nodes that are up cannot hold {_demand(fact.gpus, fact.cpus)}"


@sentence.register
def _(fact: reasons.NotEnoughFree) -> str:
    free = f"{plural(fact.free_gpus, 'GPU')}, {plural(fact.free_cpus, 'CPU')}"
    where = f" on nodes with {', '.join(fact.labels)}" if fact.labels else ""
    everywhere = " on all nodes" if fact.labels else ""
    kept = "".join(f"; {sentence(each)}" for each in fact.reserved)
    return (
        f"waiting for {_demand(fact.gpus, fact.cpus)}{where}; free now{everywhere}: {free}{_closed(fact.closed)}{kept}"
    )


def _closed(nodes: tuple[Fact, ...]) -> str:
    """Return the clauses about nodes that would suit if they took new ranks, one for each state."""
    by_state: dict[Closure, list[str]] = {}
    for each in nodes:
        if isinstance(each, NodeClosed):
            by_state.setdefault(each.state, []).append(each.node)
    return "".join(
        f"; {'node' if len(names) == 1 else 'nodes'} {', '.join(names)} {'is' if len(names) == 1 else 'are'} {state.value}"
        for state, names in by_state.items()
    )


@sentence.register
def _(fact: NodeClosed) -> str:
    return f"node {fact.node} is {fact.state.value}"


@sentence.register
def _(fact: reasons.NoNodeWithLabels) -> str:
    one = len(fact.labels) == 1
    none = f"no node has {'this label' if one else 'all of these labels'}; `orch nodes label` sets {'it' if one else 'them'}"
    return f"waiting for a node with {', '.join(fact.labels)}: {none}"


@sentence.register
def _(fact: reasons.QueueAtMaximum) -> str:
    maximum = plural(fact.maximum, "GPU")
    if fact.used >= fact.maximum:
        return f"queue {fact.queue} is at its maximum of {maximum}"
    return f"queue {fact.queue} holds {fact.used:g} of its maximum of {maximum}, and the job needs {fact.gpus:g}"


@sentence.register
def _(fact: reasons.UserAtLimit) -> str:
    if not fact.gpus:
        return f"user {fact.user} has {plural(fact.used, 'job')} running, the limit of a user is {fact.limit}"
    return (
        f"user {fact.user} holds {plural(fact.used, 'GPU')}, the job needs {fact.gpus:g}, and the limit of a user is"
        f" {fact.limit}"
    )


_ENDS: Final = {EndCondition.SUCCESS: "to succeed", EndCondition.FAILURE: "to fail", EndCondition.ANY: "to end"}


@sentence.register
def _(fact: reasons.AwaitsJob) -> str:
    more = f", and for {plural(fact.more, 'other job')}" if fact.more else ""
    return f"waiting for {fact.job} ({fact.state}) {_ENDS[fact.on]}{more}"


@sentence.register
def _(fact: reasons.PrerequisiteUnmet) -> str:
    return f"depends on {fact.job} {_ENDS[fact.on]}, which ended {fact.state}"


@sentence.register
def _(fact: reasons.PrerequisiteGone) -> str:
    return f"depends on {fact.job} {_ENDS[fact.on]}, whose record was removed"


@sentence.register
def _(fact: reasons.AwaitsRoom) -> str:
    return f"waiting until {', '.join(fact.jobs)} {'has' if len(fact.jobs) == 1 else 'have'} stopped to make room"


@sentence.register
def _(fact: reasons.LogPolicyFails) -> str:
    return "a log policy requires it to fail"


@sentence.register
def _(fact: reasons.BudgetSpent) -> str:
    return f"{fact.used} of {fact.budget} {fact.failure_class} restarts used"


@sentence.register
def _(fact: reasons.NoNewCheckpoint) -> str:
    return f"{plural(fact.restarts, 'restart')} in a row brought no newer checkpoint (retry.max_no_progress)"


@sentence.register
def _(fact: reasons.NotRetried) -> str:
    return f"{sentence(fact.cause)}; not tried again: {sentence(fact.refusal)}"


# -- notes


@sentence.register
def _(fact: notes.RankUnreachable) -> str:
    return f"rank {fact.rank} is out of reach: {fact.said}"


@sentence.register
def _(fact: notes.NodeUnreachable) -> str:
    return f"the node of rank {fact.rank}: {RAYLET_SILENT}"


@sentence.register
def _(fact: notes.Reachable) -> str:
    return "every rank's node answers again" if fact.rank is None else f"rank {fact.rank} is within reach again"


@sentence.register
def _(fact: notes.ActorEnded) -> str:
    return f"the actor of rank {fact.rank} did not answer and was ended"


@sentence.register(notes.OutputsIncomplete)
@sentence.register(notes.SaveFailed)
@sentence.register(notes.CheckpointQuarantined)
@sentence.register(notes.CheckpointFileNote)
@sentence.register(notes.SnapshotsOff)
def _(fact: notes.SaveFailed) -> str:
    return fact.said


@sentence.register
def _(fact: notes.StartedCold) -> str:
    return f"rank {fact.rank} began in a fresh interpreter, which takes seconds longer: {fact.said}"


@sentence.register
def _(fact: notes.UnusableRecord) -> str:
    return f"the exit record of rank {fact.rank} is left out: {fact.said}"


@sentence.register
def _(fact: notes.UnusableValues) -> str:
    fields = ", ".join(fact.fields)
    return f"rank {fact.rank} reports values that cannot be used (wrong type, not finite, out of range): {fields}"


@sentence.register
def _(fact: notes.UnusableStatus) -> str:
    return f"the status of a snapshot is left out: unusable {', '.join(fact.fields)}"


@sentence.register
def _(fact: notes.ReportLeftOut) -> str:
    return f"rank {fact.rank}: {fact.part} is left out: {fact.error_type}"


@sentence.register
def _(fact: notes.SaveInterval) -> str:
    return f"checkpoint.interval auto: saves {fact.said}"


@sentence.register
def _(fact: notes.SnapshotMemory) -> str:
    return (
        f"the snapshots of a rank take {fact.snapshot_bytes / 1e9:.1f} GB of memory beside the script, and the job asks for"
        f" {fact.asked_bytes / 1e9:.1f} GB in all; ask for more with resources_per_worker.memory"
    )


@sentence.register
def _(fact: notes.StorageBacklog) -> str:
    return (
        f"training has waited {fact.waited_seconds:.1f} s for storage, in {plural(fact.saves, 'save')}: each checkpoint that"
        " the job asks for is written before a third one is begun; a longer checkpoint.interval, or interval: auto, waits less"
    )


@sentence.register
def _(fact: notes.CheckpointsLeftOut) -> str:
    count = f"{fact.checkpoints} checkpoint{' is' if fact.checkpoints == 1 else 's are'}"
    return (
        f"{count} not on storage, which failed while the job trained on; the newest of them is that of step {fact.step}"
    )


@sentence.register
def _(fact: notes.RecordRepaired) -> str:
    return f"its stored record held unusable values, which are left out: {', '.join(fact.fields)}"


@sentence.register
def _(fact: notes.DroppedFact) -> str:
    why = f"unusable {', '.join(fact.fields)}" if fact.fields else fact.error_type
    return f"a fact was left out: {fact.event} ({why})"


@sentence.register
def _(fact: notes.LastOfItsKind) -> str:
    return f"{sentence(fact.note)} (the last of {fact.most} notes of this kind; more are left out)"


@sentence.register
def _(fact: notes.PoliciesLeftOut) -> str:
    if fact.seconds is not None and not fact.pattern:
        return f"the log policies were not searched for: no processor was free for that within {fact.seconds:g} s"
    if fact.seconds is not None:
        took = f"took longer than {fact.seconds:g} s to search for and was left out: simplify it"
        return f"the log policy {fact.pattern!r} {took}"
    return "the log policies could not be searched for" + (f": {fact.said}" if fact.said else "")
