"""`orch dashboards`: the boards and rules that orch carries, written to a folder or sent to a Grafana."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.api.errors import BadRequestError, DaemonUnreachableError, RefusedError
from orchestrator.cli.commands.shared import Json
from orchestrator.cli.session import Session, answer, writing
from orchestrator.spec import token_file as token_file_reader
from orchestrator.telemetry import grafana

dashboards = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The target directory; created if it does not exist.")]
Url = Annotated[str, typer.Option("--url", metavar="URL", help="Grafana's address.")]
Token = Annotated[
    str,
    typer.Option(
        "--token", metavar="TOKEN", envvar="GRAFANA_TOKEN", help="A service account's token.", show_default=False
    ),
]
TokenFile = Annotated[Path | None, typer.Option("--token-file", metavar="FILE", help="A file with the token.")]

Docs = Annotated[
    str,
    typer.Option(
        "--docs-url",
        metavar="URL",
        envvar="ORCH_DOCS_URL",
        help="Where docs/ is served: findings and alerts link to it.",
        show_default=False,
    ),
]


@dashboards.callback()
def about() -> None:
    """Write the Grafana boards and Prometheus rules to files, or send the boards to a Grafana."""


@dashboards.command()
def export(folder: Folder, docs_url: Docs = "", json: Json = False) -> int:
    """Write the boards (JSON) and the rules (YAML) to a folder, for provisioning or import."""
    session = Session()
    with writing(folder, "name a folder of your own"):
        files = [str(path) for path in grafana.export(folder, _docs(docs_url))]
    return answer(session, files, {"files": files}, as_json=json)


@dashboards.command()
def push(
    url: Url = "http://127.0.0.1:3000",
    token: Token = "",
    token_file: TokenFile = None,
    docs_url: Docs = "",
    json: Json = False,
) -> int:
    """Send the boards to a Grafana, into its folder orch; existing boards are replaced."""
    session = Session()
    try:
        pushed = grafana.push(url, _token(token, token_file), _docs(docs_url))
    except grafana.GrafanaError as error:
        kind = DaemonUnreachableError if error.unreachable else RefusedError
        raise kind(error.message, hint=error.hint) from error
    boards = [{"uid": b.uid, "title": b.title, "url": b.url, "version": b.version} for b in pushed]
    return answer(session, [f"{b.title}  {b.url}" for b in pushed], {"boards": boards}, as_json=json)


def _token(token: str, file: Path | None) -> str:
    if file is None:
        return token
    try:
        return token_file_reader.read(file)
    except token_file_reader.TokenExposedError as error:
        raise RefusedError(error.message, hint=error.remedy) from error
    except token_file_reader.TokenFileError as error:
        raise BadRequestError(
            f"the token cannot be read: {error.message}", hint="name a file that holds nothing else"
        ) from error


def _docs(url: str) -> str:
    """Return the address without its last slash. Raises BadRequestError for an invalid one."""
    if url and (not url.startswith(("http://", "https://")) or any(sign.isspace() or sign in "\"'<>#" for sign in url)):
        raise BadRequestError(
            f"--docs-url {url!r} is not an address", hint="write it like https://example.org/orch/docs"
        )
    return url.rstrip("/")
