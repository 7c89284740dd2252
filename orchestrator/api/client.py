"""The Python client of the daemon: one method for each request, with typed views as results.

Synchronous, on the standard library, one connection and one deadline for each call. Thread-safe. Views are imported
where they are used, so that a command without them starts faster.

    client = Client()                       # the daemon of this environment
    reply = client.submit("job.yaml")
    job = client.wait(reply.job_id)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from orchestrator.api.errors import BadRequestError, NotFoundError, OrchError, ProtocolMismatchError, error_from_json
from orchestrator.api.protocol import (
    API_PREFIX,
    LOG_END_KEY,
    LOG_ERROR_KEY,
    MAX_PAGE,
    MAX_WAIT_SECONDS,
    PAGE,
    REFERENCE_SEPARATOR,
    STREAM_HEARTBEAT_SECONDS,
)
from orchestrator.api.transport import submission, wire
from orchestrator.api.transport.endpoint import Endpoint, endpoint_from

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from orchestrator.api.files import FileDigest, FileList
    from orchestrator.api.matrix_views import MatrixView
    from orchestrator.api.page_links import PageLinkView
    from orchestrator.api.queue_views import OutlookView, QueueShares, QueueView
    from orchestrator.api.requests import ReservationRequest
    from orchestrator.api.spec_views import SpecDiff, SpecView
    from orchestrator.api.transport.endpoint import Endpoint
    from orchestrator.api.transport.following import Patience
    from orchestrator.api.transport.session_stream import SessionStream
    from orchestrator.api.usage_views import EstimateQualityView, UsageReport
    from orchestrator.api.views import (
        ActionReply,
        AuditEntry,
        CheckpointView,
        EventView,
        HealthView,
        JobList,
        JobView,
        LogLine,
        NodeActionReply,
        NodeView,
        PlanReply,
        PruneReply,
        ShutdownReply,
        StacksView,
        SubmitReply,
    )
    from orchestrator.gpu.row import GpuRow

DEADLINE_SECONDS = 10.0
SLOW_DEADLINE_SECONDS = 600.0
"""Deadline of requests that process every byte of something large: checkpoints, the record of jobs; or stop jobs."""


class Client:
    """HTTP client of the daemon at ``endpoint``; by default, of the one that the environment names."""

    def __init__(
        self,
        endpoint: Endpoint | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self._environ: Mapping[str, str] = os.environ if environ is None else environ
        self.endpoint = endpoint or endpoint_from(self._environ)
        self._deadline_seconds = deadline_seconds

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: object = None,
        seconds: float = 0.0,
    ) -> Any:
        return wire.call(
            self.endpoint,
            method,
            API_PREFIX + path + _query(query or {}),
            body=body,
            deadline_seconds=seconds or self._deadline_seconds,
        )

    # -- submitting

    def submit(
        self,
        path: str,
        *,
        overrides: Sequence[str] = (),
        resume_from: str | None = None,
        after: Sequence[str] = (),
        cwd: str | None = None,
        key: str = "",
    ) -> SubmitReply:
        """Submit the job.yaml at ``path``; ``working_dir`` is relative to the file's directory.

        Sends again, with the same key, when an answer is lost. Raises the daemon's errors, BadRequestError for an
        unreadable file, SecretMissingError.
        """
        text = submission.read_job_file(path)
        base = cwd or os.path.dirname(os.path.abspath(path))
        return self.submit_text(
            text, source=path, overrides=overrides, resume_from=resume_from, after=after, cwd=base, key=key
        )

    def submit_text(
        self,
        text: str,
        *,
        source: str = "job.yaml",
        overrides: Sequence[str] = (),
        resume_from: str | None = None,
        after: Sequence[str] = (),
        cwd: str | None = None,
        key: str = "",
    ) -> SubmitReply:
        """Submit a job.yaml given as text; ``cwd`` (default: the current directory) is the base of ``working_dir``."""
        from orchestrator.api.views import SubmitReply

        body = self._body(text, source, cwd, overrides=overrides, resume_from=resume_from, after=after, key=key)
        return SubmitReply.from_json(submission.submit(self.endpoint, body, environ=self._environ))

    def plan(
        self,
        text: str,
        *,
        source: str = "job.yaml",
        overrides: Sequence[str] = (),
        resume_from: str | None = None,
        after: Sequence[str] = (),
        cwd: str | None = None,
    ) -> PlanReply:
        """Return what a submission would do; nothing is stored."""
        from orchestrator.api.views import PlanReply

        body = self._body(text, source, cwd, overrides=overrides, resume_from=resume_from, after=after)
        plan = submission.plan(self.endpoint, body, deadline_seconds=self._deadline_seconds)
        return PlanReply.from_json(plan)

    def _body(
        self,
        text: str,
        source: str,
        cwd: str | None,
        *,
        overrides: Sequence[str],
        resume_from: str | None,
        after: Sequence[str],
        key: str = "",
    ) -> dict[str, Any]:
        return submission.request_body(
            text,
            source,
            environ=self._environ,
            cwd=cwd or os.getcwd(),
            overrides=overrides,
            resume_from=resume_from,
            after=after,
            key=key,
        )

    def submit_together(
        self, texts: Sequence[str], *, source: str = "job.yaml", cwd: str | None = None
    ) -> list[SubmitReply | OrchError]:
        """Submit several job.yaml given as texts, in few requests; ``cwd`` is as in ``submit_text``.

        Returns the result of each, in order: the accepted job, or the error that refused it. Each accepted job is on
        disk.
        """
        from orchestrator.api.views import SubmitReply

        base = cwd or os.getcwd()
        bodies = [submission.request_body(text, source, environ=self._environ, cwd=base) for text in texts]
        found = submission.submit_together(self.endpoint, bodies, environ=self._environ)
        return [each if isinstance(each, OrchError) else SubmitReply.from_json(each) for each in found]

    # -- reading

    def jobs(
        self,
        *,
        user: str | None = None,
        states: Sequence[str] = (),
        since: float | None = None,
        limit: int | None = None,
    ) -> JobList:
        """Return jobs, newest first: at most ``limit``, or all; ``since`` is seconds since the epoch."""
        from orchestrator.api.views import JobList

        query = {"user": user, "state": list(states), "since": since}
        jobs: list[JobView] = []
        version: int | None = None
        before: str | None = None
        while True:
            size = PAGE if limit is None else min(limit - len(jobs), MAX_PAGE)
            answer = self._call("GET", "/jobs", query={**query, "before": before, "limit": size})
            page = JobList.from_json(answer)
            version = page.version if version is None else version  # later changes are repeated, not lost
            jobs += page.jobs
            if not page.more or not page.jobs or len(jobs) == limit:
                return JobList(version=version, jobs=tuple(jobs), more=page.more)
            before = page.jobs[-1].id

    def job(self, ref: str) -> JobView:
        """Return one job, by id, unique prefix, name (the caller's newest of that name) or USER/NAME."""
        from orchestrator.api.views import JobView

        return JobView.from_json(self._call("GET", job_path(ref)))

    def events(self, ref: str, *, after: int = 0, tail: int | None = None) -> Sequence[EventView]:
        """Return the job's history, oldest first: all of it from sequence ``after`` on, or only its last ``tail`` events."""
        return [event for page in self.event_pages(ref, after=after, tail=tail) for event in page]

    def event_pages(self, ref: str, *, after: int = 0, tail: int | None = None) -> Iterator[Sequence[EventView]]:
        """Yield the events that ``events`` returns, page by page."""
        from orchestrator.api.views import EventList

        while tail != 0:
            query = {"after": after, "tail": tail}
            page = EventList.from_json(self._call("GET", job_path(ref, "/events"), query=query))
            yield page.events
            if not page.more or not page.events:
                return
            after, tail = page.events[-1].sequence, None

    def audit(self, *, limit: int = PAGE, since: float = 0.0) -> Sequence[AuditEntry]:
        """Return the last entries of the audit log, the oldest first."""
        from orchestrator.api.views import AuditList

        return AuditList.from_json(self._call("GET", "/audit", query={"limit": limit, "since": since})).entries

    def checkpoints(self, ref: str, *, verify: bool = False) -> Sequence[CheckpointView]:
        """Return the job's checkpoints, newest first; ``verify`` reads every byte."""
        from orchestrator.api.views import CheckpointList

        seconds = SLOW_DEADLINE_SECONDS if verify else 0.0
        query = {"verify": "true"} if verify else {}
        reply = self._call("GET", job_path(ref, "/checkpoints"), query=query, seconds=seconds)
        return CheckpointList.from_json(reply).checkpoints

    def nodes(self) -> Sequence[NodeView]:
        """Return every node of the cluster."""
        from orchestrator.api.views import NodeList

        return NodeList.from_json(self._call("GET", "/nodes")).nodes

    def gpus(self) -> Sequence[GpuRow]:
        """Return the present state of every GPU of every node: its load and heat, its faults, the ranks on it.

        Raises ProtocolMismatchError for an answer that holds something else.
        """
        from orchestrator.gpu.row import GpuRow

        reply = self._call("GET", "/gpus")
        try:
            return tuple(GpuRow.from_json(row) for row in reply["gpus"])
        except (KeyError, TypeError) as error:
            raise ProtocolMismatchError(f"the daemon's answer is not a list of GPUs: {error}") from error

    def health(self) -> HealthView:
        """Return the daemon's own state."""
        from orchestrator.api.views import HealthView

        return HealthView.from_json(self._call("GET", "/health"))

    def profile(self, ref: str, *, steps: int, rank: int = 0, timeout_seconds: float = 60.0) -> bytes:
        """Return a torch.profiler trace of the next ``steps`` steps of a running job: a Chrome trace, gzipped JSON."""
        return wire.fetch(
            self.endpoint,
            "POST",
            API_PREFIX + job_path(ref, "/profile"),
            body={"steps": steps, "rank": rank, "timeout_seconds": timeout_seconds},
            deadline_seconds=timeout_seconds + SLOW_DEADLINE_SECONDS,
        )

    def stacks(self, ref: str, *, rank: int | None = None) -> StacksView:
        """Return the stacks of a running job's ranks, or of one of them; also written to their logs."""
        from orchestrator.api.views import StacksView

        reply = self._call("POST", job_path(ref, "/stacks"), body={"rank": rank}, seconds=SLOW_DEADLINE_SECONDS)
        return StacksView.from_json(reply)

    # -- acting

    def cancel(self, ref: str, *, force: bool = False) -> ActionReply:
        """Stop the job for good: SIGTERM, time to save, SIGKILL. ``force``: SIGKILL at once; later its gang is given up."""
        return self._act(ref, "cancel", {"force": True} if force else None)

    def pause(self, ref: str) -> ActionReply:
        """Stop the job and keep it; ``resume`` continues from its last checkpoint."""
        return self._act(ref, "pause")

    def resume(self, ref: str) -> ActionReply:
        """Return a paused job to the queue."""
        return self._act(ref, "resume")

    def rerun(
        self, ref: str, *, from_checkpoint: bool = False, overrides: Sequence[str] = (), failed: bool = False
    ) -> ActionReply:
        """Submit the same job again, from the start or from its last checkpoint; ``overrides`` as for ``submit``.

        ``failed`` reruns only the failed combinations of a matrix.
        """
        details = {"from_checkpoint": from_checkpoint, "overrides": list(overrides), "failed": failed}
        return self._act(ref, "rerun", details)

    def update(self, ref: str, *, priority: int) -> ActionReply:
        """Change the job's priority (0 to 100)."""
        return self._act(ref, "update", {"priority": priority})

    def _act(self, ref: str, verb: str, body: Mapping[str, Any] | None = None) -> ActionReply:
        from orchestrator.api.views import ActionReply

        return ActionReply.from_json(self._call("POST", job_path(ref, f"/{verb}"), body=body or {}))

    def node_action(self, node: str, verb: str) -> NodeActionReply:
        """``cordon``, ``drain`` or ``uncordon`` a node."""
        from orchestrator.api.views import NodeActionReply

        return NodeActionReply.from_json(self._call("POST", f"/nodes/{quoted(node)}/{verb}", body={}))

    def shutdown(self, *, stop_jobs: bool = False) -> ShutdownReply:
        """Stop the daemon; jobs continue unless ``stop_jobs``."""
        from orchestrator.api.views import ShutdownReply

        seconds = SLOW_DEADLINE_SECONDS if stop_jobs else 0.0
        return ShutdownReply.from_json(self._call("POST", "/shutdown", body={"stop_jobs": stop_jobs}, seconds=seconds))

    def prune(self, *, older_than_seconds: float, dry_run: bool = False) -> PruneReply:
        """Remove the files and records of jobs that ended more than ``older_than_seconds`` ago."""
        from orchestrator.api.views import PruneReply

        body = {"older_than_seconds": older_than_seconds, "dry_run": dry_run}
        return PruneReply.from_json(self._call("POST", "/prune", body=body, seconds=SLOW_DEADLINE_SECONDS))

    # -- queues

    def queue_shares(self) -> QueueShares:
        """Return the order of waiting jobs, and the shares of queues and users."""
        from orchestrator.api.queue_views import QueueShares

        return QueueShares.from_json(self._call("GET", "/queues"))

    def outlook(self, ref: str = "") -> OutlookView:
        """Return when a job is expected to start and why; without ``ref``, the starts of the queue's first jobs."""
        from orchestrator.api.queue_views import OutlookView

        return OutlookView.from_json(self._call("GET", "/outlook", query={"job": ref}))

    def set_queue(
        self,
        name: str,
        *,
        guaranteed: int | None = None,
        maximum: int | None = None,
        unbounded: bool = False,
        weight: float | None = None,
        parent: str | None = None,
    ) -> QueueView:
        """Change or create a queue; None leaves a value, ``unbounded`` removes its maximum."""
        from orchestrator.api.queue_views import QueueView

        terms = {"guaranteed": guaranteed, "maximum": maximum, "weight": weight, "parent": parent}
        body = {"unbounded": unbounded} | {key: value for key, value in terms.items() if value is not None}
        return QueueView.from_json(self._call("POST", f"/queues/{quoted(name)}", body=body))

    def change_node(
        self,
        node: str,
        *,
        labels: Mapping[str, str | None] | None = None,
        reserve: ReservationRequest | None = None,
        unreserve: str | None = None,
    ) -> NodeActionReply:
        """Change a node: labels to set (None removes one), a reservation to add, or the id of one to remove ("" its only one)."""
        from orchestrator.api.views import NodeActionReply

        body: dict[str, Any] = {"labels": dict(labels or {}), "unreserve": unreserve}
        if reserve is not None:
            body["reserve"] = {"start": reserve.start, "seconds": reserve.seconds, "reason": reserve.reason}
        return NodeActionReply.from_json(self._call("POST", f"/nodes/{quoted(node)}", body=body))

    # -- specs, sessions, files, matrices, usage

    def spec(self, ref: str) -> SpecView:
        """Return what the job runs: its spec as resolved, interpreter, command, environment, archive, git commit."""
        from orchestrator.api.spec_views import SpecView

        return SpecView.from_json(self._call("GET", job_path(ref, "/spec")))

    def session(
        self,
        ref: str,
        *,
        rank: int = 0,
        argv: Sequence[str] = (),
        terminal: Mapping[str, Any] | None = None,
        port: int | None = None,
        attach: bool = False,
    ) -> SessionStream:
        """Start a command (default: a shell) beside a rank of a running job, or connect to ``port`` of its node.

        ``terminal`` is ``{"rows": ..., "columns": ..., "kind": TERM}``; without one the command has pipes. ``attach``
        connects to the rank's own terminal instead of starting a command.
        """
        from orchestrator.api.transport.session_stream import SessionStream

        size = None if terminal is None else dict(terminal)
        wanted: dict[str, Any] = {"port": port}
        if attach:
            wanted = {"attach": {"terminal": size}}
        elif port is None:
            wanted = {"command": {"argv": list(argv), "terminal": size}}
        return SessionStream(self.endpoint, job_path(ref, "/session"), {"rank": rank, **wanted})

    def files(self, ref: str, patterns: Sequence[str] = ()) -> FileList:
        """Return the job's outputs and checkpoints that match a pattern (none: all), for ``transport.download``."""
        from orchestrator.api.files import FileList

        return FileList.from_json(
            self._call("GET", job_path(ref, "/files"), query={"pattern": list(patterns)}, seconds=120.0)
        )

    def file_digest(self, ref: str, path: str) -> FileDigest:
        """Return the size and SHA-256 of one file."""
        from orchestrator.api.files import FileDigest

        reply = self._call("GET", job_path(ref, "/files/digest"), query={"path": path}, seconds=3600.0)
        return FileDigest.from_json(reply)

    def file_content(self, ref: str, path: str, offset: int = 0) -> Iterator[bytes]:
        """Yield the bytes of one file, from ``offset`` on. Raises ConnectionLostError if they end early."""
        query = _query({"path": path, "offset": offset})
        return wire.pieces(self.endpoint, API_PREFIX + job_path(ref, "/files/content") + query)

    def page_link(self) -> PageLinkView:
        """Return a link that signs a browser in to the daemon's page, once, as this user."""
        from orchestrator.api.page_links import PageLinkView

        return PageLinkView.from_json(self._call("POST", "/page/link", body={}))

    def matrix(self, ref: str) -> MatrixView:
        """Return a matrix, by id, unique prefix or name. Raises NotFoundError if it is a job's or unknown."""
        from orchestrator.api.matrix_views import MatrixView

        return MatrixView.from_json(self._call("GET", f"/matrices{_segment(ref)}"))

    def find_matrix(self, ref: str) -> MatrixView | None:
        """Return a matrix, like ``matrix``; None if the reference is a job's or unknown."""
        try:
            return self.matrix(ref)
        except NotFoundError:
            return None

    def hold(self, ref: str) -> ActionReply:
        """Keep a queued job from starting until ``release``."""
        from orchestrator.api.views import ActionReply

        return ActionReply.from_json(self._call("POST", job_path(ref, "/hold"), body={}))

    def release(self, ref: str) -> ActionReply:
        """Release a held job to the queue."""
        from orchestrator.api.views import ActionReply

        return ActionReply.from_json(self._call("POST", job_path(ref, "/release"), body={}))

    def usage(
        self, *, by: Sequence[str], since: float | None = None, until: float | None = None, price: float | None = None
    ) -> UsageReport:
        """Return what jobs used between two wall times, by ``user``, ``queue`` or ``label:KEY``."""
        from orchestrator.api.usage_views import UsageReport

        query = {"by": list(by), "since": since, "until": until, "price": price}
        return UsageReport.from_json(self._call("GET", "/usage", query=query, seconds=SLOW_DEADLINE_SECONDS))

    def estimate_quality(self) -> EstimateQualityView:
        """Return how often the intervals of estimates contained the time that jobs took."""
        from orchestrator.api.usage_views import EstimateQualityView

        return EstimateQualityView.from_json(self._call("GET", "/estimates"))

    def diff(self, before: str, after: str) -> SpecDiff:
        """Return the differences of the job ``after`` from the job ``before``."""
        from orchestrator.api.spec_views import SpecDiff

        return SpecDiff.from_json(self._call("GET", job_path(before, f"/diff{_segment(after)}")))

    # -- waiting

    def wait_change(
        self, after: int | None, *, job_ids: Sequence[str] = (), timeout_seconds: float = MAX_WAIT_SECONDS
    ) -> int:
        """Return the change counter, once it differs from ``after`` or at the timeout; at once for ``after`` None."""
        from orchestrator.api.views import ChangeReply

        held = 0.0 if after is None else min(timeout_seconds, MAX_WAIT_SECONDS)
        query = {"after": after, "timeout": held, "job": list(job_ids)}
        reply = self._call("GET", "/changes", query=query, seconds=held + self._deadline_seconds)
        return ChangeReply.from_json(reply).version

    def wait(self, ref: str, *, timeout_seconds: float | None = None, patience: Patience | None = None) -> JobView:
        """Return the job once it has ended; wait for a restarting daemon. Raises NotEndedError after ``timeout_seconds``."""
        from orchestrator.api.transport import following

        return following.wait(self, ref, timeout_seconds=timeout_seconds, patience=patience)

    def logs(
        self,
        ref: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        tail: int | None = None,
        since: float | None = None,
        follow: bool = False,
    ) -> Iterator[LogLine]:
        """Yield lines of the job's log, oldest first; with ``follow`` until the job has ended or the connection is lost.

        ``following.follow_logs`` continues after a loss. Raises ConnectionLostError if the log ends early.
        """
        from orchestrator.api.views import LogLine

        query = {"rank": rank, "attempt": attempt, "tail": tail, "since": since, "follow": "true" if follow else None}
        path = API_PREFIX + job_path(ref, "/logs") + _query(query)
        idle = 3 * STREAM_HEARTBEAT_SECONDS
        complete = False
        for item in wire.json_lines(self.endpoint, path, deadline_seconds=self._deadline_seconds, idle_seconds=idle):
            if LOG_END_KEY in item:
                complete = True
            elif LOG_ERROR_KEY in item:
                raise error_from_json(item[LOG_ERROR_KEY])
            else:
                yield LogLine.from_json(item)
        if not complete:
            raise wire.ConnectionLostError("the daemon stopped in the middle of the log")


def quoted(text: str) -> str:
    """Quote the text as a part of a path."""
    from urllib.parse import quote

    return quote(text, safe="")


def job_path(ref: str, rest: str = "") -> str:
    """Return the path of a job's resource. Raises BadRequestError for an invalid job reference."""
    return f"/jobs{_segment(ref)}{rest}"


def _segment(ref: str) -> str:
    user, slash, name = ref.rpartition("/")
    if name in {"", ".", ".."} or "/" in user or bool(slash) != bool(user):
        hint = "give an id, the beginning of one, a job's name, or USER/NAME"
        raise BadRequestError(f"{ref!r} names no job", hint=hint)
    return f"/{quoted(f'{user}{REFERENCE_SEPARATOR}{name}' if slash else ref)}"


def _query(values: Mapping[str, Any]) -> str:
    if not any(value is not None and value != [] for value in values.values()):
        return ""
    from urllib.parse import urlencode

    return "?" + urlencode({name: value for name, value in values.items() if value is not None}, doseq=True)
