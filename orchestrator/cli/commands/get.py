"""`orch get`: downloads outputs and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_OK, EXIT_PARTLY, NotFoundError
from orchestrator.cli.commands.shared import Job, Json, Quiet
from orchestrator.cli.console import clean
from orchestrator.cli.render.table import Bar
from orchestrator.cli.session import Session, answer
from orchestrator.units import plural, size

if TYPE_CHECKING:
    from orchestrator.api.files import FileList


def get(
    job: Job,
    patterns: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATTERN...]", help="As in .gitignore: 'outputs/**', '*.pt'. No pattern: every file."),
    ] = None,
    *,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir", "-o", metavar="DIR", help="Where they go. Default: a directory with the job's id."
        ),
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", help="List the files; download nothing.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Download outputs and checkpoints of a job; an interrupted download resumes where it ended.

    Each file's SHA-256 is compared with the daemon's. Exit code 6: some files could not be downloaded.
    """
    session = Session(quiet=quiet)
    client = session.client()
    found = session.job(job)
    files = client.files(found.id, patterns or ())
    if files.elsewhere:
        session.console.note(f"the checkpoints of {found.id} are at {files.elsewhere}: fetch them from there")
    if files.more:
        session.console.note(f"only the first {len(files.files)} files; choose with a pattern")
    if files.unnamed:
        many = plural(files.unnamed, "file")
        session.console.note(f"{many} with a name that is not UTF-8 cannot be downloaded; see {found.outputs_dir}")
    if not files.files:
        if not patterns:
            hint = "outputs are what `outputs:` in job.yaml names, and are there once its ranks have ended"
            nothing = "no outputs" if files.elsewhere else "neither outputs nor checkpoints"
            raise NotFoundError(f"{found.id} has left {nothing}", hint=hint)
        hint = f"`orch get {found.id} --list` lists the files; outputs are what `outputs:` in job.yaml names"
        raise NotFoundError(f"{found.id} has left no file that matches {' or '.join(patterns)}", hint=hint)
    if only_list:
        lines = (f"{size(file.size_bytes):>10}  {clean(file.path)}" for file in files.files)
        return answer(session, lines, files.to_json(), as_json=json)
    return _download(session, files, output_dir or Path(found.id), json=json)


def _download(session: Session, files: FileList, target: Path, *, json: bool) -> int:
    from orchestrator.api.errors import BadRequestError, DaemonUnreachableError, OrchError
    from orchestrator.api.transport.download import Downloader

    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequestError(f"{target} cannot be made: {error.strerror}", hint="name another --output-dir") from error
    bar = Bar(session, sum(file.size_bytes for file in files.files))
    downloader = Downloader(session.client(), files.job_id, target.resolve(), bar.add)
    done, failed = [], []
    for file in files.files:
        bar.show(file.path)
        try:
            done.append(downloader.fetch(file))
        except DaemonUnreachableError:
            bar.end()
            raise
        except OrchError as error:
            bar.end()
            session.console.print_error(f"orch: {clean(error.message)}")
            failed.append(file.path)
    bar.end()
    received = sum(each.received for each in done)
    entries = [{"path": each.path, "bytes": each.size_bytes, "received": each.received} for each in done]
    value = {"job_id": files.job_id, "directory": str(target), "files": entries, "failed": failed}
    line = f"{plural(len(done), 'file')} in {target}, {size(received)} received"
    return answer(session, [line], value, as_json=json, code=EXIT_PARTLY if failed else EXIT_OK)
