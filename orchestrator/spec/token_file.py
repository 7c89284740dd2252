"""Reads a token from a file, if the file keeps it secret: a holder of the token acts as the daemon's owner.

Standard library only.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 4096
SHORTEST = 16
"""Characters that a token has at least: that many cannot be guessed, with any number of tries."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class TokenFileError(ValueError):
    """The file is not there, holds no token, or can be read or changed by other users; ``remedy`` may be empty."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class TokenExposedError(TokenFileError):
    """Other users can read or change the file."""


def read(path: str | Path) -> str:
    """Return the token in a regular file of this user or of root that other users can neither read nor write.

    A process that does not run as root also accepts a file of root that its own group can read: Kubernetes mounts a secret into
    a pod that has a group of its own in this way. Raises TokenFileError.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _refuse_open(path, os.fstat(handle))
            token = os.read(handle, MAX_BYTES).decode().strip()
        finally:
            os.close(handle)
    except (OSError, UnicodeDecodeError) as error:
        raise TokenFileError(f"{path} cannot be read: {error}") from error
    if not token:
        raise TokenFileError(f"{path} holds no token")
    return token


def _refuse_open(path: str | Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise TokenFileError(f"{path} is not a regular file")
    if status.st_uid not in {os.geteuid(), 0}:
        raise TokenExposedError(
            f"{path} belongs to user {status.st_uid}, who can read and change the token",
            "copy it to a file of your own, with mode 0600",
        )
    mounted = os.geteuid() != 0 and status.st_uid == 0 and status.st_gid == os.getegid()
    mode = stat.S_IMODE(status.st_mode)
    if mode & (_OTHERS & ~stat.S_IRGRP if mounted else _OTHERS):
        raise TokenExposedError(
            f"{path} has mode {mode:04o}: other users can read or change the token", f"chmod 600 {path}"
        )
