"""Mirrors ranks' logs from nodes that do not share the home, while a gang runs and at its end.

A restarted daemon continues: the note beside a mirror records how far it goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from typing import TYPE_CHECKING, BinaryIO, Final

from orchestrator.core.conformance import is_count
from orchestrator.private_files import make_private, open_private
from orchestrator.runtime.nodes.files import LogLocation, LogPart
from orchestrator.runtime.ranks.logs import log_path
from orchestrator.spec.plain_files import read_plain

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.core.job.record import Job
    from orchestrator.runtime.gangs.files.node_files import FileNodes
    from orchestrator.runtime.ranks.logs import LogLimits
    from orchestrator.spec.paths import Paths

FOLLOW_SECONDS: Final = 0.25
MOST_NOTE_BYTES: Final = 4096


class LogMirror:
    """The daemon's copy of one rank's log. The note beside it records its length; bytes beyond it are overwritten."""

    def __init__(self, path: Path, limits: LogLimits) -> None:
        self._path = path
        self._limits = limits
        self._note = path.with_suffix(".mirror")
        self.place = LogLocation()
        self._size = 0
        noted = _noted(self._note)
        if noted is not None:
            self.place = LogLocation(inode=noted["inode"], offset=noted["offset"])
            self._size = noted["size"] if path.exists() else 0  # no file: it had just been rotated

    def take(self, part: LogPart) -> None:
        """Append what a node sent. The note is written after the lines: lines without a note are written again."""
        make_private(self._path.parent)
        if self._path.exists():
            with self._opened(os.O_WRONLY) as file:
                os.ftruncate(file.fileno(), min(self._size, os.fstat(file.fileno()).st_size))
        if self._size and self._size + len(part.data) > self._limits.max_bytes:
            self._rotate()
            self._store_position()
        with self._opened(os.O_WRONLY | os.O_CREAT | os.O_APPEND) as file:
            file.write(part.data)
        self._size += len(part.data)
        self.place = part.place
        self._store_position()

    def _opened(self, flags: int) -> BinaryIO:
        """Open the mirror; a link in its place is not followed, because a rank of this node can put one there."""
        return os.fdopen(open_private(self._path, flags), "wb")

    def _store_position(self) -> None:
        draft = self._note.with_suffix(".tmp")
        draft.write_text(json.dumps({"inode": self.place.inode, "offset": self.place.offset, "size": self._size}))
        draft.replace(self._note)

    def _rotate(self) -> None:
        for number in range(self._limits.keep_files, 0, -1):
            source = self._path.with_name(f"{self._path.name}.{number - 1}") if number > 1 else self._path
            if source.exists():
                source.replace(self._path.with_name(f"{self._path.name}.{number}"))
        self._path.unlink(missing_ok=True)
        self._size = 0


def _noted(path: Path) -> dict[str, int] | None:
    """Return a mirror's note; None if there is none, or it is invalid: the job's processes can write there."""
    try:
        note = json.loads(read_plain(path, MOST_NOTE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    names = ("inode", "offset", "size")
    return note if isinstance(note, dict) and all(is_count(note.get(name)) for name in names) else None


class LogFollowers:
    """Follows the logs of running gangs, one task for each job."""

    def __init__(self, nodes: FileNodes, paths: Paths, limits: LogLimits) -> None:
        self._nodes = nodes
        self._paths = paths
        self._limits = limits
        self._mirrors: dict[Path, LogMirror] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def follow(self, job: Job) -> None:
        """Mirror the logs of a running gang. Idempotent."""
        if job.id not in self._tasks and self._nodes.apart(job):
            self._tasks[job.id] = asyncio.create_task(self._follow(job), name=f"logs-{job.id}")

    async def _follow(self, job: Job) -> None:
        while True:
            for node_id in self._nodes.apart(job):
                with contextlib.suppress(Exception):  # out of reach: its logs are fetched when it answers again
                    await self.fetch(job, node_id)
            await asyncio.sleep(FOLLOW_SECONDS)

    async def fetch(self, job: Job, node_id: str) -> bool:
        """Fetch the node's next part of each of the job's logs; return whether there was anything new."""
        ranks = [rank for rank, where in enumerate(job.file_nodes) if where == node_id]
        places = {}
        for attempt in range(1, job.attempt_number + 1):
            for rank in ranks:
                mirror = self._mirror(job, attempt, rank)
                places[attempt, rank] = mirror.place
        parts: list[LogPart] = await self._nodes.ask(node_id, "read_logs", job.id, places)
        for part in parts:
            await asyncio.to_thread(self._mirror(job, part.attempt, part.rank).take, part)
        return bool(parts)

    def _mirror(self, job: Job, attempt: int, rank: int) -> LogMirror:
        path = log_path(self._paths.logs(job.id), attempt, rank)
        if path not in self._mirrors:
            self._mirrors[path] = LogMirror(path, self._limits)
        return self._mirrors[path]

    async def stop(self, job: Job) -> None:
        """Stop following the job."""
        task = self._tasks.pop(job.id, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def forget(self, job: Job) -> None:
        """Drop the job's mirrors from memory; their notes keep the positions."""
        logs = self._paths.logs(job.id)
        for path in [path for path in self._mirrors if path.is_relative_to(logs)]:
            del self._mirrors[path]

    async def close(self) -> None:
        """Stop following."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
