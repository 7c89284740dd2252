"""Calls the agents of nodes about jobs' files; ``runtime/nodes/files.py`` answers."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from orchestrator.runtime.deadline import within
from orchestrator.runtime.gangs.errors import NodeFilesError, NodeGoneError

if TYPE_CHECKING:
    from collections.abc import Collection

    from orchestrator.core.job.record import Job
    from orchestrator.runtime.cluster.nodes import NodeRegistry

CALL_SECONDS: Final = 60.0


class FileNodes:
    """Calls the agents of the nodes on which ranks' files lie."""

    def __init__(self, nodes: NodeRegistry) -> None:
        self._nodes = nodes

    def apart(self, job: Job) -> list[str]:
        """Return the job's nodes that do not share the home, in the order of their ranks."""
        reports = self._nodes.reports
        return [n for n in dict.fromkeys(job.file_nodes) if n in reports and not reports[n].home_shared]

    async def ask(self, node_id: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the answer of the node's agent.

        Raises NodeGoneError when the node has no agent any more, NodeFilesError when its disk fails.
        """
        try:
            return await within(CALL_SECONDS, self._agent(node_id).files.remote(method, *args, **kwargs))
        except Exception as error:
            cause = getattr(error, "cause", error)  # Ray's error wraps the one that the call has raised
            if isinstance(cause, OSError) and not isinstance(cause, TimeoutError | ConnectionError):
                raise NodeFilesError(node_id, cause) from error
            raise

    async def reads(self, node_id: str, path: str, text: str) -> bool:
        """Whether the node reads ``text`` in the file ``path``. Raises NodeGoneError, and Ray's error when there is no answer."""
        return bool(await within(CALL_SECONDS, self._agent(node_id).reads.remote(path, text)))

    def _agent(self, node_id: str) -> Any:
        agent = self._nodes.agents.get(node_id)
        if agent is None:
            raise NodeGoneError(node_id)
        return agent

    async def keep_only(self, live: Collection[str]) -> None:
        """Have every node delete the files of jobs that are not live."""
        for node_id, report in list(self._nodes.reports.items()):
            with contextlib.suppress(Exception):  # the next round tries again
                agent = self._nodes.agents[node_id]
                await within(CALL_SECONDS, agent.keep_only.remote(list(live), shared=report.home_shared))
