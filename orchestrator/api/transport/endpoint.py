"""Finds the daemon's control API without slow imports.

The rule is that of ``spec.settings``, which the daemon reads: the same environment leads to the same socket. It is
repeated here because the command line finds the socket on every start and cannot afford dataclasses, pathlib and re; a
test compares the two on random environments.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.api.errors import BadRequestError, NotPermittedError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SOCKET_BYTES = 100
SHARED_DIRECTORY = "/tmp"  # noqa: S108 - only if no other path is short enough; its owner is checked

CONNECT_SECONDS = 30.0
"""A listener that accepts no connection for this time is treated as unreachable."""

SILENCE_SECONDS = 10.0
"""After this time without a byte, the daemon's process is checked; a stopped one ends the wait before the deadline."""


class Endpoint(NamedTuple):
    """A Unix socket (``socket_path``), or a TCP address with the daemon's token; and how long its silence is tolerated."""

    socket_path: str = ""
    host: str = ""
    port: int = 0
    token: str = ""
    connect_seconds: float = CONNECT_SECONDS
    silence_seconds: float = SILENCE_SECONDS

    @property
    def label(self) -> str:
        """Return the socket's path or the URL, for messages."""
        return self.socket_path or f"http://{self.host}:{self.port}"


def orch_home(environ: Mapping[str, str]) -> str:
    """Return the directory of all state: ``$ORCH_HOME``, else ``~/.orch``. Raises BadRequestError for a relative path."""
    text = environ.get("ORCH_HOME", "")
    if not text:
        return f"{_user_home(environ).rstrip('/')}/.orch"
    if text == "~" or text.startswith("~/"):
        text = _user_home(environ) + text[1:]
    if not text.startswith("/"):
        raise BadRequestError(
            f"ORCH_HOME={text!r} is not an absolute path",
            hint="a relative one would mean another place in each directory",
        )
    return os.path.realpath(text)


def _user_home(environ: Mapping[str, str]) -> str:
    home = environ.get("HOME", "")
    found = os.path.realpath(home) if home.startswith("/") else os.path.expanduser("~")
    if not found.startswith("/"):  # as in a container that runs with a number for a user
        raise BadRequestError(
            "neither ORCH_HOME nor HOME is set, and this user has no account",
            hint="set ORCH_HOME to a directory of your own",
        )
    return found


def control_socket(environ: Mapping[str, str], uid: int, *, shared: str = SHARED_DIRECTORY) -> str:
    """Return the control socket of the daemon of ``$ORCH_HOME``.

    It is in that directory unless its path is too long for a socket; then under ``$XDG_RUNTIME_DIR`` or, without one,
    in a directory of the user under ``shared``, by a digest of the home.
    """
    home = orch_home(environ)
    usual = f"{home.rstrip('/')}/run/orch.sock"
    if _fits(usual):
        return usual
    import hashlib

    digest = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and _fits(short := f"{os.path.realpath(runtime).rstrip('/')}/orch-{digest}.sock"):
        return short
    return f"{shared}/orch-{uid}-{digest}/orch.sock"


def group_socket(socket_path: str) -> str:
    """Return the socket beside a daemon's own on which it serves a group: what members do delays no caller of the other one."""
    return f"{os.path.dirname(socket_path)}/group.sock"


def _fits(path: str) -> bool:
    return len(os.fsencode(path)) <= MAX_SOCKET_BYTES


def _refuse_a_trap(path: str) -> None:
    """Refuse another user's directory: every user can create one in /tmp, and a false daemon in it would receive secrets."""
    directory, _, _ = path.rpartition("/")
    try:
        status = os.lstat(directory)
    except FileNotFoundError:
        return
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
        raise NotPermittedError(
            f"{directory} is not a directory of this user alone",
            hint="set ORCH_HOME, or XDG_RUNTIME_DIR, to a short path of your own",
        )


def may_serve(socket_path: str, uid: int) -> bool:
    """Return whether a daemon of user ``uid`` behind that socket may receive requests, which can hold secrets.

    Allowed are this user, root, and the owner of the socket's directory, if no other user could have created that
    directory (a daemon that serves a group).
    """
    if uid in (os.geteuid(), 0):
        return True
    directory = os.path.dirname(socket_path)
    try:
        if os.lstat(directory).st_uid != uid:
            return False
        while directory != "/":
            directory = os.path.dirname(directory)
            if os.stat(directory).st_mode & stat.S_IWOTH:
                return False
    except OSError:
        return False
    return True


def endpoint_from(environ: Mapping[str, str], *, shared: str = SHARED_DIRECTORY) -> Endpoint:
    """Return the endpoint of the daemon that ``environ`` names.

    It is ``$ORCH_ADDRESS`` with ``$ORCH_TOKEN``; else the address of `orch login`, whose token is also used for an
    equal ``$ORCH_ADDRESS``; else the socket of ``$ORCH_HOME``.

    Raises BadRequestError for an address that is not ``http://host:port``, or a relative home; NotPermittedError for a
    socket in another user's directory.
    """
    address, token = environ.get("ORCH_ADDRESS", ""), environ.get("ORCH_TOKEN", "")
    known = None if address and token else read_login(environ)
    if known is not None and (not address or tcp_endpoint(address)[1:3] == tcp_endpoint(known[0])[1:3]):
        address, token = known
    if not address:
        path = control_socket(environ, os.getuid(), shared=shared)
        if path.startswith(f"{shared}/orch-"):
            _refuse_a_trap(path)
        return Endpoint(socket_path=path)
    return tcp_endpoint(address, token)


def tcp_endpoint(address: str, token: str = "") -> Endpoint:
    """Return the endpoint of ``http://host:port``. Raises BadRequestError for another text."""
    host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")
    if "://" in host or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadRequestError(
            f"{address!r} is not the address of a daemon",
            hint="write http://host:port (ORCH_ADDRESS, `orch login`), or unset ORCH_ADDRESS to use the socket of ORCH_HOME",
        )
    return Endpoint(host=host.strip("[]"), port=int(port), token=token)


LOGIN_FILE = "login"
MAX_LOGIN_BYTES = 8192


def login_path(environ: Mapping[str, str]) -> str:
    """Return the file in which `orch login` keeps an address and its token."""
    return f"{orch_home(environ).rstrip('/')}/{LOGIN_FILE}"


def read_login(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return address and token of `orch login`; None if there is no login.

    Raises NotPermittedError for a file that other users could have read or written, BadRequestError for one that is damaged.
    """
    path = login_path(environ)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NotPermittedError(
            f"{path} cannot be read: {error.strerror}", hint="remove it and `orch login` again"
        ) from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise NotPermittedError(
                f"{path} is not a file of this user alone",
                hint="remove it, have a new token made, and `orch login` again",
            )
        lines = os.read(handle, MAX_LOGIN_BYTES).decode("utf-8", "replace").split("\n")
    finally:
        os.close(handle)
    if len(lines) < 2 or not lines[0] or not lines[1]:
        raise BadRequestError(f"{path} is damaged", hint="`orch login ADDRESS` writes a new one")
    return lines[0], lines[1]
