"""Findings of the diagnosis about a running job: one class for each kind, with its figures.

A finding is about a rank, a GPU, both, a node, or (with none of them) the whole job. ``core/diagnosis`` makes findings, events open and
close them, and ``docs/diagnosis.md`` has a section for each ``kind``. First come the facts about ranks that
make no progress, which findings, notes and failures hold.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar, Final

from orchestrator.core.codec import Integer, Number, Text, Time
from orchestrator.core.facts.fact import Fact, FactRecord, quoted
from orchestrator.core.thresholds import WAITING_SHARE
from orchestrator.units import duration, percent, plural, size


class Sign(StrEnum):
    """The result of the looks at a rank's processes."""

    STOPPED = "stopped"
    TRACED = "traced"
    WORKS = "works"
    OUTSIDE = "outside"
    UNKNOWN = "unknown"
    UNSEEN = "unseen"
    LOCK = "lock"
    SPINS = "spins"
    MISMATCH = "mismatch"
    COLLECTIVE = "collective"
    RENDEZVOUS = "rendezvous"
    WORLD_SIZE = "world_size"


class Stillness(FactRecord, tag="stillness"):
    """The activity of a rank without progress; ``rank`` None: all of them.

    ``place`` is its Python frame, ``pid`` its stopped process, ``collective`` what it waits in, and ``others`` the
    collectives that the other ranks wait in. ``said`` is the inspector's reason why nothing was seen. ``waits`` is what
    it waits for outside (``timer``, ``disk``). ``world_size`` is that of the process group that it sets up, in a job of
    ``num_ranks``. ``ended`` are the ranks that had ended with exit code 0 by then.
    """

    rank: Integer | None
    sign: Sign
    place: Text = ""
    pid: Integer | None = None
    collective: Text = ""
    others: tuple[Text, ...] = ()
    said: Text = ""
    waits: Text = ""
    world_size: Integer | None = None
    num_ranks: Integer | None = None
    ended: tuple[Integer, ...] = ()

    def sentence(self) -> str:
        whose = "every other rank" if self.ended else "every rank"
        ranks = f"{'rank' if len(self.ended) == 1 else 'ranks'} {', '.join(map(str, self.ended))}"
        ended = f"; {ranks} had ended with exit code 0" if self.ended else ""
        return f"{whose if self.rank is None else f'rank {self.rank}'} {_activity(self)}{ended}"


class Lateness(FactRecord, tag="lateness"):
    """Time without a step of any rank, and the typical time; ``by_steps`` is False where only other progress is known."""

    still_seconds: Number
    usual_seconds: Number | None = None
    by_steps: bool = True

    def sentence(self) -> str:
        if not self.by_steps:
            return f"no sign of life for {duration(self.still_seconds)}"
        usual = f", where {duration(self.usual_seconds)} is usual" if self.usual_seconds is not None else ""
        return f"no step for {duration(self.still_seconds)}{usual}"


class Hang(FactRecord, tag="hang"):
    """No rank can continue. ``ignored``: no action follows, by health.on_hang."""

    seen: Stillness
    late: Lateness
    attempt: Integer
    ignored: bool = False

    def sentence(self) -> str:
        ignored = "; no action is taken (health.on_hang: notify)" if self.ignored else ""
        return f"{self.seen.sentence()}; {self.late.sentence()}{ignored}"

    def advice(self, job_id: str = "JOB") -> str:
        if self.ignored:
            return f"see `orch stacks {job_id}`"
        where = f" --rank {self.seen.rank}" if self.seen.rank is not None else ""
        return f"every rank's stacks are at the end of its log: orch logs {job_id}{where} --attempt {self.attempt}"


class Slow(FactRecord, tag="slow"):
    """The job has made no step for long, and may continue."""

    seen: Stillness
    late: Lateness

    def sentence(self) -> str:
        return f"{self.late.sentence()}: {self.seen.sentence()}"

    def advice(self, job_id: str = "JOB") -> str:
        return f"see `orch stacks {job_id}`"


