"""Files and the shell: init, import, schema, completion, help."""

from __future__ import annotations

import os
import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError, RefusedError
from orchestrator.cli.app import COMPLETION_VARIABLE
from orchestrator.cli.commands.shared import Json
from orchestrator.cli.session import Session, print_json

if TYPE_CHECKING:
    from orchestrator.spec.importing import Imported


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
    _write(output, text, force=force)
    session.console.print(str(output))
    session.console.note(f"check it, then: orch submit {output}")
    return EXIT_OK


def schema() -> int:
    """Print the JSON Schema of job.yaml, for editors that complete and check it."""
    import json

    from orchestrator.spec.reader.reading import job_schema

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


CONTEXT_SETTINGS = {"import": {"allow_interspersed_args": False}}
MAX_SCRIPT_BYTES = 1024 * 1024


def import_job(
    line: Annotated[
        list[str], typer.Argument(metavar="LINE", help="A launch line, quoted or not; or a script file for sbatch.")
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where to write; - is standard output.")
    ] = "-",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    json: Json = False,
) -> int:
    """Print the job.yaml for a line with torchrun, accelerate, deepspeed, srun, mpirun or sbatch, or for a Slurm script.

    Nothing is run or submitted. Options that could not be translated are listed on standard error.
    """
    from orchestrator.spec.importing import job_text
    from orchestrator.spec.job import parse_job
    from orchestrator.spec.problems import BadValueError, SpecError

    session = Session()
    try:
        found = _read(line)
        text = job_text(found.job)
        parse_job(text)
    except BadValueError as error:
        raise BadRequestError(error.message, hint=error.hint) from error
    except SpecError as error:
        first = error.problems[0]
        raise BadRequestError(
            f"no job can have this {first.path or 'text'}: {first.message}",
            hint=first.hint or "change it in the line or script",
        ) from error
    if json:
        print_json(session, {"job": found.job, "yaml": text, "remarks": list(found.remarks)})
        return EXIT_OK
    if output == "-":
        session.console.out.write(text)
    else:
        _write(Path(output), text, force=force)
        session.console.print(output)
    for remark in found.remarks:
        session.console.note(f"note: {remark}")
    return EXIT_OK


def _read(words: list[str]) -> Imported:
    from orchestrator.spec.importing import import_line, import_script, read_sbatch

    alone = words[0] if len(words) == 1 else ""
    if alone and os.path.isfile(alone) and not alone.endswith(".py"):
        return import_script(_script_text(alone))
    line = alone or shlex.join(words)
    batch = read_sbatch(line)
    if batch is None:
        if alone and len(alone.split()) == 1 and ("." in alone or "/" in alone) and not os.path.exists(alone):
            raise BadRequestError(
                f"{alone} not found in {os.getcwd()}", hint="name an existing script, or a launch line"
            )
        return import_line(line)
    return import_script(batch.command or _script_text(batch.script), batch)


def _script_text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SCRIPT_BYTES + 1)
    except OSError as error:
        raise BadRequestError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_SCRIPT_BYTES or b"\0" in data:
        raise BadRequestError(
            f"{path} is not a shell script", hint="give a script for sbatch, or the launch line itself"
        )
    return data.decode("utf-8", "replace")


def _write(path: Path, text: str, *, force: bool) -> None:
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise RefusedError(f"{path} exists", hint="--force overwrites it, -o writes elsewhere") from error
    except OSError as error:
        raise BadRequestError(f"{path} cannot be written: {error.strerror}", hint="-o writes elsewhere") from error
