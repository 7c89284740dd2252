"""Keeps the strikes, cordons, labels and reservations of nodes and GPUs, and has their health checked before a release.

The policy is ``core/diagnosis/quarantine.py``. The daemon stores what ``unsaved`` returns and reads it back with
``restore``: a cordon, a bad node and a bad GPU survive a restart. A node that returns under another id (Ray assigns a
new one with each head) is recognised by its host name, if that is unique.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from orchestrator import clock
from orchestrator.core.cluster import NodeReservation  # noqa: TC001  # codec.py reads the annotations when it runs
from orchestrator.core.codec import from_plain, to_plain
from orchestrator.core.diagnosis.quarantine import Strike, check_after, condemned, condemned_gpu, quarantined, strike_of
from orchestrator.core.facts.codec import fact_from
from orchestrator.core.facts.fact import Fact  # codec.py reads the annotations when it runs
from orchestrator.core.facts.faults import HealthCheckFailed
from orchestrator.store.records import StoredPlace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from orchestrator.core.cluster import Node
    from orchestrator.core.events import Event
    from orchestrator.core.job.record import Job

    Check = Callable[[str], Awaitable[tuple[Fact, ...]]]
    Key = tuple[str, str]

NODE: Final = "node"
GPU: Final = "gpu"
MAX_STRIKES: Final = 100
FORGOTTEN_SECONDS: Final = 12 * 3600.0  # an older strike has no weight


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quarantined:
    """A node or GPU in quarantine: the reason, and when its health is checked (seconds since the epoch)."""

    reason: Fact
    check_at: float
    failed_checks: int = 0


@dataclass(slots=True, kw_only=True)
class _Held:
    """The restriction of one node or GPU. ``node`` is the node's id, ``host`` its name as last seen."""

    node: str
    host: str = ""
    cordoned_by: str = ""
    forgiven_at: float = 0.0
    labels: dict[str, str] = field(default_factory=dict)
    reservations: tuple[NodeReservation, ...] = ()
    avoided: _Quarantined | None = None
    strikes: list[Strike] = field(default_factory=list)

    def body(self, now: float) -> dict[str, Any] | None:
        """Return JSON-ready fields; None where nothing must be kept."""
        recent = [s for s in self.strikes if now - s.at < FORGOTTEN_SECONDS][-MAX_STRIKES:]
        coming = tuple(one for one in self.reservations if one.end > now)
        kept = recent or self.avoided or self.cordoned_by or self.labels or coming
        if not (kept or now - self.forgiven_at < FORGOTTEN_SECONDS):
            return None
        body: dict[str, Any] = to_plain(replace(self, strikes=recent, reservations=coming))
        return body


