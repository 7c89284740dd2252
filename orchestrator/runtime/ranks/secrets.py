"""Masks the job's secrets in the reports of a rank actor to the daemon. Pure.

Paths are unchanged: they are looked up by name, and orch chose them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from orchestrator.core.facts.fact import FactRecord

if TYPE_CHECKING:
    from orchestrator.checkpoint.repository.status import PersisterStatus
    from orchestrator.core.diagnosis.health import Frame, RankLook
    from orchestrator.core.facts.fact import Fact
    from orchestrator.runtime.forkserver.masking import Masker
    from orchestrator.runtime.ranks.rank_events import RankEvent
    from orchestrator.train.script.progress_facts import ProgressSnapshot


def masked_event(event: RankEvent, masker: Masker) -> RankEvent:
    """Mask an event: an exception's text, the last lines, the kernel's and the log policies' results."""
    end = event.exit
    if not masker or end is None:
        return event
    masked = structs.replace(
        end,
        error_type=masker.text(end.error_type),
        error_message=masker.text(end.error_message),
        log_tail=tuple(map(masker.text, end.log_tail)),
        evidence=tuple(_masked_fact(fact, masker) for fact in end.evidence),
        policy_note=None if end.policy_note is None else _masked_fact(end.policy_note, masker),
    )
    return replace(event, exit=masked)


def _masked_fact(fact: Fact, masker: Masker) -> Fact:
    """Mask secrets in what the fact quotes."""
    if not isinstance(fact, FactRecord):
        return fact
    texts = {name: getattr(fact, name) for name in fact.__struct_fields__}
    return structs.replace(fact, **{n: masker.text(text) for n, text in texts.items() if type(text) is str})


def masked_progress(snapshot: ProgressSnapshot, masker: Masker) -> ProgressSnapshot:
    """Mask a progress page: names chosen by the script, and texts about its checkpoints."""
    if not masker:
        return snapshot
    facts = snapshot.checkpoint
    return replace(
        snapshot,
        phase=masker.text(snapshot.phase),
        metrics={masker.text(name): value for name, value in snapshot.metrics.items()},
        checkpoint=replace(
            facts,
            failure=masker.text(facts.failure),
            quarantined=tuple(map(masker.text, facts.quarantined)),
            interval_reason=masker.text(facts.interval_reason),
            snapshots_off=masker.text(facts.snapshots_off),
        ),
    )


def masked_status(status: PersisterStatus | None, masker: Masker) -> PersisterStatus | None:
    """Mask a snapshot's status: a storage error may quote the credentials."""
    return replace(status, failure=masker.text(status.failure)) if status is not None and masker else status


def masked_look(look: RankLook, masker: Masker) -> RankLook:
    """Mask an inspection of the rank's processes: names of threads, functions, files and process groups are the script's."""
    if not masker:
        return look

    def frame(each: Frame) -> Frame:
        return replace(each, function=masker.text(each.function), file=masker.text(each.file))

    return replace(
        look,
        threads=tuple(
            replace(thread, name=masker.text(thread.name), frames=tuple(map(frame, thread.frames)))
            for thread in look.threads
        ),
        problem=masker.text(look.problem),
        entered=replace(look.entered, label=masker.text(look.entered.label)) if look.entered is not None else None,
    )
