"""Time and messages of the in-memory runtime: pending actions, and messages that are delayed, lost or repeated."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from orchestrator.runtime.gangs.errors import GangLostError
from orchestrator.runtime.ranks.rank_events import StaleAttemptError

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.core.ids import JobId
    from orchestrator.runtime.memory.nodes import MemoryNode


@dataclass(slots=True, eq=False)
class Entry:
    """One pending action, which ``cancel`` voids."""

    action: Callable[[], None] | None

    def cancel(self) -> None:
        """Void the action."""
        self.action = None


class Agenda:
    """Runs actions in the order of their times; actions of the same time in the order in which they were added."""

    def __init__(self, now: float) -> None:
        self.now = now
        self._heap: list[tuple[float, int, Entry]] = []
        self._entered = 0

    def at(self, when: float, action: Callable[[], None]) -> Entry:
        """Add an action for wall time ``when``, or for now if that has passed."""
        entry = Entry(action)
        self._entered += 1
        heapq.heappush(self._heap, (max(when, self.now), self._entered, entry))
        return entry

    def after(self, seconds: float, action: Callable[[], None]) -> Entry:
        """Add an action that is due in ``seconds``."""
        return self.at(self.now + seconds, action)

    @property
    def next_at(self) -> float | None:
        """Return when the next action is due; None when there is none."""
        while self._heap and self._heap[0][2].action is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def step(self, until: float) -> bool:
        """Run the next action that is due by ``until``, at its time. False when there is none."""
        when = self.next_at
        if when is None or when > until:
            return False
        _, _, entry = heapq.heappop(self._heap)
        self.now = max(self.now, when)
        action, entry.action = entry.action, None
        if action is not None:
            action()
        return True

    def run_until(self, until: float) -> int:
        """Run everything that is due by ``until``, which becomes the current time; return the number of actions."""
        count = 0
        while self.step(until):
            count += 1
        self.now = max(self.now, until)
        return count


ANSWER_SECONDS: Final = 20.0
"""After this time an answer counts as lost, and the request is repeated."""


class NoAnswerError(Exception):
    """No answer arrived: the request may be carried out or not."""


@dataclass(slots=True)
class Network:
    """The network. ``latency`` is the delay of a message each way, in seconds."""

    agenda: Agenda
    latency: float = 0.0
    lost: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)
    _arrived: dict[JobId, float] = field(default_factory=dict)

    def ask(self, job_id: JobId, node: MemoryNode | None, do: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        """Run ``do`` on a node (None: on the control plane), and call ``answer`` with its result or exception.

        Messages about one job arrive in the order in which they were sent. A lost answer becomes a NoAnswerError.
        """
        arrives = max(self.agenda.now + self._accepts(node), self._arrived.get(job_id, 0.0))
        self._arrived[job_id] = arrives
        self.agenda.at(arrives, partial(self._deliver, job_id, node, do, answer))

    def follow(
        self,
        job_id: JobId,
        node: MemoryNode | None,
        do: Callable[[Callable[[Any], None]], None],
        answer: Callable[[Any], None],
    ) -> None:
        """Run ``do`` on a node like ``ask``, for a deferred result: ``do`` gets a function to call with it."""
        replying = partial(self.reply, job_id, node, answer)

        def begin() -> None:
            if node is not None and node.silent:
                node.waiting.append(begin)
                return
            try:
                do(replying)
            except (GangLostError, StaleAttemptError) as error:
                replying(error)

        self.agenda.after(self._accepts(node), begin)

    def reply(self, job_id: JobId, node: MemoryNode | None, answer: Callable[[Any], None], what: Any) -> None:
        """Send ``what`` back."""
        if self.lost[job_id] > 0:
            self.lost[job_id] -= 1
            self.agenda.after(ANSWER_SECONDS, partial(answer, NoAnswerError()))
            return
        if self.repeated[job_id] > 0:
            self.repeated[job_id] -= 1
            self.agenda.after(self._accepts(node), partial(answer, what))
        self.agenda.after(self._accepts(node), partial(answer, what))

    def forget(self, job_id: JobId) -> None:
        """Drop what belongs to an ended job."""
        self._arrived.pop(job_id, None)
        self.lost.pop(job_id, None)
        self.repeated.pop(job_id, None)

    def _accepts(self, node: MemoryNode | None) -> float:
        return self.latency + (node.slow if node is not None else 0.0)

    def _deliver(
        self, job_id: JobId, node: MemoryNode | None, do: Callable[[], Any], answer: Callable[[Any], None]
    ) -> None:
        if node is not None and node.silent:
            node.waiting.append(partial(self._deliver, job_id, node, do, answer))
            return
        try:
            what = do()
        except (GangLostError, StaleAttemptError) as error:
            what = error
        self.reply(job_id, node, answer, what)
