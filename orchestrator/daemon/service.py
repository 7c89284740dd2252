"""The daemon's implementation of the API: for each request, the part that answers it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.daemon.changes import Changes
    from orchestrator.daemon.curves import Curves
    from orchestrator.daemon.health import DaemonHealth
    from orchestrator.daemon.nodes.actions import NodeActions
    from orchestrator.daemon.nodes.queries import NodeQueries
    from orchestrator.daemon.requests.actions import JobActions
    from orchestrator.daemon.requests.files import JobSpecs
    from orchestrator.daemon.requests.matrices import Matrices
    from orchestrator.daemon.requests.pruning import Pruning
    from orchestrator.daemon.requests.queues import Queues
    from orchestrator.daemon.requests.ranks import JobSessions, RankInspection
    from orchestrator.daemon.requests.reader import JobReader
    from orchestrator.daemon.requests.submissions import Submissions
    from orchestrator.daemon.requests.usage import Usage
    from orchestrator.daemon.stopping import Shutdown


class Service:
    """Implements ``api.service.JobService``; each method is the part's own."""

    def __init__(
        self,
        *,
        submissions: Submissions,
        reader: JobReader,
        specs: JobSpecs,
        actions: JobActions,
        matrices: Matrices,
        queues: Queues,
        usage: Usage,
        curves: Curves,
        inspection: RankInspection,
        sessions: JobSessions,
        nodes: NodeQueries,
        node_actions: NodeActions,
        changes: Changes,
        health: DaemonHealth,
        pruning: Pruning,
        shutdown: Shutdown,
    ) -> None:
        self.submit = submissions.submit
        self.plan = submissions.plan
        self.missing_pieces = submissions.missing_pieces
        self.put_piece = submissions.put_piece
        self.jobs = reader.jobs
        self.resolve = reader.resolve
        self.job = reader.job
        self.events = reader.events
        self.logs = reader.logs
        self.checkpoints = reader.checkpoints
        self.spec = specs.spec
        self.diff = specs.diff
        self.job_files = specs.files
        self.act = actions.act
        self.find_matrix = matrices.find
        self.matrix = matrices.matrix
        self.act_on_matrix = matrices.act
        self.queue_shares = queues.shares
        self.outlook = queues.outlook
        self.set_queue = queues.change
        self.usage = usage.report
        self.estimate_quality = usage.estimate_quality
        self.curves = curves.curves
        self.gpu_history = curves.gpu_history
        self.profile = inspection.profile
        self.stacks = inspection.stacks
        self.open_session = sessions.open
        self.nodes = nodes.views
        self.gpus = nodes.gpus
        self.node_action = node_actions.act
        self.change_node = node_actions.change
        self.change_version = changes.current
        self.wait_change = changes.wait
        self.health = health.view
        self.prune = pruning.prune
        self.shutdown = shutdown.begin