def _activity(fact: Stillness) -> str:
    match fact.sign:
        case Sign.STOPPED:
            return f"is stopped: its process {fact.pid} got a SIGSTOP and no SIGCONT"
        case Sign.TRACED:
            return f"is held by a debugger{_in(fact.place)}"
        case Sign.WORKS:
            return f"computes, or reads{_in(fact.place)}"
        case Sign.OUTSIDE:
            match fact.waits:
                case "timer":
                    return f"sleeps{_in(fact.place)}"
                case "disk":
                    return f"waits for a disk{_in(fact.place)}"
            return f"waits for a file, the network or a sleep{_in(fact.place)}"
        case Sign.UNKNOWN:
            return f"makes no step, and {fact.said or 'nothing shows what it waits for'}"
        case Sign.UNSEEN:
            return "could not be inspected"
        case Sign.LOCK:
            waiting = f" while others wait for it in {', '.join(fact.others)}" if fact.others else ""
            return f"waits in a lock that nothing releases, in {fact.place}{waiting}"
        case Sign.SPINS:
            return f"is busy and makes no progress{_in(fact.place)}"
        case Sign.MISMATCH:
            other = ", ".join(fact.others) or "a lock"
            return f"waits in {fact.collective or 'a lock'} while others wait in {other}: they wait for each other"
        case Sign.COLLECTIVE:
            return f"waits in {fact.collective or fact.place}, and nothing is exchanged"
        case Sign.RENDEZVOUS if fact.rank is None:
            return "waits in init_process_group, and the process group does not form"
        case Sign.RENDEZVOUS:
            return f"does not enter init_process_group{_in(fact.place)}, and the others wait for it there"
        case Sign.WORLD_SIZE:
            ranks = "1 rank" if fact.num_ranks == 1 else f"{fact.num_ranks} ranks"
            return f"waits in init_process_group for {fact.world_size} ranks, and the job has {ranks}"


def _in(place: str) -> str:
    return f", in {place}" if place else ""


_COMPARE: Final = "compare its share of the data, its input pipeline and its host's load with another rank's"

_THROTTLE_ADVICE: Final = {
    "power_cap": "raise the power limit (`nvidia-smi -pl`), or give every GPU the same limit",
    "thermal": "check the airflow and the temperature of this GPU's neighbours",
    "hardware_thermal": "check the cooler and the airflow at once: the hardware protects itself",
    "hardware_slowdown": "check cooling and power supply: the hardware protects itself",
    "power_brake": "check the power supply: it asked the GPU to slow down",
    "current": "check the power supply and its cables",
    "reliability": "the voltage limit is reached: lower the clocks of the other GPUs, or accept it",
}


class Confidence(StrEnum):
    """Certainty of the figures."""

    CERTAIN = "certain"  # measured directly
    LIKELY = "likely"  # nothing else that is measured explains the figures
    POSSIBLE = "possible"  # other causes show the same figures; the advice says what tells them apart


class Severity(StrEnum):
    """Urgency of a finding for the user."""

    CRITICAL = "critical"  # the job gets nothing done, or will lose its work
    WARNING = "warning"  # the job is slower or less safe than it could be


class Finding(FactRecord):
    """Base of all findings. ``since`` is when the figures began to show it, in seconds since the epoch."""

    severity: ClassVar[Severity] = Severity.WARNING

    rank: Integer | None = None
    gpu_uuid: Text = ""
    node: Text = ""
    since: Time = 0.0
    confidence: Confidence = Confidence.LIKELY


FindingKey = tuple[str, int | None, str]


def key_of(finding: Finding) -> FindingKey:
    """Return the identity of a finding: kind and subject, which is a GPU, a rank, a node or the job."""
    node = finding.node if finding.rank is None else ""
    return finding.kind, finding.rank, finding.gpu_uuid or node


# -- GPUs


class GpuIdle(Finding, tag="gpu_idle"):
    """The GPU is idle while the job's others are busy (ratios of time)."""

    utilization: Number
    usual_utilization: Number

    def sentence(self) -> str:
        return f"{gpu_of(self)} is {percent(self.utilization)} busy, and the job's others {percent(self.usual_utilization)}"

    def advice(self, job_id: str = "JOB") -> str:
        return (
            "check that this rank moves its model and its data to its GPU (`cuda:{LOCAL_RANK}`), that nothing else takes most of"
            f" its steps, and that the job needs so many GPUs; `orch stacks {job_id}` shows where the rank is"
        )


