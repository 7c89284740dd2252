# ruff: noqa: D102 - JobService documents the methods
"""The part of the in-memory service that keeps pieces of uploads; see ``testing.py``."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from orchestrator.api.errors import WorkdirNeededError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.api.service import Caller, SubmitRequest


class FakeUploads:
    """Keeps every piece, for a test to read."""

    @cached_property
    def pieces(self) -> dict[str, bytes]:
        """Uploaded pieces by digest."""
        return {}

    async def missing_pieces(self, digests: Sequence[str], size_bytes: int, caller: Caller) -> Sequence[str]:  # noqa: ARG002
        return [digest for digest in digests if digest not in self.pieces]

    async def put_piece(self, digest: str, data: bytes, caller: Caller) -> None:  # noqa: ARG002
        self.pieces[digest] = data

    def with_files(self, request: SubmitRequest, caller: Caller) -> SubmitRequest:
        """Return the request. Raises WorkdirNeededError if its files are on another machine."""
        if caller.is_elsewhere and not request.upload:
            raise WorkdirNeededError("working_dir . is on the submitter's machine")
        return request
