"""`orch login`: send later commands to a daemon on another machine."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Annotated

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError
from orchestrator.api.transport.endpoint import endpoint_from, login_path, read_login, tcp_endpoint
from orchestrator.cli.commands.shared import Json
from orchestrator.cli.session import Session, print_json


def login(
    address: Annotated[
        str | None, typer.Argument(metavar="ADDRESS", help="http://host:port of the daemon (`orch up --listen`).")
    ] = None,
    token_file: Annotated[
        str,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="A file with the daemon's token; without it, the command prompts for the token.",
        ),
    ] = "",
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove address and token, and use this machine's daemon again.")
    ] = False,
    json: Json = False,
) -> int:
    """Send every command to a daemon on another machine, with its token; without ADDRESS, print the current address.

    The address and the token are checked first, then stored in ORCH_HOME, readable by you alone. ORCH_ADDRESS and ORCH_TOKEN take precedence.
    """
    session = Session()
    if forget:
        if address:
            raise BadRequestError("--forget takes no ADDRESS", hint="orch login --forget")
        return _forget(session, json=json)
    if address is None:
        return _where(session, json=json)
    endpoint = tcp_endpoint(address)
    token = _token(session, token_file)
    from orchestrator.api.client import Client

    health = Client(endpoint._replace(token=token), environ=session.environ).health()
    _write(session, f"{endpoint.label}\n{token}\n")
    if json:
        print_json(session, {"address": endpoint.label, "version": health.version})
    else:
        session.console.print(f"commands go to {endpoint.label}; `orch login --forget` ends that")
        _warn(session)
    return EXIT_OK


def _warn(session: Session) -> None:
    if session.environ.get("ORCH_ADDRESS"):
        session.console.note(f"ORCH_ADDRESS={session.environ['ORCH_ADDRESS']} takes precedence")


def _where(session: Session, *, json: bool) -> int:
    endpoint = session.endpoint
    if json:
        print_json(session, {"address": endpoint.label, "remote": not endpoint.socket_path})
        return EXIT_OK
    session.console.print(f"commands go to {endpoint.label}")
    return EXIT_OK


def _forget(session: Session, *, json: bool) -> int:
    path = login_path(session.environ)
    was = os.path.lexists(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    if json:
        print_json(session, {"address": endpoint_from(session.environ).label, "was_logged_in": was})
    else:
        session.console.print("logged out" if was else "there was no login")
        _warn(session)
    return EXIT_OK


def _token(session: Session, token_file: str) -> str:
    """Read the token: file, environment, standard input, or keyboard. Raises BadRequestError, RefusedError."""
    if token_file:
        from orchestrator.api.launch import read_token

        return read_token(token_file)
    if given := session.environ.get("ORCH_TOKEN", ""):
        return given
    if sys.stdin.isatty():
        import getpass

        token = getpass.getpass("token: ")
    else:
        token = sys.stdin.readline(4096)
    token = token.strip()
    if not token or not token.isprintable() or not token.isascii():
        raise BadRequestError("there is no token", hint="--token-file FILE, ORCH_TOKEN, or a line on standard input")
    return token


def _write(session: Session, text: str) -> None:
    from pathlib import Path

    from orchestrator.durable_files import write_whole
    from orchestrator.private_files import make_private

    path = login_path(session.environ)
    make_private(Path(path).parent)
    write_whole(Path(path), text.encode())
    read_login(session.environ)