class GpuSlow(Finding, tag="gpu_slow"):
    """The GPU's clock is below that of the job's others of the same model, for no reason that its driver reports."""

    todo: ClassVar[str] = (
        "check its application clocks and its slot (`nvidia-smi -q -d CLOCK,PERFORMANCE`; `nvidia-smi -rgc` resets them),"
        " or cordon its node"
    )

    hertz: Number
    usual_hertz: Number

    def sentence(self) -> str:
        return (
            f"{gpu_of(self)} runs at {self.hertz / 1e6:.0f} MHz, and the job's others of its model at"
            f" {self.usual_hertz / 1e6:.0f} MHz"
        )


class GpuThrottled(Finding, tag="gpu_throttled"):
    """The driver limits the GPU's clocks for ``reasons``, for this share of the time."""

    reasons: tuple[Text, ...]
    share: Number

    def sentence(self) -> str:
        reasons = " and ".join(reason.replace("_", " ") for reason in self.reasons) or "an unknown reason"
        return f"{gpu_of(self)} holds its clocks down for {reasons}, {percent(min(self.share, 1.0))} of the time"

    def advice(self, job_id: str = "JOB") -> str:
        known = [_THROTTLE_ADVICE[reason] for reason in self.reasons if reason in _THROTTLE_ADVICE]
        return known[0] if known else "see `nvidia-smi -q -d PERFORMANCE` on its node"


class GpuShared(Finding, tag="gpu_shared"):
    """Processes that belong to no job on the GPU use it."""

    pids: tuple[Integer, ...]

    def sentence(self) -> str:
        pids = ", ".join(map(str, self.pids))
        what = "a process that belongs" if len(self.pids) == 1 else "processes that belong"
        return f"{what} to no job here use{'s' if len(self.pids) == 1 else ''} {gpu_of(self)}: {pids}"

    def advice(self, job_id: str = "JOB") -> str:
        node = self.node or "its node"
        return f"find its owner on {node} (`ps -o user,pid,cmd -p PID`), and stop it or cordon the node"


class GpuMemoryTaken(Finding, tag="gpu_memory_taken"):
    """Memory of the GPU is used by no process of a job on it, and by none that can be seen."""

    used_bytes: Number
    own_bytes: Number
    total_bytes: Number

    def sentence(self) -> str:
        return (
            f"{size(self.used_bytes - self.own_bytes)} of {gpu_of(self)} is used by no process that can be seen:"
            f" {size(self.used_bytes)} of {size(self.total_bytes)} is in use, and the job's processes use"
            f" {size(self.own_bytes)}"
        )

    def advice(self, job_id: str = "JOB") -> str:
        node = self.node or "its node"
        return (
            f"`nvidia-smi` on {node}, outside of containers, shows processes that are hidden here; where there is none, memory of a"
            " process that was killed is left (`fuser -v /dev/nvidia*`)"
        )


class GpuMemoryErrors(Finding, tag="gpu_memory_errors"):
    """The GPU has corrected errors of its memory in the newest ten minutes, or has replaced rows of it since the attempt began."""

    todo: ClassVar[str] = (
        "results are right so far; reset the GPU when the job is over (`nvidia-smi --gpu-reset`), and have it replaced if the"
        " errors continue (`nvidia-smi -q -d ECC,ROW_REMAPPER`)"
    )

    corrected: Integer
    remapped: Integer

    def sentence(self) -> str:
        found = (
            [f"has corrected {plural(self.corrected, 'error')} of its memory in ten minutes"] if self.corrected else []
        )
        found += (
            [f"has replaced {plural(self.remapped, 'row')} of its memory since the attempt began"]
            if self.remapped
            else []
        )
        return f"{gpu_of(self)} {' and '.join(found)}"


class GpuFaulty(Finding, tag="gpu_fault"):
    """The GPU or its driver reports an error."""

    severity: ClassVar[Severity] = Severity.CRITICAL
    fault: Fact

    def sentence(self) -> str:
        return f"{gpu_of(self)} reports an error: {self.fault.sentence()}"

    def advice(self, job_id: str = "JOB") -> str:
        return self.fault.advice(job_id) or "see `orch gpus` and the kernel's log on its node"


