"""Answers queries about nodes and their GPUs; cordons, drains, uncordons, labels and reserves nodes for users."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, Final

from orchestrator.api import views as v
from orchestrator.api.errors import BadRequestError, DiskFullError, NoSuchNodeError
from orchestrator.api.queue_views import MAX_LABELS
from orchestrator.api.service import NodeVerb
from orchestrator.core.cluster import NodeReservation
from orchestrator.core.facts.faults import Closure, GpuState
from orchestrator.core.facts.notes import RAYLET_SILENT
from orchestrator.core.facts.reasons import ByNodeDrain
from orchestrator.core.lifecycle.advance import request_stop
from orchestrator.core.scheduler.durations import RunTimes
from orchestrator.core.scheduler.placement import closure_of, left_on, nodes_at
from orchestrator.core.states import StopPurpose
from orchestrator.daemon.gpus import known_conditions
from orchestrator.store.errors import StoreError
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence

    from orchestrator.api.requests import NodeChange, ReservationRequest
    from orchestrator.api.service import Caller
    from orchestrator.core.cluster import Node
    from orchestrator.core.events import Event
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.facts.faults import GpuCondition
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.nodes.care import LoopNodes
    from orchestrator.daemon.nodes.quarantine import NodeQuarantine
    from orchestrator.gpu.row import GpuRow
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.runtime.exporters.exporters import Exporters
    from orchestrator.runtime.nodes.agent import NodeGpu, NodeReport
    from orchestrator.store.store import Store


class NodeQueries:
    """Queries about nodes. ``blind`` returns those of some nodes that do not see a directory of this machine.

    ``rows`` returns every GPU; its argument is reasons of quarantine by UUID.
    """

    def __init__(
        self,
        nodes: NodeRegistry,
        loop: Loop,
        quarantine: NodeQuarantine,
        exporters: Exporters,
        *,
        blind: Callable[[str, Collection[str]], Awaitable[list[str]]],
        rows: Callable[[Mapping[str, Fact], float], Awaitable[Sequence[GpuRow]]],
    ) -> None:
        self._exporters = exporters
        self._nodes = nodes
        self._loop = loop
        self._quarantine = quarantine
        self._blind = blind
        self._rows = rows

    async def views(self) -> Sequence[v.NodeView]:
        """Return every node, by name."""
        conditions = known_conditions(self._nodes, self._exporters, self._quarantine.quarantined_gpus, driver=True)
        views = [
            node_view(
                node,
                self._nodes.reports.get(node.id),
                self._loop.jobs.begun.values(),
                lost=self._nodes.lost_gpus.get(node.id, ()),
                conditions=conditions,
            )
            for node in nodes_at(self._loop.nodes, self._loop.now(), RunTimes()).values()
        ]
        return sorted(views, key=lambda n: (n.name, n.id))

    async def gpus(self, max_age_seconds: float = 0.0) -> Sequence[dict[str, Any]]:
        """Return every GPU of every node, with its holders and with values at most that old."""
        return [row.to_json() for row in await self._rows(self._quarantine.quarantined_gpus, max_age_seconds)]

    def simulated_gpus(self) -> int:
        """Return how many of the cluster's GPUs are simulated."""
        reports = self._nodes.reports.values()
        return sum(len(r.gpus) for r in reports if any(g.simulated for g in r.gpus))

    async def blind_to(self, directory: str) -> list[str]:
        """Return names of nodes that share neither the home nor this directory. Raises OSError: this machine cannot write it."""
        reports = self._nodes.reports
        apart = [node_id for node_id, report in reports.items() if not report.home_shared]
        blind = await self._blind(directory, apart) if apart else []
        return [f"{reports[node_id].hostname} ({node_id[:12]})" for node_id in blind]


def node_view(
    node: Node,
    report: NodeReport | None,
    jobs: Collection[Job],
    *,
    lost: Collection[NodeGpu] = (),
    conditions: Mapping[str, GpuCondition] | None = None,
) -> v.NodeView:
    """Return the view of one node. ``lost`` are GPUs that it had; ``conditions`` are those of its GPUs, by UUID."""
    known = conditions or {}
    free = left_on((node,), jobs)[node.id] if node.alive else None
    held = {
        uuid: (job.id, seat.rank)
        for job in jobs
        for seat in job.seats
        if seat.node_id == node.id
        for uuid in seat.gpu_uuids
    }
    gpus = tuple(
        v.GpuView(
            uuid=gpu.uuid,
            index=gpu.index,
            model=gpu.model,
            job_id=held[gpu.uuid][0] if gpu.uuid in held else None,
            rank=held[gpu.uuid][1] if gpu.uuid in held else None,
            **_health(known.get(gpu.uuid)),
        )
        for gpu in sorted((*(report.gpus if report else ()), *lost), key=lambda g: g.index)
    )
    return v.NodeView(
        id=node.id,
        name=node.name,
        state=node_state(node, jobs),
        reason=_reason(node, report),
        fact=node.quarantined.to_dict() if node.quarantined else None,
        cpus_total=node.cpus,
        cpus_free=max(0.0, free.cpus) if free else 0.0,
        gpus_total=node.gpus,
        gpus_free=max(0.0, free.gpus) if free else 0.0,
        memory_total_bytes=node.memory_bytes,
        memory_free_bytes=max(0, free.memory_bytes) if free else 0,
        gpus=gpus,
        jobs=tuple(sorted({job.id for job in jobs if node.id in job.nodes})),
        labels=dict(node.labels),
        reservations=tuple(
            v.ReservationView(id=r.id, start_at=r.start, end_at=r.end, reason=r.reason, by=r.by)
            for r in node.reservations
        ),
        agent_pid=report.agent_pid if report else None,
    )


