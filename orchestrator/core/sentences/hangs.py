"""Sentences about ranks that make no progress: what each does."""

from __future__ import annotations

from orchestrator.core.facts import hangs  # noqa: TC001  # singledispatch reads the annotations
from orchestrator.core.facts.hangs import Sign
from orchestrator.core.sentences.base import advice, sentence


@sentence.register
def _(fact: hangs.Stillness) -> str:
    return f"{'every rank' if fact.rank is None else f'rank {fact.rank}'} {_seen(fact)}"


def _seen(fact: hangs.Stillness) -> str:
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


@sentence.register
def _(fact: hangs.Lateness) -> str:
    if not fact.by_steps:
        return f"no sign of life for {fact.still_seconds:.0f} s"
    usual = f", where {fact.usual_seconds:.2g} s is usual" if fact.usual_seconds is not None else ""
    return f"no step for {fact.still_seconds:.0f} s{usual}"


@sentence.register
def _(fact: hangs.Hang) -> str:
    ignored = "; no action is taken (health.on_hang: notify)" if fact.ignored else ""
    return f"{sentence(fact.seen)}; {sentence(fact.late)}{ignored}"


@advice.register
def _(fact: hangs.Hang, job_id: str = "JOB") -> str:
    if fact.ignored:
        return f"see `orch stacks {job_id}`"
    where = f" --rank {fact.seen.rank}" if fact.seen.rank is not None else ""
    return f"every rank's stacks are at the end of its log: orch logs {job_id}{where} --attempt {fact.attempt}"


@sentence.register
def _(fact: hangs.Slow) -> str:
    return f"{sentence(fact.late)}: {sentence(fact.seen)}"


@advice.register
def _(fact: hangs.Slow, job_id: str = "JOB") -> str:
    return f"see `orch stacks {job_id}`"