class ExporterSilent(Finding, tag="exporter_silent"):
    """The GPU's exporter does not answer: the GPU's state is unknown."""

    todo: ClassVar[str] = (
        "orch replaces the exporter; where that does not help, the driver hangs: see `nvidia-smi` on its node"
    )

    def sentence(self) -> str:
        return f"the exporter of {gpu_of(self)} does not answer: nothing is known of this GPU"


class GpuMemoryGrowing(Finding, tag="gpu_memory_growing"):
    """The memory used on the GPU grows steadily, and reaches ``total_bytes`` in ``seconds_left``."""

    todo: ClassVar[str] = (
        "look for tensors that are kept from step to step (a sum of losses without `.item()`, lists of outputs);"
        " `torch.cuda.memory_summary()` shows whether they or the allocator's cache grow"
    )

    used_bytes: Number
    total_bytes: Number
    bytes_per_second: Number
    seconds_left: Number

    def sentence(self) -> str:
        return (
            f"the memory used on {gpu_of(self)} grows by {size(self.bytes_per_second * 60.0)} a minute: of"
            f" {size(self.total_bytes)} it uses {size(self.used_bytes)}, and is full in"
            f" about {duration(self.seconds_left)}"
        )


class LoadUneven(Finding, tag="load_uneven"):
    """Utilization or power differs between the job's GPUs, and no other figure explains it."""

    todo: ClassVar[str] = (
        "check how the data is split over the ranks; a script that reports its steps (`context().report`) tells which"
        " rank the others wait for"
    )

    cv: Number

    def sentence(self) -> str:
        return f"the load differs between the job's GPUs (CV {percent(self.cv)}), and nothing that is measured says why"


# -- ranks


class RankSlow(Finding, tag="rank_slow"):
    """The rank takes ``factor`` times as long for its own part of a step as the others usually do.

    ``awaited``: the others wait for it at every step; else their steps take less time than its own.
    """

    factor: Number
    seconds: Number
    usual_seconds: Number
    awaited: bool = True

    def sentence(self) -> str:
        times = f"{duration(self.seconds)} against {duration(self.usual_seconds)}"
        if self.awaited:
            return (
                f"{_rank(self)} takes {self.factor:.1f} times as long for its part of a step as the others ({times}), and they"
                " wait for it"
            )
        return f"{_rank(self)} takes {self.factor:.1f} times as long for a step as the others ({times})"

    def advice(self, job_id: str = "JOB") -> str:
        return f"{_COMPARE}; `orch profile {job_id}{_option(self)}` shows where its time goes"


class RankAwaited(Finding, tag="rank_awaited"):
    """All GPUs are busy, and this rank's draws more power than the others, which probably spin in a collective.

    Without GPUs: its processes use ``busy`` processors, and the others', which wait in locks, ``usual_busy``; or the others wait in
    locks for ``usual_locked`` of the time, and it for ``locked``.
    """

    watts: Number = 0.0
    usual_watts: Number = 0.0
    busy: Number | None = None
    usual_busy: Number | None = None
    locked: Number | None = None
    usual_locked: Number | None = None

    def sentence(self) -> str:
        if self.busy is not None and self.usual_busy is not None:
            return (
                f"{_rank(self)} uses {self.busy:.2g} processors and the others about {self.usual_busy:.2g}, which wait in locks"
                " meanwhile: they probably wait for it in a collective"
            )
        if self.locked is not None and self.usual_locked is not None:
            return (
                f"{_rank(self)} waits in a lock for {percent(self.locked)} of the time and the others for about {percent(self.usual_locked)}:"
                " they probably wait for it in a collective, while it works, sleeps or waits for something else"
            )
        return (
            f"all GPUs are busy, but {gpu_of(self)} draws {self.watts:.0f} W and the others about {self.usual_watts:.0f} W: they"
            " probably spin in a collective, waiting for it"
        )

    def advice(self, job_id: str = "JOB") -> str:
        if self.locked is not None:
            return f"{_COMPARE}; `orch stacks {job_id}{_option(self)}` shows where it is meanwhile"
        return f"{_COMPARE}; step times that the script reports (`context().report`) say by how much it is slower"


