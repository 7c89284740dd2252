"""`orch nodes`: lists the nodes, labels and reserves them, and takes one out of service."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError
from orchestrator.cli.commands.shared import Json
from orchestrator.cli.console import clean
from orchestrator.cli.render.table import Cell, Column, render_table
from orchestrator.cli.session import Session, answer
from orchestrator.cli.times import parse_span_within, parse_start
from orchestrator.spec.fields import LABEL_PATTERN
from orchestrator.units import clock, number, size

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.api.client import Client
    from orchestrator.api.queue_views import ReservationView
    from orchestrator.api.views import NodeActionReply, NodeView

nodes = typer.Typer(add_completion=False, rich_markup_mode=None, invoke_without_command=True)
Node = Annotated[str, typer.Argument(metavar="NODE", help="A node's name or id.")]

STATE_STYLES = {
    "READY": ("green",),
    "CORDONED": ("yellow",),
    "DRAINING": ("magenta",),
    "QUARANTINED": ("yellow",),
    "RESERVED": ("yellow",),
}
COLUMNS: tuple[Column[NodeView], ...] = (
    Column("NODE", lambda node: node.name, weight=1000, styles=("bold",)),
    Column("STATE", lambda node: Cell(node.state, STATE_STYLES.get(node.state, ("red",))), weight=900),
    Column(
        "GPUS USED",
        lambda node: _used(node, node.gpus_free, node.gpus_total) if node.gpus_total else "",
        weight=800,
        right=True,
    ),
    Column("CPUS USED", lambda node: _used(node, node.cpus_free, node.cpus_total), weight=700, right=True),
    Column("MEMORY FREE", lambda node: size(node.memory_free_bytes), weight=300, right=True),
    Column("MODEL", lambda node: ", ".join(sorted({gpu.model for gpu in node.gpus if gpu.model})), weight=400),
    Column("LABELS", lambda node: ", ".join(f"{k}={v}" for k, v in node.labels.items()), weight=350, shrink=True),
    Column("JOBS", lambda node: ", ".join(node.jobs), weight=600, shrink=True),
    Column("REASON", lambda node: node.reason, weight=500, styles=("dim",)),
)
RESERVED: tuple[Column[tuple[NodeView, ReservationView]], ...] = (
    Column("NODE", lambda each: each[0].name, weight=1000, styles=("bold",)),
    Column("ID", lambda each: each[1].id, weight=900),
    Column("FROM", lambda each: clock(each[1].start_at), weight=800),
    Column("TO", lambda each: clock(each[1].end_at), weight=800),
    Column("BY", lambda each: each[1].by, weight=400),
    Column("REASON", lambda each: each[1].reason, weight=500, shrink=True, styles=("dim",)),
)


@nodes.callback()
def list_nodes(context: typer.Context, json: Json = False) -> int:
    """List the nodes: state, GPUs and CPUs as used/total, and the jobs that run there."""
    if context.invoked_subcommand is not None:
        return EXIT_OK
    session = Session()
    found = session.client().nodes()
    broken = [
        f"{node.name}: GPU {gpu.index} ({gpu.uuid}): {clean(gpu.problem)}"
        for node in found
        for gpu in node.gpus
        if not gpu.healthy
    ]
    lines = render_table(session.console, COLUMNS, found) or ["no node has joined yet"]
    return answer(session, [*lines, *broken], {"nodes": [node.to_json() for node in found]}, as_json=json)


def _used(node: NodeView, free: float, total: float) -> str:
    used = "-" if node.state == "UNREACHABLE" else number(round(max(total - free, 0.0), 4))
    return f"{used}/{number(total)}"


@nodes.command()
def cordon(node: Node, json: Json = False) -> int:
    """Stop scheduling to a node; jobs that run there keep running."""
    return _change(lambda client: client.node_action(node, "cordon"), as_json=json)


@nodes.command()
def drain(node: Node, json: Json = False) -> int:
    """Cordon a node and move its jobs away: they save, go back to the queue and start elsewhere."""
    return _change(lambda client: client.node_action(node, "drain"), as_json=json)


@nodes.command()
def uncordon(node: Node, json: Json = False) -> int:
    """Allow scheduling to a node again."""
    return _change(lambda client: client.node_action(node, "uncordon"), as_json=json)


@nodes.command("label")
def label_node(
    node: Node,
    labels: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Labels to set.", show_default=False)
    ] = None,
    *,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="KEY", help="Remove a label; may be repeated.")
    ] = None,
    json: Json = False,
) -> int:
    """Set labels of a node, for `resources.node_labels` of jobs; `topology.NAME` groups nodes. Only for the daemon's owner."""
    changes: dict[str, str | None] = dict(map(_pair, labels or ()))
    both = sorted(changes.keys() & set(remove or ()))
    if both:
        raise BadRequestError(f"{', '.join(both)}: set and removed at once", hint="leave one of them out")
    changes |= dict.fromkeys(remove or ())
    if not changes:
        raise BadRequestError("no label to set or to remove", hint="for example disk=nvme, or --remove disk")
    return _change(lambda client: client.change_node(node, labels=changes), as_json=json)


@nodes.command()
def reserve(
    node: Node,
    *,
    start: Annotated[
        str,
        typer.Option(
            "--from", metavar="TIME", help="When it begins: now, a span from now (2h), 20:00, or 2026-11-20T14:30."
        ),
    ],
    lasts: Annotated[str, typer.Option("--for", metavar="DURATION", help="How long it lasts, such as 2h.")],
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="The reason; jobs that wait for the reservation show it.")
    ] = "",
    json: Json = False,
) -> int:
    """Reserve a node for its maintenance: no job is placed there that would still be running then, and jobs that are running then save and move. Only for the daemon's owner."""
    from orchestrator.api.requests import ReservationRequest

    now = time.time()
    begins = now if start == "now" else datetime.fromisoformat(parse_start(start, "--from", now)).timestamp()
    asked = ReservationRequest(
        start=begins, seconds=parse_span_within(lasts, "--for", least=1.0, most=366 * 86400.0), reason=reason
    )
    return _change(lambda client: client.change_node(node, reserve=asked), as_json=json)


@nodes.command()
def reservations(json: Json = False) -> int:
    """List the reservations of all nodes: current and future ones."""
    session = Session()
    known = [(node, one) for node in session.client().nodes() for one in node.reservations]
    rows = sorted(known, key=lambda each: each[1].start_at)
    lines = render_table(session.console, RESERVED, rows) or ["no node is reserved"]
    found = [{"node": node.name, **one.to_json()} for node, one in known]
    return answer(session, lines, {"reservations": found}, as_json=json)


@nodes.command()
def unreserve(
    node: Node,
    reservation: Annotated[
        str,
        typer.Argument(
            metavar="[ID]", help="The reservation's id, as `orch nodes reservations` shows it.", show_default=False
        ),
    ] = "",
    json: Json = False,
) -> int:
    """Remove a reservation of a node: jobs start there again. Only for the daemon's owner."""
    return _change(lambda client: client.change_node(node, unreserve=reservation), as_json=json)


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or re.fullmatch(LABEL_PATTERN, key) is None:
        hint = "write KEY=VALUE; a key has letters, digits and - _ . / inside, at most 63"
        raise BadRequestError(f"{text!r} is not a label", hint=hint)
    return key, value


def _change(ask: Callable[[Client], NodeActionReply], *, as_json: bool) -> int:
    session = Session()
    reply = ask(session.client())
    lines = [clean(reply.message), *([f"moves {', '.join(reply.jobs)}"] if reply.jobs else [])]
    return answer(session, lines, reply.to_json(), as_json=as_json)
