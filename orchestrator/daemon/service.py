"""The daemon's implementation of the API: passes each request to the part that answers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.daemon.curves.desk import CurveService
from orchestrator.daemon.nodes.actions import NodeActions, NodeService
from orchestrator.daemon.requests.inspection import InspectionService
from orchestrator.daemon.requests.reader import JobQueryService
from orchestrator.daemon.requests.sessions import SessionService
from orchestrator.daemon.requests.submissions import Submissions, SubmissionService
from orchestrator.daemon.requests.usage import UsageService

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.api import views as v
    from orchestrator.api.service import ActionRequest, Caller
    from orchestrator.core.ids import JobId
    from orchestrator.daemon.changes import Changes
    from orchestrator.daemon.curves.desk import CurveDesk
    from orchestrator.daemon.health import DaemonHealth
    from orchestrator.daemon.nodes.queries import NodeQueries
    from orchestrator.daemon.requests.actions import JobActions
    from orchestrator.daemon.requests.inspection import RankInspection
    from orchestrator.daemon.requests.pruning import Pruning
    from orchestrator.daemon.requests.reader import JobReader
    from orchestrator.daemon.requests.sessions import JobSessions
    from orchestrator.daemon.requests.usage import Desks
    from orchestrator.daemon.stopping import Shutdown


class Service(
    SubmissionService,
    JobQueryService,
    InspectionService,
    UsageService,
    SessionService,
    CurveService,
    NodeService,
):
    """Implements ``api.service.JobService``."""

    def __init__(
        self,
        *,
        submissions: Submissions,
        reader: JobReader,
        inspection: RankInspection,
        sessions: JobSessions,
        desks: Desks,
        curves: CurveDesk,
        actions: JobActions,
        pruning: Pruning,
        nodes: NodeQueries,
        node_actions: NodeActions,
        changes: Changes,
        health: DaemonHealth,
        shutdown: Shutdown,
    ) -> None:
        SubmissionService.__init__(self, submissions)
        JobQueryService.__init__(self, reader)
        InspectionService.__init__(self, inspection)
        UsageService.__init__(self, desks)
        CurveService.__init__(self, curves)
        NodeService.__init__(self, node_actions)
        self._sessions = sessions
        self._actions = actions
        self._pruning = pruning
        self._nodes = nodes
        self._changes = changes
        self._health = health
        self._shutdown = shutdown

    async def act(self, job_id: JobId, request: ActionRequest, caller: Caller) -> v.ActionReply:
        """Run a command on a job; durable once this returns."""
        return await self._actions.act(job_id, request, caller)

    async def nodes(self) -> Sequence[v.NodeView]:
        """Return every node of the cluster."""
        return self._nodes.views()

    async def gpus(self, max_age_seconds: float = 0.0) -> Sequence[dict[str, Any]]:
        """Return every GPU of every node, with its newest values and holders."""
        return [row.to_json() for row in await self._nodes.gpu_rows(max_age_seconds)]

    def change_version(self) -> int:
        """Return the change counter."""
        return self._changes.version

    async def wait_change(self, after: int, timeout_seconds: float, job_ids: frozenset[JobId] = frozenset()) -> int:
        """Return the counter after a change of one of the jobs, or at the timeout."""
        return await self._changes.wait(after, timeout_seconds, job_ids)

    async def health(self) -> v.HealthView:
        """Return the daemon's own state."""
        return await self._health.view()

    async def shutdown(self, *, stop_jobs: bool, caller: Caller) -> v.ShutdownReply:
        """Begin to stop the daemon."""
        return self._shutdown.begin(stop_jobs=stop_jobs, by=caller.user)

    async def prune(self, *, older_than_seconds: float, dry_run: bool, caller: Caller) -> v.PruneReply:  # noqa: ARG002 - the port's signature
        """Remove files and records of jobs that ended long ago; see ``api.views.PruneReply``."""
        return await self._pruning.prune(older_than_seconds=older_than_seconds, dry_run=dry_run)