class InputStarved(Finding, tag="input_starved"):
    """The rank, or with None every rank, waits for its next batch for this share of a step.

    ``reported`` is False where the script does not report it: its training thread waits for a file, a pipe or the network for this share of the time.
    """

    share: Number
    reported: bool = True

    def sentence(self) -> str:
        if not self.reported:
            return (
                f"{_rank(self)} waits for a file, a pipe or the network for {percent(min(self.share, 1.0))} of the time:"
                " probably for its next batch"
            )
        return f"{_rank(self)} waits for its next batch for {percent(min(self.share, 1.0))} of a step"

    def advice(self, job_id: str = "JOB") -> str:
        if not self.reported:
            return (
                f"`orch stacks {job_id}` shows what it waits for; for data, give the loaders more workers and prefetching, or a"
                " faster disk"
            )
        if self.rank is None:
            return "give the data loaders more workers, prefetching and pinned memory, or put the data on a faster disk"
        return "compare this rank's data loader, its host's load and its disk with another rank's"


class HostMemoryGrowing(Finding, tag="host_memory_growing"):
    """The memory of the rank's processes, or with None of every rank's, grows steadily, and reaches ``limit_bytes`` in ``seconds_left``."""

    todo: ClassVar[str] = (
        "look for lists that grow from step to step, datasets that cache what they read, and loader workers that copy"
        " their parent's objects; resources_per_worker.memory sets the limit"
    )

    used_bytes: Number
    limit_bytes: Number
    bytes_per_second: Number
    seconds_left: Number

    def sentence(self) -> str:
        whose = "every rank's processes" if self.rank is None else f"rank {self.rank}'s processes"
        return (
            f"the memory of {whose} grows by {size(self.bytes_per_second * 60.0)} a minute: of"
            f" {size(self.limit_bytes)} they use {size(self.used_bytes)}, and the kernel kills a rank in about"
            f" {duration(self.seconds_left)}"
        )


class Stalled(Finding):
    """Base of the findings about ranks that make no progress: what was seen of them, and since when."""

    severity: ClassVar[Severity] = Severity.CRITICAL
    seen: Stillness
    late: Lateness

    def sentence(self) -> str:
        return f"{self.late.sentence()}; {self.seen.sentence()}"


class RankStopped(Stalled, tag="rank_stopped"):
    """A process of the rank is stopped or held by a debugger."""

    def advice(self, job_id: str = "JOB") -> str:
        return (
            f"`kill -CONT {self.seen.pid}` on its node continues it" if self.seen.pid else "end the debugger's session"
        )


class RankAtBreakpoint(Finding, tag="rank_at_breakpoint"):
    """The rank waits at a prompt of its debugger."""

    severity: ClassVar[Severity] = Severity.CRITICAL

    def sentence(self) -> str:
        return f"{_rank(self)} waits at a breakpoint"

    def advice(self, job_id: str = "JOB") -> str:
        return (
            f"`orch attach {job_id} --rank {self.rank or 0}` opens its debugger; after 10 minutes with no client attached its"
            " input ends, and the debugger raises BdbQuit"
        )


class NoStep(Stalled, tag="no_step"):
    """The job has made no step for long."""

    def advice(self, job_id: str = "JOB") -> str:
        return (
            f"`orch stacks {job_id}` shows where every rank stands; health.heartbeat_timeout ends a job that is still"
        )


class WrongWorldSize(Stalled, tag="wrong_world_size"):
    """The rank, or with None every rank, waits for a process group of another size than the job has ranks."""

    todo: ClassVar[str] = (
        "call init_process_group without world_size and rank, and leave WORLD_SIZE and RANK as they are; or ask for as many"
        " ranks (resources.num_workers)"
    )


