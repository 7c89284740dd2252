"""`orch ui`: the daemon's page in a browser, signed in by a link that works once."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.api.errors import EXIT_OK
from orchestrator.cli.commands.shared import Json
from orchestrator.cli.render.units import span
from orchestrator.cli.session import Session, print_json


def ui(
    print_link: Annotated[bool, typer.Option("--print", help="Print the link instead of opening a browser.")] = False,
    json: Json = False,
) -> int:
    """Open the page of jobs, GPUs and nodes in a browser, signed in as you."""
    session = Session()
    reply = session.client().page_link()
    if json:
        print_json(session, reply.to_json())
        return EXIT_OK
    if not print_link and _opened(reply.url):
        session.console.print(f"opened {reply.address}")
        return EXIT_OK
    session.console.print(reply.url)
    session.console.note(f"it signs in once, within {span(reply.valid_seconds)}; then {reply.address} is enough")
    return EXIT_OK


def _opened(url: str) -> bool:
    import webbrowser

    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False
