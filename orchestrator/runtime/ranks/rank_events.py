"""Reports of a rank's actor to the daemon: numbered events, and the newest of everything else.

Events are numbered so that a restarted daemon can request those that it missed; calls of older attempts are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec.structs import replace

from orchestrator.checkpoint.repository.persister import PersisterStatus
from orchestrator.core.codec import Count, Message, Text, Time
from orchestrator.core.diagnosis.observation import ProcessSeen, StorageSeen, TerminalSeen
from orchestrator.core.events import Exit
from orchestrator.core.facts.fact import FactRecord
from orchestrator.runtime.forkserver.masking import Masker
from orchestrator.train.script.progress_reading import ProgressSnapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.diagnosis.health import Frame, RankLook
    from orchestrator.core.facts.fact import Fact


class RankEvent(Message):
    """One thing that happened to the rank: ``started``, ``exited`` or ``gone``. Times are seconds since the epoch."""

    number: Count
    kind: Literal["started", "exited", "gone"]
    at: Time
    pid: Count = 0
    cold: Text | None = None
    """Reason for a fresh interpreter, for ``started``; ``AS_ASKED`` where the rank's plan requests one."""
    exit: Exit | None = None
    """Exit of the process, for ``exited``."""


AS_ASKED: Final = "asked for"


class PollCursor(Message):
    """Numbers of the last event, progress, persister status, process and terminal samples that a caller received.

    The caller keeps it, not the actor: a daemon that was killed may not have recorded what it received.
    """

    event: Count = 0
    progress: Count = 0
    persisted: Count = 0
    processes: Count = 0
    terminal: Count = 0


class PollReply(Message):
    """Reports that are newer than the given cursor; ``cursor`` is the one for the next poll."""

    cursor: PollCursor
    events: tuple[RankEvent, ...] = ()
    progress: ProgressSnapshot | None = None
    persisted: PersisterStatus | None = None
    log_lost: Text | None = None
    processes: ProcessSeen | None = None
    storage: StorageSeen | None = None
    """Sent only together with ``processes``."""
    terminal: TerminalSeen | None = None
    sent_at: Time = 0.0
    """By the node's clock, as all other times."""
    unusable: tuple[Text, ...] = ()
    """Names of values that did not fit, and were left out where the message was read."""


LEASE_SECONDS: Final = 10.0
FENCE_SECONDS: Final = LEASE_SECONDS + 4.0  # the lease, plus the longest check and its call


class RankGreeting(Message):
    """An actor's node, process id and GPU ids, and the attempts that it is prepared for and has launched."""

    node_id: Text
    pid: Count
    address: Text
    gpu_ids: tuple[Text, ...]
    launched: Count
    port: Count | None
    highest_step: Count
    prepared: Count = 0


def rendezvous_of(greetings: Sequence[RankGreeting], attempt: int) -> tuple[str, int] | None:
    """Return address and port of the attempt's rendezvous, if all of a gang's actors are prepared for it."""
    first = greetings[0]
    if first.port is None or any(greeting.prepared != attempt for greeting in greetings):
        return None
    return first.address, first.port


class StaleAttemptError(Exception):
    """The call names an attempt that a newer one has replaced; nothing was done. Ask for the current attempt."""


class AttemptFence:
    """Refuses calls that name an older attempt than ``attempt``, the current one.

    ``launched`` is the newest attempt that started its process, or was cancelled before; ``called_off`` is the newest
    attempt that was ordered to end.
    """

    def __init__(self, job_id: str, rank: int) -> None:
        self._job_id = job_id
        self._rank = rank
        self.attempt = 0
        self.launched = 0
        self.called_off = 0

    def refuse_older(self, attempt: int) -> None:
        """Raise StaleAttemptError for an attempt that a newer one has replaced."""
        if attempt < self.attempt:
            raise StaleAttemptError(
                f"{self._job_id} rank {self._rank}: attempt {attempt} was replaced by {self.attempt}; nothing was done"
            )


def masked_event(event: RankEvent, masker: Masker) -> RankEvent:
    """Mask an event: an exception's text, the last lines, the kernel's and the log policies' results."""
    end = event.exit
    if not masker or end is None:
        return event
    masked = replace(
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
    return replace(fact, **{n: masker.text(text) for n, text in texts.items() if type(text) is str})


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
    )


class EventLog:
    """Numbered events. ``masker`` removes secrets from them."""

    def __init__(self) -> None:
        self._events: list[RankEvent] = []
        self._news = asyncio.Event()
        self.masker = Masker(())

    def begin(self) -> None:
        """Start an empty log for another attempt."""
        self._events = []

    def add(self, **fields: Any) -> None:
        """Add an event and wake the waiters."""
        self._events.append(masked_event(RankEvent(number=len(self._events) + 1, **fields), self.masker))
        self._news.set()

    def after(self, number: int) -> tuple[RankEvent, ...]:
        """Return the events after this number."""
        return tuple(event for event in self._events if event.number > number)

    async def wait(self, seconds: float) -> None:
        """Return at the next event, or after ``seconds``."""
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    @property
    def pid(self) -> int:
        """The rank's process id; 0 before it has started."""
        return next((event.pid for event in self._events if event.kind == "started"), 0)

    @property
    def exit(self) -> Exit | None:
        """The exit of the process; None before it was reported."""
        return next((event.exit for event in self._events if event.kind == "exited"), None)

    @property
    def exited(self) -> bool:
        """Whether the exit of the process was reported."""
        return any(event.kind == "exited" for event in self._events)

    @property
    def running(self) -> bool:
        """Whether the process has started and its end was not reported."""
        return bool(self._events) and not self.ended

    @property
    def ended(self) -> bool:
        """Whether an end was reported: of the process, or of an attempt that never started."""
        return any(event.kind != "started" for event in self._events)
