"""Gives a group access to the control socket: its directories can be traversed, and nothing else in them can be opened.

`$ORCH_HOME` and the directory of the socket are otherwise private to their owner. Members may traverse these two, not
list them; every other entry of both is first made private.
"""

from __future__ import annotations

import grp
import os
import stat
from typing import TYPE_CHECKING

from orchestrator.api.errors import BadRequestError, RefusedError

if TYPE_CHECKING:
    from pathlib import Path

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def group_id(group: str) -> int:
    """Return the group's number. Raises BadRequestError for one that this machine does not have."""
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise BadRequestError(
            f"there is no group {group!r} on this machine", hint="`getent group` lists them"
        ) from error


def open_way(home: Path, socket: Path, group: str) -> None:
    """Let members of ``group`` traverse ``home`` to ``socket``.

    Raises RefusedError if they could not reach it: the socket is elsewhere, a directory above is closed to them,
    or this user may not give a directory to the group.
    """
    gid = group_id(group)
    if not socket.is_relative_to(home):
        raise RefusedError(
            f"the path of {home} is too long for a socket in it, and elsewhere the group {group} does not find it",
            hint="set ORCH_HOME to a shorter path, such as /srv/orch",
        )
    for above in home.parents:
        if not _may_pass(above, gid):
            raise RefusedError(
                f"members of {group} cannot pass through {above} (mode {stat.S_IMODE(above.stat().st_mode):o})",
                hint=f"`chmod o+x {above}`, or set ORCH_HOME to a directory that they can reach, such as /srv/orch",
            )
    way = [parent for parent in socket.parents if parent.is_relative_to(home)]
    for directory in way:
        _close_entries(directory, way)
    for directory in way:
        if not _may_pass(directory, gid):
            give_to_group(directory, gid, group, 0o710)


def give_to_group(path: Path, gid: int, group: str, mode: int) -> None:
    """Give ``path`` to the group with ``mode``. Raises RefusedError if this user is not a member."""
    try:
        os.chown(path, -1, gid)
    except PermissionError as error:
        raise RefusedError(
            f"{path} cannot be given to the group {group}: this user is not a member",
            hint=f"`sudo usermod --append --groups {group} USER`, then log in again",
        ) from error
    path.chmod(mode)


def _may_pass(directory: Path, gid: int) -> bool:
    status = directory.stat()
    return bool(status.st_mode & (stat.S_IXGRP if status.st_gid == gid else stat.S_IXOTH))


def _close_entries(directory: Path, way: list[Path]) -> None:
    for entry in directory.iterdir():
        status = entry.lstat()
        plain = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
        if plain and entry not in way and status.st_uid == os.geteuid() and status.st_mode & _OTHERS:
            entry.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS)
