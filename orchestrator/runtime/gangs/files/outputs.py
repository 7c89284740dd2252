"""Collects a job's outputs from its nodes, this one included, into its directory in the home."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.runtime.nodes.working_copy import MAX_OUTPUTS, find_outputs, is_utf8, keep_output, new_output
from orchestrator.units import plural, size

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.gangs.files.node_files import FileNodes
    from orchestrator.runtime.nodes.working_copy import Output, Outputs
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.paths import Paths


class OutputCollection:
    """Collects at most ``max_bytes`` of outputs for each job; the rest stays on the node."""

    def __init__(self, nodes: FileNodes, paths: Paths, pool: Pool, *, max_bytes: int, chunk_bytes: int) -> None:
        self._nodes = nodes
        self._paths = paths
        self._pool = pool
        self._max_bytes = max_bytes
        self._chunk_bytes = chunk_bytes

    async def bring(self, job: Job) -> str:
        """Collect the outputs. Returns notes about those that were not collected."""
        target, left = self._paths.outputs(job.id), self._max_bytes
        notes = []
        apart = self._nodes.apart(job)
        if len(apart) < len(set(job.file_nodes)):
            abandoned = threading.Event()
            try:
                found, failures = await self._pool.run(self._collect_local, job, target, left, abandoned)
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
                found = await self._nodes.ask(node_id, "find_outputs", job.id, job.spec.outputs, left)
                for each in found.files:
                    name = each.path if each.path not in taken else f"{each.path}.node-{number}"
                    await self._fetch(job, node_id, each, target, name)
                    taken.add(each.path)
                left -= sum(each.size_bytes for each in found.files)
                notes.append(self._left(found, f"the working copy on node {node_id[:12]}"))
            except Exception as error:
                notes.append(f"outputs of node {node_id[:12]} could not be copied to {target}: {error}")
        return "; ".join(filter(None, notes))

    def _collect_local(
        self, job: Job, target: Path, max_bytes: int, abandoned: threading.Event
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

    def _left(self, found: Outputs, where: str) -> str:
        notes = []
        if found.left_files:
            limit = f"ORCH_OUTPUTS_MAX_BYTES ({size(self._max_bytes)})"
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

    async def _fetch(self, job: Job, node_id: str, found: Output, target: Path, name: str) -> None:
        with new_output(target, name) as place:
            with place.create(found.mode) as file:
                offset = 0
                while data := await self._nodes.ask(node_id, "read_output", job.id, found.path, offset):
                    await self._pool.run(file.write, data)
                    offset += len(data)
                    if len(data) < self._chunk_bytes:
                        break
            place.finish()
