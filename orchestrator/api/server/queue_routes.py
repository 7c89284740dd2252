"""Routes of queues and of settings of nodes: every user may read, only the daemon's owner may change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Path, Query, Request
from pydantic import Field, StringConstraints

from orchestrator.api.protocol import API_PREFIX
from orchestrator.api.queue_views import (
    MOST_LABELS,
    NodeChange,
    OutlookView,
    QueueChange,
    QueueShares,
    QueueView,
    ReservationRequest,
)
from orchestrator.api.server.bodies import Body
from orchestrator.api.server.ownership import ID_PATTERN, caller_of
from orchestrator.api.views import NodeActionReply
from orchestrator.spec.fields.rules import LABEL_PATTERN
from orchestrator.spec.queues import MOST_GPUS, MOST_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI
    from fastapi.responses import Response

    from orchestrator.api.service import Caller, JobService
    from orchestrator.api.view import View

MOST_REFERENCE = 200
MOST_VALUE = 255
MOST_TIME = 253_402_300_799.0  # the year 9999
MOST_SECONDS = 366 * 86400.0
NAME_PATTERN = r"^[a-z0-9](?:[a-z0-9-]{0,48}[a-z0-9])?$"


class QueueBody(Body):
    """Changes of a queue; a value that is left out stays."""

    guaranteed: int | None = Field(default=None, ge=0, le=MOST_GPUS)
    maximum: int | None = Field(default=None, ge=0, le=MOST_GPUS)
    unbounded: bool = False
    weight: float | None = Field(default=None, gt=0, le=MOST_WEIGHT)
    parent: str | None = Field(default=None, pattern=r"^(?:[a-z0-9](?:[a-z0-9-]{0,48}[a-z0-9])?)?$")

    def request(self) -> QueueChange:
        """Return the service's record."""
        return QueueChange(
            guaranteed=self.guaranteed,
            maximum=self.maximum,
            unbounded=self.unbounded,
            weight=self.weight,
            parent=self.parent,
        )


NodeRef = Annotated[str, Path(pattern=ID_PATTERN, description="A node's id or name")]
LabelKey = Annotated[str, StringConstraints(pattern=f"^{LABEL_PATTERN}$")]
LabelValue = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]*$", max_length=MOST_VALUE)]


class ReservationBody(Body):
    """Reservation of a node: its start in Unix time, and its length in seconds."""

    start: float = Field(ge=0, le=MOST_TIME, allow_inf_nan=False)
    seconds: float = Field(gt=0, le=MOST_SECONDS, allow_inf_nan=False)
    reason: LabelValue = ""


class NodeBody(Body):
    """Changes of a node; a label of null is removed."""

    labels: dict[LabelKey, LabelValue | None] = Field(default_factory=dict, max_length=MOST_LABELS)
    reserve: ReservationBody | None = None
    unreserve: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]{0,20}$")] | None = None

    def request(self) -> NodeChange:
        """Return the service's record."""
        asked = self.reserve
        reserve = (
            None if asked is None else ReservationRequest(start=asked.start, seconds=asked.seconds, reason=asked.reason)
        )
        return NodeChange(labels=self.labels, reserve=reserve, unreserve=self.unreserve)


def add_node_routes(
    app: FastAPI, service: JobService, owner: Callable[[Request, str], Caller], answer: Callable[[View], Response]
) -> None:
    """Add the routes; ``owner`` as in ``add_queue_routes``."""

    @app.post(f"{API_PREFIX}/nodes/{{node}}", response_model=NodeActionReply)
    async def change_node(node: NodeRef, body: NodeBody, request: Request) -> Response:
        """Change labels and reservations of a node."""
        caller = owner(request, "change a node")
        return answer(await service.change_node(node, body.request(), caller))


def add_queue_routes(
    app: FastAPI, service: JobService, owner: Callable[[Request, str], Caller], answer: Callable[[View], Response]
) -> None:
    """Add the routes; ``owner`` returns the caller if it is the daemon's owner, else it raises."""

    @app.get(f"{API_PREFIX}/queues", response_model=QueueShares)
    async def queues() -> Response:
        """Return the order of waiting jobs, and the shares of queues and users."""
        return answer(await service.queue_shares())

    @app.get(f"{API_PREFIX}/outlook", response_model=OutlookView)
    async def outlook(request: Request, job: Annotated[str, Query(max_length=MOST_REFERENCE)] = "") -> Response:
        """Return when a job is expected to start and why; without ``job``, the starts of the queue's first jobs."""
        return answer(await service.outlook(await service.resolve(job, caller_of(request)) if job else None))

    @app.post(f"{API_PREFIX}/queues/{{name}}", response_model=QueueView)
    async def set_queue(
        name: Annotated[str, Path(pattern=NAME_PATTERN)], body: QueueBody, request: Request
    ) -> Response:
        """Change or create a queue."""
        caller = owner(request, "change a queue")
        return answer(await service.set_queue(name, body.request(), caller))