def _health(condition: GpuCondition | None) -> dict[str, Any]:
    cause = None if condition is None else condition.cause
    if condition is None or cause is None or condition.healthy:
        return {"healthy": True}
    return {
        "healthy": False,
        "problem": cause.sentence(),
        "condition": condition.state.value,
        "causes": tuple(each.to_dict() for each in condition.causes),
    }


def node_state(node: Node, jobs: Iterable[Job]) -> str:
    """Return the state of a node as users see it; some of ``jobs`` may be moving away from it."""
    match closure_of(node, jobs):
        case Closure.DOWN | Closure.UNREACHABLE:
            return "UNREACHABLE"
        case Closure.CORDONED | Closure.DRAINING as closure:
            return closure.name
        case closure if node.reserved is not None:
            return "RESERVED"
        case closure:
            return "READY" if closure is None else closure.name


def _reason(node: Node, report: NodeReport | None) -> str:
    if report is None:
        return "its agent does not answer"
    if not node.reachable:
        return RAYLET_SILENT
    if node.quarantined and not node.cordoned:
        return f"{node.quarantined.sentence()}; its health is checked before jobs start here again, `orch nodes uncordon` ends the quarantine now"
    return " ".join(report.problems)


def gpu_states(
    jobs: Collection[Job],
    reports: Mapping[str, NodeReport],
    exporters: Exporters,
    cordoned: Collection[str],
    conditions: Mapping[str, GpuCondition],
) -> dict[tuple[str, str], int]:
    """Return how many GPUs of each host are busy, idle, broken or cordoned."""
    counts: dict[tuple[str, str], int] = {}
    held = {u for j in jobs if j.gang_open for s in j.seats for u in s.gpu_uuids}
    for node_id, report in reports.items():
        for state in ("busy", "idle", "broken", "cordoned"):
            counts.setdefault((report.hostname, state), 0)
        for gpu in report.gpus:
            broken = gpu.uuid in conditions and conditions[gpu.uuid].state in (GpuState.FAILING, GpuState.LOST)
            idle = "cordoned" if node_id in cordoned else "idle"
            state = "broken" if broken else "busy" if gpu.uuid in held else idle
            counts[report.hostname, state] += 1
    for node, _ in exporters.missing():
        counts[node, "broken"] += 1
    return counts


MAX_RESERVATIONS: Final = 100
STATES = {NodeVerb.CORDON: "CORDONED", NodeVerb.DRAIN: "DRAINING", NodeVerb.UNCORDON: "READY"}


