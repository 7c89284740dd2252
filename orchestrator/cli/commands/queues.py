"""`orch queue`: the order of waiting jobs, the shares of queues and users, and changing a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError
from orchestrator.cli.commands.shared import Json
from orchestrator.cli.session import Session, print_json

if TYPE_CHECKING:
    from orchestrator.api.queue_views import QueueView

queue = typer.Typer(add_completion=False, rich_markup_mode=None, invoke_without_command=True)


@queue.callback()
def list_queue(context: typer.Context, json: Json = False) -> int:
    """List waiting jobs in scheduling order, and the shares of queues and users.

    With --json: `jobs`, `queues` and `users`. A share is a part of the cluster: what is held now, and the mean of the past.
    """
    from orchestrator.cli.queue_view import show_queue

    return EXIT_OK if context.invoked_subcommand is not None else show_queue(Session(), as_json=json)


@queue.command("set")
def set_queue(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The queue; created if it does not exist.")],
    *,
    guaranteed: Annotated[
        int | None, typer.Option("--guaranteed", metavar="GPUS", help="GPUs that are served before others borrow.")
    ] = None,
    maximum: Annotated[
        str | None, typer.Option("--maximum", metavar="GPUS", help="GPUs that it never exceeds; `none` for no maximum.")
    ] = None,
    weight: Annotated[
        float | None, typer.Option("--weight", metavar="W", help="Its part of what is free beyond guarantees.")
    ] = None,
    parent: Annotated[
        str | None, typer.Option("--parent", metavar="QUEUE", help="The queue that it is a part of; `none` for none.")
    ] = None,
    json: Json = False,
) -> int:
    """Change or create a queue, at once and across restarts of the daemon. Only for the daemon's owner."""
    if guaranteed is None and maximum is None and weight is None and parent is None:
        raise BadRequestError("nothing to change was given", hint="for example --guaranteed 4 --maximum 8 --weight 2")
    session = Session()
    view = session.client().set_queue(
        name,
        guaranteed=guaranteed,
        maximum=_gpus(maximum),
        unbounded=maximum == "none",
        weight=weight,
        parent="" if parent == "none" else parent,
    )
    if json:
        print_json(session, view.to_json())
    else:
        session.console.print(_sentence(view))
    return EXIT_OK


def _gpus(text: str | None) -> int | None:
    if text is None or text == "none":
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 7:
        raise BadRequestError(f"--maximum {text!r} is not a whole number of GPUs", hint="for example 8, or none")
    return int(text)


def _sentence(view: QueueView) -> str:
    maximum = "no maximum" if view.maximum is None else f"a maximum of {view.maximum}"
    under = f" under {view.parent}" if view.parent else ""
    return f"queue {view.name}{under} has {view.guaranteed} guaranteed GPUs, {maximum} and weight {view.weight:g}"