class RendezvousIncomplete(Stalled, tag="rendezvous_incomplete"):
    """Ranks wait for their process group, which this rank does not enter; None: all have entered, and it does not form."""

    def advice(self, job_id: str = "JOB") -> str:
        if self.rank is None:
            return "see whether the ranks' nodes reach each other (firewall, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
        return f"`orch stacks {job_id} --rank {self.rank}` and `orch logs {job_id} --rank {self.rank}` show what it does instead"


# -- the whole job


class LossNotFinite(Finding, tag="loss_not_finite"):
    """A metric that the script reports is NaN or infinite; ``value`` says which."""

    severity: ClassVar[Severity] = Severity.CRITICAL
    metric: Text
    value: Text

    def sentence(self) -> str:
        return f"{self.metric} is {self.value}: the model has diverged, and every further step is lost"

    def advice(self, job_id: str = "JOB") -> str:
        return (
            "cancel it and go back to a checkpoint from before"
            f" (`orch checkpoints {job_id}`, `orch submit --resume-from {job_id}@STEP`), with a lower learning rate, gradient"
            " clipping or bf16 instead of fp16"
        )


class LossFlat(Finding, tag="loss_flat"):
    """The loss that the script reports has been bit-identical for this many steps."""

    todo: ClassVar[str] = (
        "check that the optimizer has the model's parameters, that gradients reach them, and that the batch changes"
    )

    metric: Text
    value: Number
    steps: Integer

    def sentence(self) -> str:
        return f"{self.metric} is {self.value:g}, the same to the last bit, for {plural(self.steps, 'step')}"


class LossJumped(Finding, tag="loss_jumped"):
    """The loss that the script reports is far above what it was, and stays there."""

    metric: Text
    value: Number
    usual: Number

    def sentence(self) -> str:
        return f"{self.metric} has jumped from about {self.usual:.3g} to {self.value:.3g}, and stays there"

    def advice(self, job_id: str = "JOB") -> str:
        return (
            "look at what changed at that step (learning rate, data, a restart of the optimizer); if it does not come back, continue"
            f" from a checkpoint from before (`orch checkpoints {job_id}`, `orch submit --resume-from {job_id}@STEP`) with gradient"
            " clipping or a lower learning rate"
        )


class StorageFull(Finding, tag="storage_full"):
    """The storage of the checkpoints has no room for the next one; ``said`` is the error of a save that failed."""

    severity: ClassVar[Severity] = Severity.CRITICAL
    free_bytes: Integer | None = None
    needed_bytes: Integer = 0
    said: Text = ""

    def sentence(self) -> str:
        room = f"{size(self.free_bytes)} free" if self.free_bytes is not None else "no room"
        needs = f", and a checkpoint takes {size(self.needed_bytes)}" if self.needed_bytes else ""
        return f"the storage of checkpoints has {room}{needs}{quoted(self.said)}"

    def advice(self, job_id: str = "JOB") -> str:
        return (
            "free space below checkpoint.storage_path or lower checkpoint.keep; until then a restart begins at the newest of"
            f" `orch checkpoints {job_id}`"
        )


class StorageSlow(Finding, tag="storage_slow"):
    """Storage takes too long for checkpoints: a write takes ``seconds``, or training waits for it for ``share`` of the time.

    ``usual_seconds`` is what a write has taken before, where that is known. ``busy``: the write is not over.
    """

    seconds: Number
    usual_seconds: Number | None = None
    share: Number = 0.0
    busy: bool = False

    def sentence(self) -> str:
        whose = "" if self.rank is None else f" of rank {self.rank}"
        if self.share >= WAITING_SHARE:
            return f"training waits for the storage of checkpoints for {percent(self.share)} of the time"
        usual = f", where {duration(self.usual_seconds)} is usual" if self.usual_seconds is not None else ""
        taken = "has taken" if self.busy else "took"
        return f"storage is slow: the newest write of a checkpoint{whose} {taken} {duration(self.seconds)}{usual}"

    def advice(self, job_id: str = "JOB") -> str:
        where = "its node" if self.rank is not None else "the ranks' nodes"
        return (
            f"see what else writes to checkpoint.storage_path from {where} (`iostat -x`, `nfsiostat`), save less often"
            " (checkpoint.interval), or take a faster storage"
        )


