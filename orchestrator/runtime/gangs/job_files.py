"""Copies a job's files to its nodes and back: the working copy out; logs, exit records and outputs home.

The daemon's side of ``runtime/nodes/files.py``. For nodes that share the home only ``outputs`` are collected, on this
node. Follows logs while a gang runs; decides nothing about the job. A restarted daemon continues: the note beside a
log's mirror records how far it goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from orchestrator.core.codec import Count, Record, RecordError, from_bytes, to_plain
from orchestrator.private_files import make_private, open_private
from orchestrator.runtime import remote
from orchestrator.runtime.deadline import within
from orchestrator.runtime.gangs.errors import NodeFilesError, NodeGoneError
from orchestrator.runtime.nodes.files import (
    CHUNK_BYTES,
    FAILURES,
    MAX_OUTPUTS,
    LogLocation,
    LogPart,
    NodeFiles,
    digests,
    find_outputs,
    is_utf8,
    keep_output,
    new_output,
)
from orchestrator.runtime.ranks.logs import log_path, renumber
from orchestrator.spec.plain_files import read_plain
from orchestrator.units import plural, size

if TYPE_CHECKING:
    from collections.abc import Collection

    from orchestrator.core.job.record import Job
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.runtime.nodes.agent import NodeAgent
    from orchestrator.runtime.nodes.files import Output, Outputs
    from orchestrator.runtime.pools import Pool
    from orchestrator.runtime.ranks.logs import LogLimits
    from orchestrator.spec.paths import Paths

CALL_SECONDS: Final = 60.0
FOLLOW_SECONDS: Final = 0.25
LAST_FETCH_SECONDS: Final = 10.0
MAX_NOTE_BYTES: Final = 4096


class _Note(Record):
    inode: Count
    offset: Count
    size: Count


class LogMirror:
    """The daemon's copy of one rank's log. The note beside it records its length; bytes beyond it are overwritten."""

    def __init__(self, path: Path, limits: LogLimits) -> None:
        self._path = path
        self._limits = limits
        self._note = path.with_suffix(".mirror")
        self.place = LogLocation()
        self._size = 0
        note = _read_note(self._note)
        if note is not None:
            self.place = LogLocation(inode=note.inode, offset=note.offset)
            self._size = note.size if path.exists() else 0  # no file: it had just been rotated

    def take(self, part: LogPart) -> None:
        """Append what a node sent. The note is written after the lines: lines without a note are written again."""
        make_private(self._path.parent)
        if self._path.exists():
            with self._opened(os.O_WRONLY) as file:
                os.ftruncate(file.fileno(), min(self._size, os.fstat(file.fileno()).st_size))
        if self._size and self._size + len(part.data) > self._limits.max_bytes:
            renumber(self._path, self._limits.keep_files)
            self._path.unlink(missing_ok=True)
            self._size = 0
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
        note = _Note(inode=self.place.inode, offset=self.place.offset, size=self._size)
        with os.fdopen(open_private(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            json.dump(to_plain(note), file)
        draft.replace(self._note)


def _read_note(path: Path) -> _Note | None:
    """Return a mirror's note; None if there is none, or it is invalid: the job's processes can write there."""
    try:
        return from_bytes(_Note, read_plain(path, MAX_NOTE_BYTES, real=True))
    except (OSError, RecordError):
        return None


class JobFiles:
    """Handles a job's files at its start, while it runs, and at its end.

    At most ``outputs_max_bytes`` of outputs are collected for each job; the rest stays on the node. Files are sent in
    chunks of ``chunk_bytes``.
    """

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
        self._nodes = nodes
        self._paths = paths
        self._limits = limits
        self._outputs_max_bytes = outputs_max_bytes
        self._pool = pool
        self._chunk_bytes = chunk_bytes
        self._mirrors: dict[Path, LogMirror] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}

    def apart(self, job: Job) -> list[str]:
        """Return the job's nodes that do not share the home, in the order of their ranks."""
        reports = self._nodes.reports
        return [n for n in dict.fromkeys(job.file_nodes) if n in reports and not reports[n].home_shared]

    def _agent(self, node_id: str) -> NodeAgent:
        agent = self._nodes.agents.get(node_id)
        if agent is None:
            raise NodeGoneError(node_id)
        return agent

    async def _ask(self, node_id: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the node's ``NodeFiles``.

        Raises NodeGoneError when the node has no agent any more, NodeFilesError when its disk fails.
        """
        agent = remote.handle_of(self._agent(node_id))
        files = remote.stub(NodeFiles, agent, through="answer_files", failures=FAILURES)
        try:
            return await within(CALL_SECONDS, getattr(files, method)(*args, **kwargs))
        except OSError as error:
            if isinstance(error, TimeoutError | ConnectionError):
                raise
            raise NodeFilesError(node_id, error) from error

    # -- out

    async def unable_to_read(self, directory: str, node_ids: Collection[str]) -> list[str]:
        """Return the nodes that cannot read this one's files in ``directory``.

        Raises OSError if this node cannot write there, NodeGoneError, and Ray's error when there is no answer.
        """
        name, text = f".orch-probe-{secrets.token_hex(8)}", secrets.token_hex(16)
        probe = Path(directory, name)

        async def reads(node_id: str) -> bool:
            return bool(await within(CALL_SECONDS, self._agent(node_id).reads(str(probe), text)))

        await asyncio.to_thread(_write, probe, text)
        try:
            seen = await asyncio.gather(*map(reads, node_ids))
        finally:
            probe.unlink(missing_ok=True)
        return [node_id for node_id, sees in zip(node_ids, seen, strict=True) if not sees]

    async def ship(self, job: Job) -> None:
        """Put the working copy on every node of the gang."""
        await asyncio.gather(*(self._ship(job, node_id) for node_id in self.apart(job)))

    async def _ship(self, job: Job, node_id: str) -> None:
        if job.submission.snapshot:
            wanted = await asyncio.to_thread(digests, job.submission.snapshot, self._paths.blob)
            for digest in await self._ask(node_id, "missing_blobs", job.id, wanted):
                await self._send(node_id, digest)
        await self._ask(node_id, "lay_out", job.id, job.submission.snapshot)

    async def _send(self, node_id: str, digest: str) -> None:
        path, offset, last = self._paths.blob(digest), 0, False
        size = path.stat().st_size
        while not last:
            data = await asyncio.to_thread(_read, path, offset, self._chunk_bytes)
            last = offset + len(data) >= size
            await self._ask(node_id, "put_blob", digest, offset, data, last=last)
            offset += len(data)

    # -- logs and exit records

    def follow(self, job: Job) -> None:
        """Mirror the logs of a running gang. Idempotent."""
        if job.id not in self._followers and self.apart(job):
            self._followers[job.id] = asyncio.create_task(self._follow(job), name=f"logs-{job.id}")

    async def _follow(self, job: Job) -> None:
        while True:
            for node_id in self.apart(job):
                with contextlib.suppress(Exception):  # out of reach: its logs are fetched when it answers again
                    await self._fetch_logs(job, node_id)
            await asyncio.sleep(FOLLOW_SECONDS)

    async def _fetch_logs(self, job: Job, node_id: str) -> bool:
        """Fetch the node's next part of each of the job's logs; return whether there was anything new."""
        ranks = [rank for rank, where in enumerate(job.file_nodes) if where == node_id]
        attempts = range(1, job.attempt_number + 1)
        places = {(attempt, rank): self._mirror(job, attempt, rank).place for attempt in attempts for rank in ranks}
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
        """Fetch the rest of the logs, and the exit records, from every node that answers."""
        for node_id in self.apart(job):
            with contextlib.suppress(Exception):  # a node out of reach keeps them; the others are queried next
                async with asyncio.timeout(LAST_FETCH_SECONDS):
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

    # -- the end

    async def finish(self, job: Job) -> str:
        """Copy home what a gang leaves behind, once no process of it is left. Returns notes for the user."""
        follower = self._followers.pop(job.id, None)
        if follower is not None:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)
        await self.bring_ends(job)
        logs = self._paths.logs(job.id)
        for path in [path for path in self._mirrors if path.is_relative_to(logs)]:
            del self._mirrors[path]  # its note keeps the position
        return await self._bring_outputs(job) if job.spec.outputs else ""

    async def _bring_outputs(self, job: Job) -> str:
        """Collect the outputs from this node and the others. Returns notes about those that were not collected."""
        target, left = self._paths.outputs(job.id), self._outputs_max_bytes
        notes = []
        apart = self.apart(job)
        if len(apart) < len(set(job.file_nodes)):
            abandoned = threading.Event()
            try:
                found, failures = await self._pool.run(_collect_local, job, target, left, abandoned)
                left -= sum(each.size_bytes for each in found.files)
                notes.append(self._left(found, job.submission.work_dir))
                if failures:
                    notes.append(
                        f"{len(failures)} of {len(found.files)} outputs could not be kept in {target}: {failures[0]};"
                        f" they are in {job.submission.work_dir}"
                    )
            except Exception as error:  # a job chose the files: whatever they cause is a note
                notes.append(f"outputs could not be kept in {target}: {error}; they are in {job.submission.work_dir}")
            finally:
                abandoned.set()
        taken: set[str] = set()
        for number, node_id in enumerate(apart):
            try:
                found = await self._ask(node_id, "find_outputs", job.id, job.spec.outputs, left)
                for each in found.files:
                    name = each.path if each.path not in taken else f"{each.path}.node-{number}"
                    await self._fetch_output(job, node_id, each, target, name)
                    taken.add(each.path)
                left -= sum(each.size_bytes for each in found.files)
                notes.append(self._left(found, f"the working copy on node {node_id[:12]}"))
            except Exception as error:
                notes.append(f"outputs of node {node_id[:12]} could not be copied to {target}: {error}")
        return "; ".join(filter(None, notes))

    def _left(self, found: Outputs, where: str) -> str:
        notes = []
        if found.left_files:
            limit = f"ORCH_OUTPUTS_MAX_BYTES ({size(self._outputs_max_bytes)})"
            if len(found.files) >= MAX_OUTPUTS:
                limit = f"{MAX_OUTPUTS} files"
            several = found.left_files > 1
            stays = f"{plural(found.left_files, 'output')} ({size(found.left_bytes)}) {'stay' if several else 'stays'}"
            notes.append(f"{stays} in {where}: more than {limit}")
        if odd := [each.path for each in found.files if not is_utf8(each.path)]:
            notes.append(
                f"{plural(len(odd), 'output')} with a name that is not UTF-8, such as {odd[0]!a}, can be copied on the"
                " daemon's machine, and not by orch get"
            )
        if found.unread:
            notes.append(f"not everything in {where} was searched for outputs: {found.unread}")
        return "; ".join(notes)

    async def _fetch_output(self, job: Job, node_id: str, found: Output, target: Path, name: str) -> None:
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
        """Have every node remove the files of jobs that are not ``live``."""
        for node_id, report in list(self._nodes.reports.items()):
            with contextlib.suppress(Exception):  # the next round tries again
                agent = self._nodes.agents[node_id]
                await within(CALL_SECONDS, agent.keep_only(list(live), shared=report.home_shared))

    async def close(self) -> None:
        """Stop following."""
        followers = list(self._followers.values())
        self._followers.clear()
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)


def _collect_local(
    job: Job, target: Path, max_bytes: int, abandoned: threading.Event
) -> tuple[Outputs, list[Exception]]:
    work = Path(job.submission.work_dir)
    found = find_outputs(work, job.spec.outputs, max_bytes)
    failures: list[Exception] = []
    for each in found.files:
        if abandoned.is_set():
            break
        try:
            keep_output(work, each, target)
        except (OSError, ValueError) as error:  # of one file; the others are still kept
            failures.append(error)
    return found, failures


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), size, offset)
