"""The context of a command: the environment, the terminal and the daemon's address, read once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from orchestrator.cli.console import Console

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.api.client import Client
    from orchestrator.api.transport.endpoint import Endpoint
    from orchestrator.api.transport.following import Patience


class Session:
    """One run of the command line."""

    def __init__(self, *, quiet: bool = False, environ: Mapping[str, str] | None = None) -> None:
        self.environ: Mapping[str, str] = os.environ if environ is None else environ
        self.console = Console(self.environ, quiet=quiet)

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint of the daemon that the environment names."""
        from orchestrator.api.transport.endpoint import endpoint_from

        return endpoint_from(self.environ)

    def client(self) -> Client:
        """Return a client of that daemon."""
        from orchestrator.api.client import Client

        return Client(self.endpoint, environ=self.environ)

    def patience(self) -> Patience:
        """Return the Patience for a daemon that restarts; it prints a note once for each absence."""
        from orchestrator.api.transport.following import Patience

        return Patience(
            notice=lambda error: self.console.note(f"{error.message}; waiting for it to come back (jobs keep running)")
        )


def print_json(session: Session, value: object) -> None:
    """Print one JSON document: indented for a person, compact for a program."""
    import json

    indent = 2 if session.console.is_terminal else None
    session.console.print(json.dumps(value, ensure_ascii=False, indent=indent))