class NodeQuarantine:
    """The strikes, cordons and health checks of nodes and GPUs."""

    def __init__(self, clock: Callable[[], float] = clock.now) -> None:
        self._clock = clock
        self._held: dict[Key, _Held] = {}
        self._unsaved: set[Key] = set()

    # -- stored

    def restore(self, places: Iterable[StoredPlace]) -> None:
        """Restore what an earlier daemon has stored. Entries without weight are dropped: nodes come and go for ever."""
        now = self._clock()
        for place in places:
            held = None if place.body is None else _held_from(place.body)
            if held is None or held.body(now) is None:
                self._unsaved.add((place.kind, place.name))
            else:
                self._held[place.kind, place.name] = held

    def unsaved(self) -> list[StoredPlace]:
        """Return what has changed since the last call, for the store."""
        keys, self._unsaved = sorted(self._unsaved), set()
        now = self._clock()
        return [
            StoredPlace(kind=key[0], name=key[1], body=self._held[key].body(now) if key in self._held else None)
            for key in keys
        ]

    def keep(self, places: Iterable[StoredPlace]) -> None:
        """Return these again from ``unsaved``: they could not be stored."""
        self._unsaved |= {(place.kind, place.name) for place in places}

    # -- strikes

    def observe(self, job: Job, event: Event) -> bool:
        """Handle an event with the record after it; True when it quarantines a node or a GPU.

        An event may be repeated: a restarted daemon reads those of its live jobs.
        """
        strike = strike_of(job, event)
        if strike is None:
            return False
        newly = self._strike((NODE, strike.node_id), strike, condemned)
        if strike.gpu_uuid:
            newly = self._strike((GPU, strike.gpu_uuid), strike, condemned_gpu) or newly
        return newly

    def _strike(self, key: Key, strike: Strike, judge: Callable[[Iterable[Strike], float], Fact | None]) -> bool:
        held = self._held.setdefault(key, _Held(node=strike.node_id))
        if strike in held.strikes or strike.at <= held.forgiven_at:
            return False
        held.strikes.append(strike)
        del held.strikes[:-MAX_STRIKES]
        self._unsaved.add(key)
        reason = None if held.avoided else judge(held.strikes, self._clock())
        if reason is None:
            return False
        held.avoided = _Quarantined(reason=reason, check_at=self._clock() + check_after(0))
        return True

    # -- consequences

    @property
    def cordoned(self) -> frozenset[str]:
        """Return the ids of nodes that a user has cordoned."""
        return frozenset(name for (kind, name), held in self._held.items() if kind == NODE and held.cordoned_by)

    @property
    def quarantined_gpus(self) -> dict[str, Fact]:
        """Return the reason of each GPU's quarantine, by UUID."""
        return {n: held.avoided.reason for (kind, n), held in self._held.items() if kind == GPU and held.avoided}

    def mark(self, nodes: Mapping[str, Node]) -> dict[str, Node]:
        """Return the nodes, with their labels, and marks on those that are cordoned or quarantined."""
        self._follow(nodes)
        nothing, now = _Held(node=""), self._clock()
        held_by_node = {i: self._held.get((NODE, i), nothing) for i in nodes}
        open_nodes = {
            i: replace(
                n,
                cordoned=bool(held_by_node[i].cordoned_by),
                labels=dict(held_by_node[i].labels),
                reservations=tuple(one for one in held_by_node[i].reservations if one.end > now),
            )
            for i, n in nodes.items()
        }
        reasons = {n: held.avoided.reason for (kind, n), held in self._held.items() if kind == NODE and held.avoided}
        holding = quarantined(open_nodes, reasons)
        return {i: replace(n, quarantined=holding.get(i)) for i, n in open_nodes.items()}

    def _follow(self, nodes: Mapping[str, Node]) -> None:
        """Record the names of nodes, and find those that have another id now."""
        alive = {n.id: n.name for n in nodes.values() if n.alive}
        for key, held in list(self._held.items()):
            if held.node in alive:
                held.host = alive[held.node]
                continue
            same = [node_id for node_id, name in alive.items() if name == held.host]
            if len(same) != 1 or (key[0] == NODE and (NODE, same[0]) in self._held):
                continue
            held.node = same[0]
            self._unsaved.add(key)
            if key[0] == NODE:
                self._held[NODE, same[0]] = self._held.pop(key)
                self._unsaved.add((NODE, same[0]))

    def cordon(self, node_id: str, host: str, by: str) -> None:
        """Cordon the node for a user: nothing new is placed on it."""
        held = self._held.setdefault((NODE, node_id), _Held(node=node_id))
        held.cordoned_by, held.host = by, host
        self._unsaved.add((NODE, node_id))

    def label(self, node_id: str, host: str, changes: Mapping[str, str | None]) -> dict[str, str]:
        """Set labels of the node for a user, None removes one; return those that it then has."""
        held = self._held.setdefault((NODE, node_id), _Held(node=node_id))
        after = {**held.labels, **changes}
        held.labels = {key: after[key] for key in sorted(after) if after[key] is not None}  # type: ignore[misc]  # None is left out
        held.host = host
        self._unsaved.add((NODE, node_id))
        return held.labels

    def reserve(self, node_id: str, host: str, reservations: tuple[NodeReservation, ...]) -> None:
        """Set the reservations of the node."""
        held = self._held.setdefault((NODE, node_id), _Held(node=node_id))
        held.reservations, held.host = reservations, host
        self._unsaved.add((NODE, node_id))

    def forgive(self, node_id: str) -> None:
        """Release the node and its GPUs for a user."""
        for key in [k for k, held in self._held.items() if held.node == node_id]:
            self._forgive(key)

    def _forgive(self, key: Key) -> None:
        held = self._held[key]
        held.cordoned_by, held.avoided, held.strikes, held.forgiven_at = "", None, [], self._clock()
        self._unsaved.add(key)

    async def look(self, check: Check) -> bool:
        """Check the health of every node that is due, or has a GPU that is due; True on a change.

        A user's cordon is independent of health: it stays.
        """
        changed, problems_of = False, dict[str, tuple[Fact, ...]]()
        for key, held in list(self._held.items()):
            found = held.avoided
            # A check further ahead than its own delay was planned before the clock was set back: it is due.
            if found is None or 0.0 < found.check_at - self._clock() <= check_after(found.failed_checks):
                continue
            if held.node not in problems_of:
                problems_of[held.node] = await check(held.node)
            problems = problems_of[held.node]
            if self._held.get(key) is not held or held.avoided is not found:
                continue  # released meanwhile
            changed = True
            self._unsaved.add(key)
            if not problems:
                by = held.cordoned_by
                self._forgive(key)
                held.cordoned_by = by
                continue
            failed = found.failed_checks + 1
            held.avoided = _Quarantined(
                reason=HealthCheckFailed(problems=tuple(map(fact_from, problems))),
                check_at=self._clock() + check_after(failed),
                failed_checks=failed,
            )
        return changed


def _held_from(body: Mapping[str, Any]) -> _Held:
    return from_plain(_Held, body)