class SavesFailing(Finding, tag="saves_failing"):
    """Checkpoints do not reach storage: this many saves failed, including the newest; ``said`` is its error."""

    severity: ClassVar[Severity] = Severity.CRITICAL
    failures: Integer
    said: Text = ""

    def sentence(self) -> str:
        return f"checkpoints do not reach storage: {plural(self.failures, 'try', 'tries')} failed{quoted(self.said)}"

    def advice(self, job_id: str = "JOB") -> str:
        return f"free or repair checkpoint.storage_path; until then a restart begins at the newest of `orch checkpoints {job_id}`"


class StartedOver(Finding, tag="started_over"):
    """The attempt is at ``step``, although the one before left a checkpoint of ``checkpoint_step``."""

    step: Integer
    checkpoint_step: Integer

    def sentence(self) -> str:
        return f"this attempt is at step {self.step}, behind the newest checkpoint of the one before, of step {self.checkpoint_step}: it seems to have begun again"

    def advice(self, job_id: str = "JOB") -> str:
        return (
            "let the script load the checkpoint that ORCH_RESUME_FROM and ${checkpoint} name (docs/checkpoints.md); it may"
            f" overwrite its own: `orch checkpoints {job_id}`"
        )


class SavesRare(Finding, tag="saves_rare"):
    """No checkpoint was made for ``seconds``; ``interval_seconds`` is the job's intended interval, where known."""

    seconds: Number
    interval_seconds: Number | None = None

    def sentence(self) -> str:
        meant = f", although the interval is {duration(self.interval_seconds)}" if self.interval_seconds else ""
        return f"no checkpoint for {duration(self.seconds)}{meant}: a failure now would lose that much work"

    def advice(self, job_id: str = "JOB") -> str:
        if self.interval_seconds:
            return "see whether saves wait for storage or fail (`orch events`), or lower checkpoint.interval"
        return "save with `context().save` or set checkpoint.watch, so that a restart does not begin at step 0"


class SavesSlow(Finding, tag="saves_slow"):
    """The newest save stalled training for ``seconds``, with an intended interval of ``interval_seconds``."""

    todo: ClassVar[str] = (
        "save less often (checkpoint.interval: auto weighs a save against the work that a failure loses), or put"
        " checkpoint.storage_path on a faster disk"
    )

    seconds: Number
    interval_seconds: Number

    def sentence(self) -> str:
        share = self.seconds / self.interval_seconds if self.interval_seconds else 1.0
        return (
            f"the newest save stalled training for {duration(self.seconds)}, and one is planned every"
            f" {duration(self.interval_seconds)}: {percent(min(share, 1.0))} of the time"
        )


class RestartLoop(Finding, tag="restart_loop"):
    """The job has restarted this often within ``seconds``, the last time for ``cause``.

    ``total`` counts all of its restarts, those that its record no longer lists included; 0 where it is not known.
    """

    severity: ClassVar[Severity] = Severity.CRITICAL
    restarts: Integer
    seconds: Number
    cause: Fact
    total: Integer = 0

    def sentence(self) -> str:
        newest = f"in {duration(self.seconds)}, the last because {self.cause.sentence()}"
        if self.total > self.restarts:
            return f"{plural(self.total, 'restart')}, the newest {self.restarts} {newest}"
        return f"{plural(self.restarts, 'restart')} {newest}"

    def advice(self, job_id: str = "JOB") -> str:
        return self.cause.advice(job_id) or f"`orch events {job_id}` lists each failure; retry.max_restarts bounds them"


class JobIdle(Finding, tag="job_idle"):
    """The job is RUNNING, reports no step, and its GPUs are idle."""

    gpus: Integer

    def sentence(self) -> str:
        count = "its GPU does" if self.gpus == 1 else f"its {self.gpus} GPUs do"
        return f"it is RUNNING, reports no step, and {count} nothing"

    def advice(self, job_id: str = "JOB") -> str:
        return f"`orch stacks {job_id}` shows what it waits for; `orch cancel {job_id}` frees its GPUs"


