"""A job's outputs and checkpoints in the API, and the port that reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from orchestrator.api.view import NESTED, View

if TYPE_CHECKING:
    from collections.abc import Sequence

OUTPUTS: Final = "outputs"
CHECKPOINTS: Final = "checkpoints"
"""The first part of a file's path: its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileView(View):
    """A file; ``path`` begins with ``outputs/`` or ``checkpoints/``."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileList(View):
    """Files of a job, by path; ``more``: there are others. ``unnamed`` ones have names that are not UTF-8. ``elsewhere``: where its checkpoints are, if not with the daemon."""

    job_id: str
    files: tuple[FileView, ...] = ()
    more: bool = False
    unnamed: int = 0
    elsewhere: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest(View):
    """Size of a file and SHA-256 of its content when it was read."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingPieces(View):
    """The pieces of an upload that have to be sent, by their SHA-256, in the order of the request."""

    missing: tuple[str, ...] = ()


NESTED.update({FileList: {"files": FileView}})


class FileContent(Protocol):
    """An open file."""

    async def read(self, offset: int) -> bytes:
        """Return the next piece from ``offset`` on; empty at the end."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class FileReader(Protocol):
    """Reads files of jobs. Paths are those of FileView; no path can name anything else of the machine."""

    async def find(self, patterns: Sequence[str]) -> FileList:
        """Return the files that match a pattern, as in .gitignore (none: all). Raises BadRequestError, RefusedError."""
        ...

    async def digest(self, path: str) -> FileDigest:
        """Return a file's digest. Raises NotFoundError."""
        ...

    async def open(self, path: str) -> FileContent:
        """Open a file's content. Raises NotFoundError."""
        ...
