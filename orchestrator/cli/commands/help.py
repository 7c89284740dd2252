"""`orch help`: the help of a command, as `--help` after it shows."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError


def help(  # noqa: A001 - the command's name
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="CMD", help="A command, as in `nodes drain`; without it, the list of commands."),
    ] = None,
) -> int:
    """Show what a command does and its options: `orch help submit` is `orch submit --help`."""
    place: Any = context.find_root()
    for word in words or ():
        place = _inside(place, word)
    typer.echo(place.get_help())
    return EXIT_OK


def _inside(place: Any, word: str) -> Any:
    """The context of a command below ``place``. Raises BadRequestError where there is none of that name."""
    known = getattr(place.command, "commands", {})
    found = known.get(word)
    if found is None:
        close = get_close_matches(word, known)
        hint = f"did you mean {close[0]}?" if close else f"`{place.command_path} --help` lists what there is"
        raise BadRequestError(f"{place.command_path} has no command {word!r}", hint=hint)
    return type(place)(found, parent=place, info_name=found.name)
