"""`orch nodes`: lists the nodes, and takes one out of service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_OK
from orchestrator.cli.commands.shared import Json
from orchestrator.cli.console import clean
from orchestrator.cli.render.table import Cell, Column, render_table
from orchestrator.cli.render.units import number, size
from orchestrator.cli.session import Session, print_json

if TYPE_CHECKING:
    from orchestrator.api.views import NodeView

nodes = typer.Typer(add_completion=False, rich_markup_mode=None, invoke_without_command=True)
Node = Annotated[str, typer.Argument(metavar="NODE", help="A node's name or id.")]

STATE_STYLES = {"READY": ("green",), "CORDONED": ("yellow",), "DRAINING": ("magenta",), "QUARANTINED": ("yellow",)}
COLUMNS = (
    Column("NODE", weight=1000),
    Column("STATE", weight=900),
    Column("GPUS USED", weight=800, right=True),
    Column("CPUS USED", weight=700, right=True),
    Column("MEMORY FREE", weight=300, right=True),
    Column("MODEL", weight=400),
    Column("JOBS", weight=600, shrink=True),
    Column("REASON", weight=500),
)


@nodes.callback()
def list_nodes(context: typer.Context, json: Json = False) -> int:
    """List the nodes: state, GPUs and CPUs as used/total, and the jobs that run there."""
    if context.invoked_subcommand is not None:
        return EXIT_OK
    session = Session()
    found = session.client().nodes()
    if json:
        print_json(session, {"nodes": [node.to_json() for node in found]})
        return EXIT_OK
    for line in render_table(session.console, COLUMNS, [_row(node) for node in found]) or ["no node has joined yet"]:
        session.console.print(line)
    for node in found:
        for gpu in node.gpus:
            if not gpu.healthy:
                session.console.print(f"{node.name}: GPU {gpu.index} ({gpu.uuid}): {clean(gpu.problem)}")
    return EXIT_OK


def _row(node: NodeView) -> list[Cell]:
    models = sorted({gpu.model for gpu in node.gpus if gpu.model})
    return [
        Cell(clean(node.name), ("bold",)),
        Cell(node.state, STATE_STYLES.get(node.state, ("red",))),
        Cell(_used(node, node.gpus_free, node.gpus_total) if node.gpus_total else ""),
        Cell(_used(node, node.cpus_free, node.cpus_total)),
        Cell("" if node.memory_free_bytes is None else size(node.memory_free_bytes)),
        Cell(clean(", ".join(models))),
        Cell(", ".join(node.jobs)),
        Cell(clean(node.reason), ("dim",)),
    ]


def _used(node: NodeView, free: float, total: float) -> str:
    used = "-" if node.state == "UNREACHABLE" else number(round(max(total - free, 0.0), 4))
    return f"{used}/{number(total)}"


@nodes.command()
def cordon(node: Node, json: Json = False) -> int:
    """Stop scheduling to a node; jobs that run there keep running."""
    return _act(node, "cordon", as_json=json)


@nodes.command()
def drain(node: Node, json: Json = False) -> int:
    """Cordon a node and move its jobs away: they save, go back to the queue and start elsewhere."""
    return _act(node, "drain", as_json=json)


@nodes.command()
def uncordon(node: Node, json: Json = False) -> int:
    """Allow scheduling to a node again."""
    return _act(node, "uncordon", as_json=json)


def _act(node: str, verb: str, *, as_json: bool) -> int:
    session = Session()
    reply = session.client().node_action(node, verb)
    if as_json:
        print_json(session, reply.to_json())
        return EXIT_OK
    session.console.print(reply.message)
    if reply.jobs:
        session.console.print(f"moves {', '.join(reply.jobs)}")
    return EXIT_OK
