"""`orch init`, `schema`, `completion` and `help`: files and texts for people, editors and shells."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError, RefusedError
from orchestrator.cli.app import COMPLETION_VARIABLE
from orchestrator.cli.session import Session


def init(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script that the job runs.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write; - is standard output.")
    ] = Path("job.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> int:
    """Write a commented job.yaml for a script."""
    from orchestrator.spec.problems import BadValueError
    from orchestrator.spec.reader.template import init_text

    session = Session()
    base = Path.cwd() if str(output) == "-" else output.parent
    inside = os.path.relpath(script, base)  # working_dir is the file's directory
    if not Path(script).is_file():
        raise BadRequestError(f"{script} not found in {Path.cwd()}", hint="name an existing file, such as train.py")
    try:
        text = init_text(inside)
    except (BadValueError, ValueError) as error:
        raise BadRequestError(f"{script}: {error}", hint="rename the script") from error
    if str(output) == "-":
        session.console.out.write(text)
        return EXIT_OK
    try:
        with output.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise RefusedError(f"{output} exists", hint="--force overwrites it, -o writes elsewhere") from error
    except OSError as error:
        raise BadRequestError(f"{output} cannot be written: {error.strerror}", hint="-o writes elsewhere") from error
    session.console.print(str(output))
    session.console.note(f"check it, then: orch submit {output}")
    return EXIT_OK


def schema() -> int:
    """Print the JSON Schema of job.yaml, for editors that complete and check it."""
    import json

    from orchestrator.spec.job import job_schema

    Session().console.print(json.dumps(job_schema(), indent=2, ensure_ascii=False))
    return EXIT_OK


class Shell(StrEnum):
    """The shells that can complete `orch`."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> int:
    """Print the shell's completion script: `eval "$(orch completion bash)"` in ~/.bashrc turns it on."""
    from typer._completion_shared import get_completion_script

    text = get_completion_script(prog_name="orch", complete_var=COMPLETION_VARIABLE, shell=shell.value)
    Session().console.print(text)
    return EXIT_OK


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
    """Return the context of a command below ``place``. Raises BadRequestError if there is none of that name."""
    known = getattr(place.command, "commands", {})
    found = known.get(word)
    if found is None:
        from difflib import get_close_matches

        close = get_close_matches(word, known)
        hint = f"did you mean {close[0]}?" if close else f"`{place.command_path} --help` lists the commands"
        raise BadRequestError(f"{place.command_path} has no command {word!r}", hint=hint)
    return type(place)(found, parent=place, info_name=found.name)
