"""Page of one node: its state, its GPUs, their history by job, and its actions with a confirmation."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from markupsafe import Markup
from starlette.responses import RedirectResponse, Response

from orchestrator.api.errors import NoSuchNodeError, NotFoundError
from orchestrator.api.service import NodeVerb
from orchestrator.web.answers import caller_of, event_stream, markup, node_address, owner_of_daemon, page
from orchestrator.web.charts import Window, window_of
from orchestrator.web.overview import GPU_AGE_SECONDS
from orchestrator.web.rendering import render_parts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.requests import Request

    from orchestrator.api.service import JobService
    from orchestrator.api.views import NodeView
    from orchestrator.web.charts import ChartCache

PARTS: Final = ("head", "gpus", "charts", "uses")
MAX_USES: Final = 50

EFFECTS: Final = {
    NodeVerb.CORDON: "No new job starts there; running jobs continue. Uncordon undoes it.",
    NodeVerb.DRAIN: "No new job starts there, and the running jobs save, stop and start again elsewhere.",
    NodeVerb.UNCORDON: "Jobs start there again; quarantines of the node and of its GPUs are forgotten.",
}


class NodeViews:
    """Routes of a node. ``streamed`` returns the events that keep a page current, from its key and its rendering."""

    def __init__(
        self,
        service: JobService,
        shelf: ChartCache,
        streamed: Callable[[tuple[object, ...], Callable[[], Awaitable[Mapping[str, str]]]], Any],
    ) -> None:
        self._service = service
        self._shelf = shelf
        self._streamed = streamed

    async def node(self, request: Request) -> Response:
        """Show one node, or one GPU of it (``gpu``)."""
        name, chosen, window = _asked(request)
        node = await self._find(name)
        if node.name != name:
            return RedirectResponse(node_address(node.name), status_code=HTTPStatus.SEE_OTHER)
        parts = await self._parts(name, chosen, window, may_act=caller_of(request).is_owner)
        query = urlencode({**({"gpu": chosen} if chosen else {}), **window.query})
        live = f"/live{node_address(name)}{f'?{query}' if query else ''}"
        return page(request, "node.html", title=name, live=live, parts=markup(parts), node=node)

    async def live(self, request: Request) -> Response:
        """Stream the node."""
        name, chosen, window = _asked(request)
        may_act = caller_of(request).is_owner
        await self._find(name)

        def draw() -> Awaitable[Mapping[str, str]]:
            return self._parts(name, chosen, window, may_act=may_act)

        return event_stream(self._streamed(("node", name, chosen, window, may_act), draw))

    async def confirm(self, request: Request) -> Response:
        """Show the effect of an action, and the button that runs it."""
        verb = _verb(request)
        owner_of_daemon(request, f"{verb} a node")
        node = await self._find(request.path_params["name"])
        title = f"{verb.capitalize()} {node.name}?"
        return page(request, "confirm_node.html", title=title, verb=verb, node=node, effect=EFFECTS[verb])

    async def act(self, request: Request) -> Response:
        """Cordon, drain or uncordon the node."""
        verb = _verb(request)
        caller = owner_of_daemon(request, f"{verb} a node")
        node = await self._find(request.path_params["name"])
        reply = await self._service.node_action(node.name, verb, caller)
        address = f"{node_address(node.name)}?{urlencode({'note': reply.message})}"
        return RedirectResponse(address, status_code=HTTPStatus.SEE_OTHER)

    async def _find(self, name: str) -> NodeView:
        for node in await self._service.nodes():
            if name in (node.name, node.id):
                return node
        raise NoSuchNodeError(f"no node is called {name!r}", hint="the overview lists them")

    async def _parts(self, name: str, chosen: str, window: Window, *, may_act: bool) -> Mapping[str, str]:
        node = await self._find(name)
        rows = [row for row in await self._service.gpus(GPU_AGE_SECONDS) if row.get("node") == node.name]
        known = [str(row.get("gpu_uuid")) for row in rows]
        if chosen and chosen not in known:
            raise NotFoundError(f"{node.name} has no GPU {chosen!r}", hint="its page without ?gpu= lists its GPUs")
        history, charts = await self._shelf.of_gpus(node.name, [chosen] if chosen else known, chosen, window)
        return render_parts(
            "node.html",
            PARTS,
            node=node,
            rows=[row for row in rows if not chosen or row.get("gpu_uuid") == chosen],
            chosen=chosen,
            verbs=verbs_for(node, may_act=may_act),
            uses=history.uses[:MAX_USES],
            uses_count=len(history.uses),
            indices={str(row.get("gpu_uuid")): row.get("index") for row in rows},
            charts=Markup(charts),  # noqa: S704 - a template's output, escaped there
        )


def verbs_for(node: NodeView, *, may_act: bool) -> list[NodeVerb]:
    """Return the commands that apply to the node in its state."""
    if not may_act:
        return []
    return (
        [NodeVerb.CORDON, NodeVerb.DRAIN]
        if node.state in ("READY", "RESERVED")
        else [NodeVerb.UNCORDON, NodeVerb.DRAIN]
    )


def _asked(request: Request) -> tuple[str, str, Window]:
    return request.path_params["name"], request.query_params.get("gpu", ""), window_of(request.query_params)


def _verb(request: Request) -> NodeVerb:
    text = request.path_params["verb"]
    if text not in EFFECTS:
        raise NotFoundError(f"there is no page {request.url.path}")
    return NodeVerb(text)
