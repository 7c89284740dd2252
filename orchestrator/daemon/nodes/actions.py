"""Cordons, drains, uncordons, labels and reserves nodes for users."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, Final

from orchestrator.api import views as v
from orchestrator.api.errors import BadRequestError, DiskFullError, NoSuchNodeError
from orchestrator.api.queue_views import MOST_LABELS
from orchestrator.api.service import NodeVerb
from orchestrator.core.cluster import NodeReservation
from orchestrator.core.facts.requesters import ByNodeDrain
from orchestrator.core.lifecycle.advance import request_stop
from orchestrator.core.scheduler.durations import RunTimes
from orchestrator.core.scheduler.reservations import nodes_at
from orchestrator.core.states import StopPurpose
from orchestrator.daemon.nodes.queries import node_state
from orchestrator.store.errors import StoreError
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from orchestrator.api.requests import NodeChange, ReservationRequest
    from orchestrator.api.service import Caller
    from orchestrator.core.cluster import Node
    from orchestrator.core.events import Event
    from orchestrator.core.ids import JobId
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.nodes.care import LoopNodes
    from orchestrator.daemon.nodes.quarantine import NodeQuarantine
    from orchestrator.store.port import Store

MOST_RESERVATIONS: Final = 100
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
        if len(node.labels.keys() | change.labels.keys()) > MOST_LABELS:
            raise BadRequestError(f"a node has at most {MOST_LABELS} labels")
        return f"{node.name}: {_labels(self._quarantine.label(node.id, node.name, change.labels))}"

    def _reserve_node(self, node: Node, asked: ReservationRequest, by: str) -> str:
        end = asked.start + asked.seconds
        if end <= self._loop.now():
            raise BadRequestError("the reservation would have ended already", hint="give a later time, or a longer one")
        if len(node.reservations) >= MOST_RESERVATIONS:
            raise BadRequestError(f"a node has at most {MOST_RESERVATIONS} reservations")
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
