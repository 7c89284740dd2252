"""Reads the daemon's and the command line's settings; prepares the daemon's home: private to its user, also where another umask left it open."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from typing import TYPE_CHECKING, Final

from orchestrator.api.errors import BadRequestError, OrchError, RefusedError, error_from_json
from orchestrator.durable_files import sync_directory
from orchestrator.private_files import NotPrivateError, make_private
from orchestrator.spec.settings import Settings, SettingsError
from orchestrator.store.disk import trouble_of
from orchestrator.store.errors import disk_remedy, disk_sentence

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from orchestrator.spec.paths import Paths


def load_settings(environ: Mapping[str, str]) -> Settings:
    """Read the settings. Raises BadRequestError with every invalid variable."""
    try:
        return Settings.from_environ(environ)
    except SettingsError as error:
        raise BadRequestError(str(error), hint="unset the variable, or give it a value of that form") from error


OTHERS: Final = 0o077
PASS_THROUGH: Final = 0o011
"""The permission that a daemon for a group leaves on its home: the path to its socket."""


def prepare_home(settings: Settings, *, traversable: bool = False) -> None:
    """Make the home and its content accessible to this user only. Raises RefusedError.

    `traversable`: other users may pass through the home, to a socket for a group. A home that belongs to root (where a
    volume is mounted) is unchanged, unless everyone can write to it: its content is private anyway.
    """
    home = settings.home
    was_open = _is_open(home)
    if was_open and not _may_be_closed(settings.paths):
        raise RefusedError(
            f"{home} is open to other users, and not a home of orch",
            hint="set ORCH_HOME to a directory of its own, which orch creates; or check what is in this one, then chmod go-rwx",
        )
    try:
        _make_home(home, traversable=traversable)
        for directory in (settings.paths.run, settings.paths.ray, settings.paths.jobs, settings.paths.blobs):
            make_private(directory, traversable=traversable and directory == settings.paths.run)
        sync_directory(home)
        with contextlib.suppress(PermissionError):  # another user's directory, such as /var/lib
            sync_directory(home.parent)
    except OSError as error:
        refuse_unwritable(home, error)
        raise RefusedError(
            f"{home} is not private: {error}" if isinstance(error, NotPrivateError) else f"{home}: {error}",
            hint="ORCH_HOME holds secrets and is executed: use a directory of your own that no other user can write to",
        ) from error
    if was_open:
        for path in entries(settings.paths):
            if path != settings.paths.run:
                _tighten(path)


def refuse_unwritable(home: Path, error: OSError) -> None:
    """Raise RefusedError, with the remedy, where the error says that the disk under the home takes nothing."""
    trouble = trouble_of(error, home)
    if trouble is not None:
        raise RefusedError(
            f"{disk_sentence(trouble, home)}, so no daemon can start", hint=disk_remedy(trouble, home)
        ) from error


def entries(paths: Paths) -> Iterator[Path]:
    """Yield the content of the home and, of each job, orch's own files; not users' files below."""
    for directory in (paths.home, paths.run, paths.ray, paths.jobs):
        if directory.is_dir():
            yield from sorted(directory.iterdir())
    if paths.jobs.is_dir():
        for job in sorted(paths.jobs.iterdir()):
            with contextlib.suppress(OSError):  # the job may have changed its directory's permissions
                if job.is_dir() and not job.is_symlink():
                    yield from sorted(job.iterdir())


def exposed_entries(paths: Paths) -> list[Path]:
    """Return the directories and files that others could access, by their modes, if the home were open to them.

    A group's permission to traverse the socket's directory does not count: nothing else in it is accessible.
    """
    return [path for path in entries(paths) if _mode(path) & (OTHERS & ~PASS_THROUGH if path == paths.run else OTHERS)]


def _make_home(home: Path, *, traversable: bool) -> None:
    try:
        make_private(home, traversable=traversable)
    except NotPrivateError:
        status = home.lstat()
        mounted = stat.S_ISDIR(status.st_mode) and status.st_uid == 0 and os.access(home, os.W_OK | os.X_OK)
        if not mounted or status.st_mode & stat.S_IWOTH:
            raise


def _may_be_closed(paths: Paths) -> bool:
    """Whether the directory may be made private: empty, or used by orch; it may be `/var`, by mistake."""
    if paths.home.stat().st_uid != os.geteuid() or not os.access(paths.home, os.R_OK | os.X_OK):
        return True  # its owner is checked, nothing is changed
    known = (paths.store, paths.run, paths.ray, paths.jobs)
    return any(path.exists() for path in known) or {path.name for path in paths.home.iterdir()} <= {"lost+found"}


def _is_open(home: Path) -> bool:
    try:
        return bool(home.stat().st_mode & OTHERS)
    except FileNotFoundError:
        return False


def _mode(path: Path) -> int:
    """Return the permission bits; none for a link, for a socket, and for a removed file."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return 0
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
        return 0
    return stat.S_IMODE(status.st_mode)


def _tighten(path: Path) -> None:
    mode = _mode(path)
    if mode & OTHERS and path.lstat().st_uid == os.geteuid():
        path.chmod(mode & ~OTHERS)


MAX_FAILURE_BYTES = 64 * 1024


def write_failure(paths: Paths, error: OrchError) -> None:
    """Record why this process ends, in a file that `orch up` shows before the log. A failure is ignored: the log has the error too."""
    temporary = paths.daemon_failure.with_suffix(".tmp")
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
            json.dump({"pid": os.getpid(), "problem": error.to_json()}, file)
        temporary.replace(paths.daemon_failure)


def read_failure(paths: Paths, pid: int) -> OrchError | None:
    """Return the error that ended process ``pid``; None where it recorded none."""
    try:
        with paths.daemon_failure.open(encoding="utf-8") as file:
            noted = json.loads(file.read(MAX_FAILURE_BYTES))
    except (OSError, ValueError):
        return None
    if not isinstance(noted, dict) or noted.get("pid") != pid or not isinstance(noted.get("problem"), dict):
        return None
    return error_from_json(noted["problem"])
