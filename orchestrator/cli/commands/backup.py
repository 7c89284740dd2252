"""`orch backup` and `orch restore`: the store, while the daemon runs and when it is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_JOB_FAILED, EXIT_OK, BadRequestError, NotFoundError, RefusedError
from orchestrator.cli.commands.shared import Json
from orchestrator.cli.session import Session, answer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


DATED = "orch-%Y%m%dT%H%M%SZ.sqlite3"
ALL_DATED = "orch-*.sqlite3"
MOST_KEPT = 10_000


def backup(
    target: Annotated[str, typer.Argument(metavar="FILE", help="The backup; with --keep, a folder of dated ones.")],
    keep: Annotated[
        int,
        typer.Option("--keep", metavar="N", min=0, max=MOST_KEPT, help="Keep the newest N backups of the folder FILE."),
    ] = 0,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; report what is wrong with the backup FILE.")
    ] = False,
    json: Json = False,
) -> int:
    """Copy the store to a file while the daemon runs; exit code 1 when a backup is damaged.

    The store has every accepted job and its events. Copy logs, checkpoints and archives of working directories (jobs/ and blobs/ below ORCH_HOME) with any file copy tool.
    """
    if check and keep:
        raise BadRequestError("--check writes nothing that could be kept", hint="leave --keep out")
    session = Session()
    path = _path(target)
    problems = _refusing(lambda: _problems(path) if check else _written(session, path, keep))
    if isinstance(problems, list):
        code = EXIT_JOB_FAILED if problems else EXIT_OK
        value = {"backup": str(path), "problems": problems}
        return answer(session, problems or [f"{path} is intact"], value, as_json=json, code=code)
    return answer(session, [str(problems)], {"backup": str(problems)}, as_json=json)


def restore(
    source: Annotated[str, typer.Argument(metavar="FILE", help="A backup that `orch backup` wrote.")],
    json: Json = False,
) -> int:
    """Restore the store of ORCH_HOME from a backup; there must be no store, and no running daemon.

    The backup is checked first: one that is damaged, or that a newer orch wrote, changes nothing.
    """
    from orchestrator.store import backup as backups
    from orchestrator.store.errors import BackupExistsError

    session = Session()
    path, store = _path(source), _store(session)
    if not path.is_file():
        raise NotFoundError(f"{path} is not a file", hint="name a file that `orch backup` wrote")

    def put_back() -> None:
        store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            backups.restore(path, store)
        except BackupExistsError as error:
            raise RefusedError(
                f"there is a store at {error.path}",
                hint=f"stop the daemon (`orch down`) and move {error.path.parent}/{store.name}* away first",
            ) from error

    _refusing(put_back)
    line = f"restored {store}; the next daemon uses it"
    return answer(session, [line], {"backup": str(path), "restored": str(store)}, as_json=json)


def _path(text: str) -> Path:
    """Return the absolute path, with ``~`` expanded."""
    from pathlib import Path

    return Path(text).expanduser().absolute()


def _store(session: Session) -> Path:
    from orchestrator.spec.settings import Settings, SettingsError

    try:
        return Settings.from_environ(session.environ).paths.store
    except SettingsError as error:
        raise BadRequestError(str(error)) from error


def _refusing(work: Callable[[], object]) -> object:
    """Return the result of ``work``. Raises RefusedError for errors of the store and of the operating system."""
    from orchestrator.store.errors import StoreError

    try:
        return work()
    except StoreError as error:
        raise RefusedError(str(error)) from error
    except OSError as error:
        raise RefusedError(f"{error.filename or 'a file'}: {error.strerror}", hint="choose another place") from error


def _problems(path: Path) -> list[str]:
    from orchestrator.store.backup import check_backup

    if not path.is_file():
        raise NotFoundError(f"{path} is not a file", hint="name a file that `orch backup` wrote")
    return check_backup(path)


def _written(session: Session, target: Path, keep: int) -> Path | list[str]:
    """Write a backup and return its path; return its problems if it is damaged."""
    import contextlib
    import time

    from orchestrator.store import backup as backups
    from orchestrator.store.sql.schema import connect

    store = _store(session)
    if not store.exists():
        raise NotFoundError(f"there is no store at {store}", hint="set ORCH_HOME to the daemon's home")
    folder = target
    if keep:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        target = folder / time.strftime(DATED, time.gmtime())
    with contextlib.closing(connect(store, read_only=True)) as connection:
        backups.write(connection, target)
    if problems := backups.check_backup(target):
        return problems
    for old in sorted(folder.glob(ALL_DATED))[:-keep] if keep else ():
        old.unlink()
    return target
