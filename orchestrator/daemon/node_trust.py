"""Keeps the strikes against nodes, has a node's health looked at before it is trusted again, and marks it meanwhile.

The policy is ``core.trust``. What is kept here is rebuilt from the store's events by a restarted daemon.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.core.trust import avoid, check_after, condemned, strike_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from orchestrator.core.cluster import Node
    from orchestrator.core.events import Event
    from orchestrator.core.job import Job
    from orchestrator.core.trust import Strike

    Check = Callable[[str], Awaitable[tuple[str, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Avoided:
    """A node that is avoided: why, and when its health is looked at (seconds since the epoch)."""

    reason: str
    check_at: float
    failed_checks: int = 0


class NodeTrust:
    """See the module."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._strikes: dict[str, list[Strike]] = defaultdict(list)
        self._avoided: dict[str, _Avoided] = {}

    def observe(self, job: Job, event: Event) -> bool:
        """Take an event and the record after it; True when a node is avoided from now on."""
        strike = strike_of(job, event)
        if strike is None:
            return False
        strikes = self._strikes[strike.node_id]
        strikes.append(strike)
        del strikes[:-100]
        if strike.node_id in self._avoided:
            return False
        reason = condemned(strikes, self._clock())
        if not reason:
            return False
        self._avoided[strike.node_id] = _Avoided(reason=reason, check_at=self._clock() + check_after(0))
        return True

    def mark(self, nodes: Mapping[str, Node]) -> dict[str, Node]:
        """The nodes, those that are avoided with the reason."""
        holding = avoid(nodes, {node_id: found.reason for node_id, found in self._avoided.items()})
        return {i: replace(n, avoided=holding.get(i, "")) for i, n in nodes.items()}

    def forgive(self, node_id: str) -> None:
        """A person trusts the node again."""
        self._avoided.pop(node_id, None)
        self._strikes.pop(node_id, None)

    async def look(self, check: Check) -> bool:
        """Have the health of every node looked at whose time has come; True when anything changed."""
        changed = False
        for node_id, found in list(self._avoided.items()):
            if found.check_at > self._clock():
                continue
            problems = await check(node_id)
            if self._avoided.get(node_id) is not found:
                continue  # forgiven meanwhile
            changed = True
            if not problems:
                self.forgive(node_id)
                continue
            failed = found.failed_checks + 1
            self._avoided[node_id] = _Avoided(
                reason=f"its health check failed: {'; '.join(problems)}",
                check_at=self._clock() + check_after(failed),
                failed_checks=failed,
            )
        return changed
