"""Where the daemon's control API is: the one rule that client and daemon share.

Pure, and free of imports that take time: the command line loads it on every start. The environment is handed in.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.api.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SOCKET_BYTES = 100
"""Longest path of a Unix socket: ``sockaddr_un`` holds 108 bytes, the last of them zero."""


class Endpoint(NamedTuple):
    """A Unix socket (``socket_path``), or a TCP address with the daemon's token."""

    socket_path: str = ""
    host: str = ""
    port: int = 0
    token: str = ""

    @property
    def label(self) -> str:
        """For messages: the socket's path or the URL."""
        return self.socket_path or f"http://{self.host}:{self.port}"


def orch_home(environ: Mapping[str, str]) -> str:
    """Where all state lives: ``$ORCH_HOME``, else ``~/.orch``; absolute."""
    home = environ.get("ORCH_HOME") or os.path.join("~", ".orch")  # noqa: PTH118 - pathlib costs 3 ms at start
    return os.path.realpath(os.path.expanduser(home))  # noqa: PTH111


def control_socket(home: str, runtime_dir: str, uid: int) -> str:
    """The control socket of the daemon whose state is in ``home``: the same path as ``spec.settings.Settings.socket``.

    Written again because that module costs the command line 10 ms; a test holds the two together.
    """
    inside = f"{home}/run/orch.sock"
    if len(os.fsencode(inside)) <= MAX_SOCKET_BYTES:
        return inside
    import hashlib

    digest = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    short = f"{runtime_dir}/orch-{digest}.sock"
    if runtime_dir and len(os.fsencode(short)) <= MAX_SOCKET_BYTES:
        return short
    return f"/tmp/orch-{uid}-{digest}/orch.sock"  # noqa: S108 - the listener makes the directory 0700 and checks its owner


def endpoint_from(environ: Mapping[str, str]) -> Endpoint:
    """The daemon that ``environ`` points at: ``$ORCH_ADDRESS`` with ``$ORCH_TOKEN``, else the socket of ``$ORCH_HOME``.

    Raises BadRequestError for an address that is not ``http://host:port``.
    """
    address = environ.get("ORCH_ADDRESS", "")
    if not address:
        return Endpoint(socket_path=control_socket(orch_home(environ), environ.get("XDG_RUNTIME_DIR", ""), os.getuid()))
    host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")
    if "://" in host or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadRequestError(
            f"ORCH_ADDRESS={address!r} is not an address",
            hint="write http://host:port, or unset it to use the Unix socket of ORCH_HOME",
        )
    return Endpoint(host=host.strip("[]"), port=int(port), token=environ.get("ORCH_TOKEN", ""))
