"""Sends working copies to nodes, and determines which nodes share a directory with this one."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.runtime.nodes.working_copy import digests

if TYPE_CHECKING:
    from collections.abc import Collection

    from orchestrator.core.job.record import Job
    from orchestrator.runtime.gangs.files.node_files import FileNodes
    from orchestrator.spec.paths import Paths


class WorkingCopies:
    """Lays out a job's working copy on its nodes. Files are sent in chunks of ``chunk_bytes``."""

    def __init__(self, nodes: FileNodes, paths: Paths, chunk_bytes: int) -> None:
        self._nodes = nodes
        self._paths = paths
        self._chunk_bytes = chunk_bytes

    async def blind(self, directory: str, node_ids: Collection[str]) -> list[str]:
        """Return the nodes that cannot read this one's files in ``directory``. Raises OSError if it cannot write."""
        if "://" in directory:  # the same place from everywhere
            return []
        name, text = f".orch-probe-{secrets.token_hex(8)}", secrets.token_hex(16)
        probe = Path(directory, name)
        await asyncio.to_thread(_write, probe, text)
        try:
            seen = await asyncio.gather(*(self._nodes.reads(node_id, str(probe), text) for node_id in node_ids))
        finally:
            probe.unlink(missing_ok=True)
        return [node_id for node_id, sees in zip(node_ids, seen, strict=True) if not sees]

    async def ship(self, job: Job, node_id: str) -> None:
        """Put the working copy on the node."""
        if job.submission.snapshot:
            wanted = await asyncio.to_thread(digests, job.submission.snapshot, self._paths.blob)
            for digest in await self._nodes.ask(node_id, "missing_blobs", job.id, wanted):
                await self._send(node_id, digest)
        await self._nodes.ask(node_id, "lay_out", job.id, job.submission.snapshot)

    async def _send(self, node_id: str, digest: str) -> None:
        path, offset = self._paths.blob(digest), 0
        size = path.stat().st_size
        while True:
            data = await asyncio.to_thread(_read, path, offset, self._chunk_bytes)
            last = offset + len(data) >= size
            await self._nodes.ask(node_id, "put_blob", digest, offset, data, last=last)
            offset += len(data)
            if last:
                return


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), size, offset)