class NodeActions:
    """Changes nodes. ``nodes`` marks them; ``reserve`` keeps bad GPUs from Ray; ``spawn`` runs a background task."""

    def __init__(
        self,
        loop: Loop,
        quarantine: NodeQuarantine,
        store: Store,
        nodes: LoopNodes,
        *,
        reserve: Callable[[], Coroutine[Any, Any, None]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._loop = loop
        self._quarantine = quarantine
        self._store = store
        self._nodes = nodes
        self._reserve = reserve
        self._spawn = spawn

    async def act(self, node: str, verb: NodeVerb, caller: Caller) -> v.NodeActionReply:
        """Cordon, drain or uncordon the node with this id or name. Raises NoSuchNodeError, BadRequestError, DiskFullError."""
        found = self._find(node)
        if verb is NodeVerb.UNCORDON:
            self._quarantine.forgive(found.id)
        else:
            self._quarantine.cordon(found.id, found.name, caller.user)
        await self._save(verb)
        self._nodes.mark_again()
        self._spawn(self._reserve())
        moved = await self._drain(found, caller.user) if verb is NodeVerb.DRAIN else ()
        state = STATES[verb]
        message = (
            f"{plural(len(moved), 'job saves and moves', 'jobs save and move')} away"
            if moved
            else f"{found.name} is {state.lower()}"
        )
        return v.NodeActionReply(node=found.name, state=state, message=message, jobs=moved)

    async def change(self, node: str, change: NodeChange, caller: Caller) -> v.NodeActionReply:
        """Change labels and reservations of the node with this id or name. Raises NoSuchNodeError, BadRequestError, DiskFullError."""
        found = self._find(node)
        if sum((bool(change.labels), change.reserve is not None, change.unreserve is not None)) != 1:
            raise BadRequestError("give either labels, or reserve, or unreserve", hint="send one request for each")
        if change.reserve is not None:
            message = self._reserve_node(found, change.reserve, caller.user)
        elif change.unreserve is not None:
            message = self._unreserve(found, change.unreserve)
        else:
            message = self._label(found, change)
        await self._save(f"the change of {found.name}")
        self._nodes.mark_again()
        there = nodes_at(self._loop.nodes, self._loop.now(), RunTimes())[found.id]
        state = node_state(there, self._loop.jobs.begun.values())
        return v.NodeActionReply(node=found.name, state=state, message=message)

    def _label(self, node: Node, change: NodeChange) -> str:
        missing = [key for key, value in change.labels.items() if value is None and key not in node.labels]
        if missing:
            raise BadRequestError(f"{node.name} has no label {', '.join(missing)}", hint=_labels(node.labels))
        if len(node.labels.keys() | change.labels.keys()) > MAX_LABELS:
            raise BadRequestError(f"a node has at most {MAX_LABELS} labels")
        return f"{node.name}: {_labels(self._quarantine.label(node.id, node.name, change.labels))}"

    def _reserve_node(self, node: Node, asked: ReservationRequest, by: str) -> str:
        end = asked.start + asked.seconds
        if end <= self._loop.now():
            raise BadRequestError("the reservation would have ended already", hint="give a later time, or a longer one")
        if len(node.reservations) >= MAX_RESERVATIONS:
            raise BadRequestError(f"a node has at most {MAX_RESERVATIONS} reservations")
        taken = {one.id for one in node.reservations}
        new_id = next(name for n in count(1) if (name := f"r{n}") not in taken)
        one = NodeReservation(id=new_id, start=asked.start, end=end, reason=asked.reason, by=by)
        known = sorted((*node.reservations, one), key=lambda each: (each.start, each.id))
        self._quarantine.reserve(node.id, node.name, tuple(known))
        stays = sum(node.id in job.nodes for job in self._loop.decided.active.values() if job.gang_open)
        runs = f"; {plural(stays, 'job')} there now: what still runs at its start is stopped" if stays else ""
        return f"{node.name} is reserved ({new_id}){runs}"

    def _unreserve(self, node: Node, named: str) -> str:
        known = [one.id for one in node.reservations]
        if named not in (*known, ""):
            raise BadRequestError(
                f"{node.name} has no reservation {named}", hint=f"it has {', '.join(known) or 'none'}"
            )
        if not named and len(known) != 1:
            hint = f"name one of {', '.join(known)}" if known else ""
            raise BadRequestError(f"{node.name} has {plural(len(known), 'reservation')}", hint=hint)
        gone = named or known[0]
        left = tuple(one for one in node.reservations if one.id != gone)
        self._quarantine.reserve(node.id, node.name, left)
        return f"reservation {gone} of {node.name} is removed"

    def _find(self, name: str) -> Node:
        found = [n for n in self._loop.nodes.values() if name in (n.id, n.name) or n.id.startswith(name)]
        if not found:
            raise NoSuchNodeError(f"there is no node {name!r}")
        if len(found) > 1:
            ids = ", ".join(n.id[:12] for n in found)
            raise BadRequestError(f"{name!r} means several nodes", hint=f"name one by its id: {ids}")
        return found[0]

    async def _save(self, what: str) -> None:
        places = self._quarantine.unsaved()
        try:
            await self._store.put_places(places)
        except StoreError as error:
            self._quarantine.keep(places)
            raise DiskFullError(f"{what} holds for now, but could not be written: {error}") from error

    async def _drain(self, node: Node, by: str) -> tuple[JobId, ...]:
        moved = tuple(j.id for j in self._loop.decided.active.values() if j.gang_open and node.id in j.nodes)
        for job_id in moved:
            await self._loop.command(lambda job_id=job_id: self._move_away(job_id, by))  # type: ignore[misc]  # mypy cannot infer a default's type
        return moved

    def _move_away(self, job_id: JobId, by: str) -> Sequence[Event]:
        job = self._loop.decided.get(job_id)
        return request_stop(job, StopPurpose.PREEMPT, ByNodeDrain(name=by), self._loop.now()) if job else []


def _labels(labels: Mapping[str, str]) -> str:
    return f"its labels are {', '.join(f'{key}={labels[key]}' for key in labels)}" if labels else "it has no labels"
