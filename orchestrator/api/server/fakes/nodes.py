# ruff: noqa: D102 - JobService documents the methods
"""The part of the in-memory service that serves nodes; see ``testing.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.api.errors import NoSuchNodeError
from orchestrator.api.views import NodeActionReply, NodeView, ReservationView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.api.queue_views import NodeChange
    from orchestrator.api.service import Caller, NodeVerb


class FakeNodes:
    """Serves nodes by name, in the state that was last set."""

    calls: list[tuple[str, Any]]
    _nodes: dict[str, NodeView]

    async def nodes(self) -> Sequence[NodeView]:
        return sorted(self._nodes.values(), key=lambda node: node.name)

    async def node_action(self, node: str, verb: NodeVerb, caller: Caller) -> NodeActionReply:
        self.calls.append((verb, caller.user))
        state = {"cordon": "CORDONED", "drain": "DRAINING", "uncordon": "READY"}[verb]
        self._nodes[node] = replace(self._known(node), state=state)
        return NodeActionReply(node=node, state=state, message=f"{node} is {state.lower()}")

    async def change_node(self, node: str, change: NodeChange, caller: Caller) -> NodeActionReply:
        self.calls.append(("change_node", (node, change, caller.user)))
        known = self._known(node)
        after = {**known.labels, **change.labels}
        labels = {key: value for key, value in after.items() if value is not None}
        kept = tuple(one for one in known.reservations if one.id != change.unreserve)
        if (asked := change.reserve) is not None:
            view = ReservationView(
                id=f"r{len(kept) + 1}",
                start_at=asked.start,
                end_at=asked.start + asked.seconds,
                reason=asked.reason,
                by=caller.user,
            )
            kept = (*kept, view)
        self._nodes[node] = replace(known, labels=labels, reservations=kept)
        return NodeActionReply(node=node, state=known.state, message=f"{node} has {len(labels)} labels")

    def _known(self, node: str) -> NodeView:
        if node not in self._nodes:
            raise NoSuchNodeError(f"no node is called {node!r}")
        return self._nodes[node]
