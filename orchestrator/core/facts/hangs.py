"""Facts about ranks that make no progress."""

from __future__ import annotations

from enum import StrEnum

from orchestrator.core.codec import Integer, Number, Text
from orchestrator.core.facts.fact import FactRecord


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
    ``num_ranks``.
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

    def sentence(self) -> str:
        return f"{'every rank' if self.rank is None else f'rank {self.rank}'} {_activity(self)}"


class Lateness(FactRecord, tag="lateness"):
    """Time without a step of any rank, and the typical time; ``by_steps`` is False where only other progress is known."""

    still_seconds: Number
    usual_seconds: Number | None = None
    by_steps: bool = True

    def sentence(self) -> str:
        if not self.by_steps:
            return f"no sign of life for {self.still_seconds:.0f} s"
        usual = f", where {self.usual_seconds:.2g} s is usual" if self.usual_seconds is not None else ""
        return f"no step for {self.still_seconds:.0f} s{usual}"


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