class GpusUnused(Finding, tag="gpus_unused"):
    """The job makes steps, and all of its GPUs are idle."""

    todo: ClassVar[str] = (
        "check that the script moves its model and its data to the GPU (`cuda:{LOCAL_RANK}`) and that"
        " `torch.cuda.is_available()` is true; a job for processors asks for `gpu: 0`"
    )

    gpus: Integer

    def sentence(self) -> str:
        return f"it makes steps, and {'its GPU does' if self.gpus == 1 else f'its {self.gpus} GPUs do'} nothing"


# -- nodes


class NodeSlow(Finding, tag="node_slow"):
    """Every rank on the node is slower than those on the job's other nodes: ``factor`` times in the median."""

    factor: Number
    ranks: Integer

    def sentence(self) -> str:
        return (
            f"all {self.ranks} ranks on node {self.node} take {self.factor:.1f} times as long for their part of a step as"
            " those on the other nodes"
        )

    def advice(self, job_id: str = "JOB") -> str:
        return (
            f"compare the load, the processor clocks and the storage of {self.node} with another node's;"
            f" `orch nodes cordon {self.node}` keeps new jobs away from it"
        )


class ClockSkewed(Finding, tag="clock_skewed"):
    """The clock of the node is ahead of the daemon's by this many seconds; negative: behind it."""

    seconds: Number

    def sentence(self) -> str:
        where = "ahead of" if self.seconds > 0 else "behind"
        return f"the clock of node {self.node} is {duration(abs(self.seconds))} {where} the daemon's"

    def advice(self, job_id: str = "JOB") -> str:
        return f"synchronize the clocks (`chronyc tracking` or `timedatectl` on {self.node} and on the daemon's node)"


# -- the daemon


class DaemonOverloaded(Finding, tag="daemon_overloaded"):
    """The daemon's loop runs ``late_seconds`` late: what it reports of the job may be late by as much."""

    todo: ClassVar[str] = (
        "see what uses the processors of the daemon's node (`top`), and keep ranks off some of them (resources_per_worker.cpu)"
    )

    late_seconds: Number

    def sentence(self) -> str:
        return (
            f"the daemon's loop is {duration(self.late_seconds)} late: the figures of this job may be late by as much"
        )


def runbook(finding: Finding) -> str:
    """Return the link to the documentation of this kind of finding."""
    return f"docs/diagnosis.md#{finding.kind}"


def linked(page: str, docs_url: str) -> str:
    """Return a runbook as an address below ``docs_url``, where docs/ is served; as it is without one."""
    return f"{docs_url}/{page.removeprefix('docs/')}" if docs_url and page.startswith("docs/") else page


def unmeasured_to_dict(finding: Finding, job_id: str) -> dict[str, Any]:
    """Return a finding that is open from before the daemon started, without its figures: they are those of its opening."""
    about = [
        *([] if finding.rank is None else [f"rank {finding.rank}"]),
        *([f"GPU {finding.gpu_uuid}"] if finding.gpu_uuid else []),
    ]
    subject = f" ({', '.join(about)})" if about else ""
    text = f"{finding.kind}{subject}: open since before the daemon started, and not measured again yet"
    return {**finding_to_dict(finding, job_id), "sentence": text, "advice": "", "fact": {"kind": finding.kind}}


def finding_to_dict(finding: Finding, job_id: str) -> dict[str, Any]:
    """Return the finding for programs and users: its fact, its words, and a link to more."""
    return {
        "kind": finding.kind,
        "severity": finding.severity.value,
        "confidence": finding.confidence.value,
        "rank": finding.rank,
        "gpu_uuid": finding.gpu_uuid,
        "node": finding.node,
        "since": finding.since,
        "sentence": finding.sentence(),
        "advice": finding.advice(job_id),
        "runbook": runbook(finding),
        "fact": finding.to_dict(),
    }


def _option(fact: Finding) -> str:
    return f" --rank {fact.rank}" if fact.rank is not None else ""


def _rank(fact: Finding) -> str:
    return "every rank" if fact.rank is None else f"rank {fact.rank}"


def gpu_of(fact: Finding) -> str:
    """Return the GPU of a finding."""
    of = f" of rank {fact.rank}" if fact.rank is not None else ""
    return f"the GPU{of}" + (f" ({fact.gpu_uuid})" if fact.gpu_uuid else "")
