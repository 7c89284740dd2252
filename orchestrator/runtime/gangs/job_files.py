"""Brings a job's files to its nodes and back: the working copy out, logs, exit records and outputs home.

The daemon's side of ``node_files.py``. Nodes that share the home need none of it but ``outputs``, which are collected on
this node then. Follows logs while a gang runs; decides nothing about the job. What it has brought is found again by a
restarted daemon: the mirror of a log says how far it goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from orchestrator.private_files import make_private, open_private
from orchestrator.runtime.deadline import within
from orchestrator.runtime.gangs.errors import NodeGoneError
from orchestrator.runtime.nodes.files import CHUNK_BYTES, LogLocation, LogPart
from orchestrator.runtime.nodes.working_copy import digests, find_outputs, keep_output, new_output
from orchestrator.runtime.ranks.logs import log_path

if TYPE_CHECKING:
    from collections.abc import Collection

    from orchestrator.core.job.record import Job
    from orchestrator.runtime.cluster.registry import NodeRegistry
    from orchestrator.runtime.nodes.working_copy import Output, Outputs
    from orchestrator.runtime.pools import Pool
    from orchestrator.runtime.ranks.logs import LogLimits
    from orchestrator.spec.paths import Paths

CALL_SECONDS: Final = 60.0
FOLLOW_SECONDS: Final = 0.25
GOODBYE_SECONDS: Final = 10.0


class LogMirror:
    """The daemon's copy of one rank's log. The note beside it says what it holds; bytes beyond are written again."""

    def __init__(self, path: Path, limits: LogLimits) -> None:
        self._path = path
        self._limits = limits
        self._note = path.with_suffix(".mirror")
        self.place = LogLocation()
        self._size = 0
        with contextlib.suppress(OSError, ValueError, KeyError):
            said = json.loads(self._note.read_text())
            self.place = LogLocation(inode=said["inode"], offset=said["offset"])
            self._size = said["size"] if path.exists() else 0  # it had just been rotated

    def take(self, part: LogPart) -> None:
        """Append what a node sent. The note follows the lines: what a daemon wrote and died before it noted goes."""
        make_private(self._path.parent)
        if self._path.exists():
            with self._opened(os.O_WRONLY) as file:
                os.ftruncate(file.fileno(), min(self._size, os.fstat(file.fileno()).st_size))
        if self._size and self._size + len(part.data) > self._limits.max_bytes:
            self._rotate()
            self._note_down()
        with self._opened(os.O_WRONLY | os.O_CREAT | os.O_APPEND) as file:
            file.write(part.data)
        self._size += len(part.data)
        self.place = part.place
        self._note_down()

    def _opened(self, flags: int) -> BinaryIO:
        """The mirror; a link in its place is not followed, a rank of this node can have put one there."""
        return os.fdopen(open_private(self._path, flags), "wb")

    def _note_down(self) -> None:
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


class JobFiles:
    """See the module."""

    def __init__(
        self,
        nodes: NodeRegistry,
        paths: Paths,
        limits: LogLimits,
        *,
        outputs_max_bytes: int,
        pool: Pool,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._pool = pool
        self._nodes = nodes
        self._paths = paths
        self._limits = limits
        self._outputs_max_bytes = outputs_max_bytes
        self._mirrors: dict[Path, LogMirror] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}

    def apart(self, job: Job) -> list[str]:
        """The job's nodes that do not share the home, in the order of their ranks."""
        reports = self._nodes.reports
        return [n for n in dict.fromkeys(job.nodes) if n in reports and not reports[n].home_shared]

    async def blind(self, directory: str, node_ids: Collection[str]) -> list[str]:
        """Which of the nodes do not see what this one writes into ``directory``. Raises OSError: this one cannot either."""
        if "://" in directory:  # the same place from everywhere
            return []
        name, text = f".orch-probe-{secrets.token_hex(8)}", secrets.token_hex(16)
        probe = Path(directory, name)
        await asyncio.to_thread(_write, probe, text)
        try:
            seen = await asyncio.gather(*(self._sees(node_id, str(probe), text) for node_id in node_ids))
        finally:
            probe.unlink(missing_ok=True)
        return [node_id for node_id, sees in zip(node_ids, seen, strict=True) if not sees]

    async def _sees(self, node_id: str, path: str, text: str) -> bool:
        try:
            agent = self._nodes.agents[node_id]
            return bool(await within(CALL_SECONDS, agent.reads.remote(path, text)))
        except Exception:
            return False

    async def ship(self, job: Job) -> None:
        """The working copy is on every node of the gang when this returns."""
        await asyncio.gather(*(self._ship_to(job, node_id) for node_id in self.apart(job)))

    async def _ship_to(self, job: Job, node_id: str) -> None:
        if job.snapshot:
            wanted = await asyncio.to_thread(digests, job.snapshot, self._paths.blob)
            for digest in await self._ask(node_id, "missing_blobs", job.id, wanted):
                await self._send(node_id, digest)
        await self._ask(node_id, "lay_out", job.id, job.snapshot)

    async def _send(self, node_id: str, digest: str) -> None:
        path, offset = self._paths.blob(digest), 0
        size = path.stat().st_size
        while True:
            data = await asyncio.to_thread(_read, path, offset, self._chunk_bytes)
            last = offset + len(data) >= size
            await self._ask(node_id, "put_blob", digest, offset, data, last=last)
            offset += len(data)
            if last:
                return

    async def _ask(self, node_id: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the node's agent answers. Raises NodeGoneError when the node has none any more."""
        agent = self._nodes.agents.get(node_id)
        if agent is None:
            raise NodeGoneError(node_id)
        return await within(CALL_SECONDS, agent.files.remote(method, *args, **kwargs))

    # -- logs and exit records

    def follow(self, job: Job) -> None:
        """Mirror the logs of a running gang; asking again changes nothing."""
        if job.id not in self._followers and self.apart(job):
            self._followers[job.id] = asyncio.create_task(self._follow(job), name=f"logs-{job.id}")

    async def _follow(self, job: Job) -> None:
        while True:
            for node_id in self.apart(job):
                with contextlib.suppress(Exception):  # out of reach: what it has is fetched when it is back
                    await self._fetch_logs(job, node_id)
            await asyncio.sleep(FOLLOW_SECONDS)

    async def _fetch_logs(self, job: Job, node_id: str) -> bool:
        """One round; whether there was anything new."""
        ranks = [rank for rank, where in enumerate(job.nodes) if where == node_id]
        places = {}
        for attempt in range(1, job.attempt_number + 1):
            for rank in ranks:
                mirror = self._mirror(job, attempt, rank)
                places[attempt, rank] = mirror.place
        parts: list[LogPart] = await self._ask(node_id, "read_logs", job.id, places)
        for part in parts:
            await asyncio.to_thread(self._mirror(job, part.attempt, part.rank).take, part)
        return bool(parts)

    def _mirror(self, job: Job, attempt: int, rank: int) -> LogMirror:
        path = log_path(self._paths.logs(job.id), attempt, rank)
        if path not in self._mirrors:
            self._mirrors[path] = LogMirror(path, self._limits)
        return self._mirrors[path]

    async def bring_ends(self, job: Job) -> None:
        """The rest of the logs, and the exit records, of every node that can still be asked."""
        for node_id in self.apart(job):
            with contextlib.suppress(Exception):
                async with asyncio.timeout(GOODBYE_SECONDS):
                    await self._bring_ends_of(job, node_id)

    async def _bring_ends_of(self, job: Job, node_id: str) -> None:
        for (attempt, rank), record in (await self._ask(node_id, "exit_records", job.id)).items():
            path = self._paths.exit_record(job.id, attempt, rank)
            with new_output(self._paths.exits(job.id), path.relative_to(self._paths.exits(job.id)).as_posix()) as place:
                with place.create(0o600) as file:
                    file.write(record)
                place.finish()
        while await self._fetch_logs(job, node_id):
            pass

    def _unfollow(self, job_id: str) -> asyncio.Task[None] | None:
        task = self._followers.pop(job_id, None)
        if task is not None:
            task.cancel()
        return task

    # -- the end of a gang

    async def finish(self, job: Job) -> str:
        """Bring home what a gang leaves behind, once no process of it is left. Returns what a person should know."""
        task = self._unfollow(job.id)
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)
        await self.bring_ends(job)
        logs = self._paths.logs(job.id)
        for path in [path for path in self._mirrors if path.is_relative_to(logs)]:
            del self._mirrors[path]
        return await self._bring_outputs(job) if job.spec.outputs else ""

    async def _bring_outputs(self, job: Job) -> str:
        target, left = self._paths.outputs(job.id), self._outputs_max_bytes
        said = []
        apart = self.apart(job)
        if len(apart) < len(set(job.nodes)):
            try:
                found = await self._pool.run(self._keep_own, job, target, left)
                left -= sum(each.size_bytes for each in found.files)
                said.append(self._left(found, job.work_dir))
            except (OSError, ValueError) as error:
                said.append(f"outputs could not be kept in {target}: {error}; they are in {job.work_dir}")
        taken: set[str] = set()
        for number, node_id in enumerate(apart):
            try:
                found = await self._ask(node_id, "find_outputs", job.id, job.spec.outputs, left)
                for each in found.files:
                    name = each.path if each.path not in taken else f"{each.path}.node-{number}"
                    await self._fetch(job, node_id, each, target, name)
                    taken.add(each.path)
                left -= sum(each.size_bytes for each in found.files)
                said.append(self._left(found, f"the working copy on node {node_id[:12]}"))
            except Exception as error:
                said.append(f"outputs of node {node_id[:12]} could not be brought to {target}: {error}")
        return "; ".join(filter(None, said))

    def _keep_own(self, job: Job, target: Path, max_bytes: int) -> Outputs:
        work = Path(job.work_dir)
        found = find_outputs(work, job.spec.outputs, max_bytes)
        for each in found.files:
            keep_output(work, each, target)
        return found

    def _left(self, found: Outputs, where: str) -> str:
        if not found.left_files:
            return ""
        limit = self._outputs_max_bytes / 1e6
        return (
            f"{found.left_files} outputs ({found.left_bytes / 1e6:.0f} MB) stay in {where}: more than"
            f" ORCH_OUTPUTS_MAX_BYTES ({limit:.0f} MB)"
        )

    async def _fetch(self, job: Job, node_id: str, found: Output, target: Path, name: str) -> None:
        with new_output(target, name) as place:
            with place.create(found.mode) as file:
                offset = 0
                while data := await self._ask(node_id, "read_output", job.id, found.path, offset):
                    await self._pool.run(file.write, data)
                    offset += len(data)
                    if len(data) < self._chunk_bytes:
                        break
            place.finish()

    async def tidy(self, live: Collection[str]) -> None:
        """Have every node forget jobs that have ended."""
        for node_id, report in list(self._nodes.reports.items()):
            with contextlib.suppress(Exception):  # the next round asks again
                agent = self._nodes.agents[node_id]
                await within(CALL_SECONDS, agent.keep_only.remote(list(live), shared=report.home_shared))

    async def close(self) -> None:
        """Stop following."""
        tasks = [task for job_id in list(self._followers) if (task := self._unfollow(job_id)) is not None]
        await asyncio.gather(*tasks, return_exceptions=True)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), size, offset)
