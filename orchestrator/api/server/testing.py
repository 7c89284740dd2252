# ruff: noqa: D102 - JobService and ReadSource document the methods
"""A daemon without real jobs for tests: the service port in memory, and a server for it on a real socket.

For tests of the application, the client and the command line, also those of programs that use the client. The fake
keeps the port's guarantees (idempotency, references, the change counter, followed logs); the test sets times, places
and outcomes. The daemon does not import this module.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

import yaml

from orchestrator import __version__
from orchestrator.api.curve_views import CurveQuery, CurvesView, GpuHistoryView
from orchestrator.api.errors import (
    AmbiguousReferenceError,
    InvalidSpecError,
    NoSuchJobError,
    NoSuchNodeError,
    NotFoundError,
    Problem,
    RefusedError,
    WorkdirNeededError,
)
from orchestrator.api.page_links import PageLinkView
from orchestrator.api.protocol import BODY_SECONDS, MAX_BODY_BYTES, PAGE, PROTOCOL_VERSION, Verb
from orchestrator.api.queue_views import OutlookView, QueueShares, QueueView, UserShareView
from orchestrator.api.server.app import control_routes
from orchestrator.api.server.control_socket import bind_control_socket
from orchestrator.api.server.gate import Gate, GatePolicy
from orchestrator.api.server.listeners import ApiServer, Deadlines, address_of, bind_tcp, host_names
from orchestrator.api.server.read_app import MetricsPage, create_read_app, read_policy
from orchestrator.api.spec_views import SpecDiff, SpecView, ValueChange
from orchestrator.api.transport.endpoint import Endpoint
from orchestrator.api.usage_views import EstimateQualityView
from orchestrator.api.views import (
    TERMINAL_STATES,
    ActionReply,
    AuditEntry,
    CheckpointView,
    EventView,
    HealthView,
    JobView,
    LogLine,
    NodeActionReply,
    NodeView,
    PlannedRank,
    PlanReply,
    PruneLeft,
    PruneReply,
    RankStacksView,
    ReservationView,
    ShutdownReply,
    StacksView,
    SubmitReply,
    TargetGroup,
    ThreadView,
)
from orchestrator.core.ids import JobId, job_id
from orchestrator.runtime.ranks.session_messages import (
    EndOfInput,
    EndReason,
    Input,
    SessionEnd,
    SessionMessage,
    SessionOutput,
    SessionRequest,
    Signal,
    Size,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from fastapi import FastAPI

    from orchestrator.api.files import FileReader
    from orchestrator.api.matrix_views import MatrixView
    from orchestrator.api.requests import ActionRequest, NodeChange, ProfileRequest, QueueChange, SubmitRequest
    from orchestrator.api.server.control_socket import ControlSocket
    from orchestrator.api.service import Caller, JobFilter, LogQuery, NodeVerb, SessionChannel, UsageQuery
    from orchestrator.api.usage_views import UsageReport

FIRST_TIME = 1_790_000_000.0
OUTCOMES = {
    Verb.CANCEL: ("CANCELLED", "will stop"),
    Verb.PAUSE: ("SUSPENDED", "will save and stop"),
    Verb.RESUME: ("PENDING", "is back in the queue"),
    Verb.UPDATE: ("", "was changed"),
    Verb.HOLD: ("SUSPENDED", "is held"),
    Verb.RELEASE: ("PENDING", "is in the queue"),
}


FAIL = b"fail\n"
"""The command ends with code 3 when it reads this line."""
PYTHON = "/usr/bin/python3"
PAGE_ADDRESS = "http://127.0.0.1:8270/"


class FakeSession:
    """Echoes input; writes a new size to standard error; ends with code 0 at the end of input, or by a signal."""

    def __init__(self) -> None:
        self._out: asyncio.Queue[SessionOutput] = asyncio.Queue(8)
        self.closed = False

    async def read(self, seconds: float) -> SessionOutput:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._out.get()
        return SessionOutput()

    async def send(self, message: SessionMessage) -> None:
        match message:
            case Input(data=data) if data != FAIL:
                await self._out.put(SessionOutput(stdout=data))
            case Input():
                await self._end(exit_code=3)
            case EndOfInput():
                await self._end(exit_code=0)
            case Size(rows=rows, columns=columns):
                await self._out.put(SessionOutput(stderr=f"{rows}x{columns}\n".encode()))
            case Signal(number=number):
                await self._end(signal=number)

    async def _end(self, *, exit_code: int | None = None, signal: int | None = None) -> None:
        end = SessionEnd(reason=EndReason.EXITED, exit_code=exit_code, signal=signal)
        await self._out.put(SessionOutput(end=end))

    async def close(self) -> None:
        self.closed = True


# Making a control application takes 0.1 s, most of it in Pydantic: one fake after another reuses it.
class _Standin:
    """Proxy with the attributes of ``stands_for``."""

    stands_for: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stands_for, name)


class Routes:
    """The application for the service that ``lend`` was last called with."""

    def __init__(self) -> None:
        self.service, self.closing = _Standin(), _Standin()
        service: Any = self.service
        self.app: FastAPI = control_routes(service, cast("asyncio.Event", self.closing), service, service)

    def release(self) -> None:
        """Make the routes available to another fake. No request may be running."""
        _FREE.append(self)


_FREE: Final[list[Routes]] = []


def lend(service: object, closing: asyncio.Event) -> Routes:
    """Return routes that no other fake uses until ``release``."""
    routes = _FREE.pop() if _FREE else Routes()
    routes.service.stands_for, routes.closing.stands_for = service, closing
    return routes


class FakeService:
    """The service port in memory; satisfies ``JobService`` and ``ReadSource``. Use it from its event loop only.

    Matrices, queues, curves, GPUs and use are what a test has set.
    """

    used: UsageReport

    def __init__(self, owner: str = "owner") -> None:
        self.owner = owner
        self.ready = True
        self.accepted: dict[tuple[int, str], tuple[str, JobId]] = {}
        self.requests: list[SubmitRequest] = []
        self.calls: list[tuple[str, Any]] = []
        self.unremovable: set[str] = set()
        self.now = FIRST_TIME
        self._jobs: dict[JobId, JobView] = {}
        self._logs: dict[JobId, list[LogLine]] = {}
        self._events: dict[JobId, list[EventView]] = {}
        self._checkpoints: dict[JobId, list[CheckpointView]] = {}
        self.noted: list[AuditEntry] = []
        self._nodes = {"node-a": NodeView(id="a" * 8, name="node-a", state="READY", cpus_total=8.0, gpus_total=2.0)}
        self._changed: dict[JobId, int] = {}
        self._version = 1
        self._waiters: set[asyncio.Future[None]] = set()
        self.recorded: dict[str, CurvesView] = {}
        self.curve_queries: list[CurveQuery] = []
        self.history = GpuHistoryView()
        self.gpu_rows: Sequence[Mapping[str, Any]] = ()
        self.matrices: dict[str, MatrixView] = {}
        self.quality: EstimateQualityView = EstimateQualityView(confidence=0.95)
        self.outlook_answer: OutlookView = OutlookView()
        self._queues: tuple[QueueView, ...] = ()
        self._users: tuple[UserShareView, ...] = ()
        self.files_of: dict[JobId, FileReader] = {}
        self.pieces: dict[str, bytes] = {}

    # -- methods for tests

    def add(self, name: str = "digits", **fields: Any) -> JobView:
        """Add a job, by default pending."""
        new = job_id(name, 7919 * (len(self._jobs) + 1))
        self.now += 1.0
        values: dict[str, Any] = {
            "user": self.owner,
            "uid": 0,
            "queue": "default",
            "priority": 50,
            "state": "PENDING",
            "reason": "waits for its turn",
            "submitted_at": self.now,
        }
        self._jobs[new] = JobView(id=new, name=name, **{**values, **fields})
        self._note(new, "job_submitted")
        return self._jobs[new]

    def set(self, ref: str, **fields: Any) -> JobView:
        """Change fields of a job, and wake its waiters."""
        key = JobId(ref)
        if fields.get("state") in TERMINAL_STATES:
            fields.setdefault("ended_at", self.now)
        job = self._jobs[key] = replace(self._jobs[key], version=self._jobs[key].version + 1, **fields)
        self._note(key, "job_changed")
        return job

    def write(self, ref: str, *texts: str, rank: int = 0, attempt: int = 1, stream: str = "stdout") -> None:
        """Add lines to a job's log."""
        for text in texts:
            self.now += 1.0
            line = LogLine(at=self.now, attempt=attempt, rank=rank, stream=stream, text=text)
            self._logs.setdefault(JobId(ref), []).append(line)
        self._wake()

    async def entries(self, limit: int, since: float) -> list[AuditEntry]:
        """Return the last entries of the audit log, as ``AuditLog`` does."""
        return [entry for entry in self.noted if entry.at >= since][-limit:]

    def save(self, ref: str, checkpoint: CheckpointView) -> None:
        """Add a checkpoint of a job."""
        self._checkpoints.setdefault(JobId(ref), []).insert(0, checkpoint)

    def _note(self, key: JobId, kind: str) -> None:
        history = self._events.setdefault(key, [])
        history.append(EventView(sequence=len(history) + 1, at=self.now, kind=kind, summary=self._jobs[key].reason))
        self._version += 1
        self._changed[key] = self._version
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def _woken(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    # -- the port

    async def submit(self, request: SubmitRequest, caller: Caller) -> SubmitReply:
        self.requests.append(request)
        spec = self._spec(self.with_files(request, caller))
        known = self.accepted.get((caller.uid, request.idempotency_key))
        if known is not None:
            if known[0] != request.yaml:
                raise RefusedError("this idempotency key was used for another job", hint="use a fresh one")
            return SubmitReply(job_id=known[1], created=False, state=self._jobs[known[1]].state)
        if missing := tuple(name for name in spec.get("secrets", ()) if name not in request.secrets):
            return SubmitReply(job_id=None, created=False, state=None, needs_secrets=missing)
        job = self.add(str(spec.get("name", "job")), user=caller.user, uid=caller.uid, working_dir=request.cwd)
        self.accepted[caller.uid, request.idempotency_key] = (request.yaml, JobId(job.id))
        return SubmitReply(job_id=job.id, created=True, state=job.state, notes=tuple(spec.get("notes", ())))

    def _spec(self, request: SubmitRequest) -> dict[str, Any]:
        try:
            spec = yaml.safe_load(request.yaml)
        except yaml.YAMLError:
            spec = None
        if not isinstance(spec, dict) or "entrypoint" not in spec:
            problem = Problem("is missing", "entrypoint", 1, 1, "write it", request.source)
            raise InvalidSpecError(f"{request.source} has one error", problems=[problem])
        return spec

    async def plan(self, request: SubmitRequest, caller: Caller) -> PlanReply:
        spec = self._spec(request)
        self.calls.append(("plan", caller.user))
        return PlanReply(
            name=str(spec.get("name", "job")),
            queue="default",
            starts="now",
            reason="two GPUs are free on node-a",
            seats=(PlannedRank(rank=0, node="node-a", gpus=1.0, cpus=2.0),),
            python=request.python or "",
            working_dir=request.cwd,
        )

    async def jobs(self, query: JobFilter) -> Sequence[JobView]:
        found = [
            job
            for job in reversed(self._jobs.values())
            if (query.user is None or job.user == query.user)
            and (not query.states or job.state in query.states)
            and (query.since is None or job.submitted_at >= query.since)
        ]
        if query.before is not None:
            order = list(self._jobs)
            found = [job for job in found if order.index(JobId(job.id)) < order.index(query.before)]
        return found[: query.limit]

    async def resolve(self, ref: str, caller: Caller) -> JobId:
        if ref in self._jobs:
            return JobId(ref)
        user, _, name = ref.rpartition("/")
        user = user or (self.owner if caller.is_owner else caller.user)
        named = [key for key, job in self._jobs.items() if (job.user, job.name) == (user, name)]
        if named:
            return named[-1]
        found = [key for key in self._jobs if key.startswith(ref)]
        if not found:
            raise NoSuchJobError(f"no job is called {ref!r}")
        if len(found) > 1:
            candidates = [Problem(message=self._jobs[key].state, path=key) for key in found]
            raise AmbiguousReferenceError(f"{ref!r} fits {len(found)} jobs", problems=candidates)
        return found[0]

    async def job(self, job_id: JobId) -> JobView:
        try:
            return self._jobs[job_id]
        except KeyError as error:
            raise NoSuchJobError(f"no job is called {job_id!r}") from error

    async def events(
        self, job_id: JobId, after: int, *, limit: int = PAGE, tail: int | None = None
    ) -> Sequence[EventView]:
        history = self._events[job_id]
        first = 0 if tail is None else max(0, len(history) - tail)
        return [event for event in history[first:] if event.sequence > after][:limit]

    async def act(self, job_id: JobId, request: ActionRequest, caller: Caller) -> ActionReply:
        self.calls.append((request.verb, caller.user))
        job = self._jobs[job_id]
        if request.verb is Verb.RERUN:
            job = self.add(job.name, user=caller.user, uid=caller.uid)
            return ActionReply(job_id=job.id, state=job.state, message=f"runs what {job_id} ran, from its archive")
        state, message = OUTCOMES[request.verb]
        if job.is_terminal and job.state != state:
            raise RefusedError(
                f"job {job.id} has {job.state.lower()} already", hint=f"`orch rerun {job.id}` starts it again"
            )
        fields: dict[str, Any] = {"priority": request.priority} if request.verb is Verb.UPDATE else {"state": state}
        if not job.is_terminal:
            job = self.set(job_id, **fields)
        return ActionReply(job_id=job.id, state=job.state, message=message)

    async def logs(self, job_id: JobId, query: LogQuery) -> AsyncGenerator[Sequence[LogLine], None]:
        lines = self._logs.setdefault(job_id, [])
        newest = max((line.attempt for line in lines), default=1)
        query.check(job_id, ranks=self._jobs[job_id].num_workers, attempts=max(newest, self._jobs[job_id].attempt))
        attempt = query.attempt or (newest if query.since is None else None)

        def wanted(line: LogLine) -> bool:
            return (
                (query.rank is None or line.rank == query.rank)
                and (query.attempt is None or line.attempt == query.attempt)
                and (query.since is None or line.at >= query.since)
                and query.has(line.text)
            )

        first = [line for line in lines if wanted(line) and attempt in {None, line.attempt}]
        given = len(lines)
        yield first if query.tail is None else first[len(first) - query.tail :] if query.tail else []
        while query.follow and not (self._jobs[job_id].is_terminal and given == len(lines)):
            if given == len(lines):
                await self._woken()
            fresh, given = lines[given:], len(lines)
            yield [line for line in fresh if wanted(line)]

    async def checkpoints(self, job_id: JobId, *, verify: bool) -> Sequence[CheckpointView]:
        found = self._checkpoints.get(job_id, [])
        if not verify:
            return found
        return [replace(item, valid=not item.problem) for item in found]

    def change_version(self) -> int:
        return self._version

    async def wait_change(self, after: int, timeout_seconds: float, job_ids: frozenset[JobId] = frozenset()) -> int:
        try:
            async with asyncio.timeout(timeout_seconds):
                while after <= self._version and not any(
                    version > after for key, version in self._changed.items() if not job_ids or key in job_ids
                ):
                    await self._woken()
        except TimeoutError:
            pass
        return self._version

    async def profile(self, job_id: JobId, request: ProfileRequest) -> bytes:
        self.calls.append(("profile", (job_id, request)))
        if self._jobs[job_id].state != "RUNNING":
            raise RefusedError(f"{job_id} does not run")
        return b"a trace"

    async def stacks(self, job_id: JobId, rank: int | None) -> StacksView:
        job = self._jobs[job_id]
        if job.state != "RUNNING":
            raise RefusedError(f"{job_id} does not run")
        ranks = range(job.num_workers) if rank is None else (rank,)
        frames = ("train (/work/train.py:7)",)
        looks = (
            RankStacksView(rank=number, pid=100 + number, state="S", threads=(ThreadView(name="Main", frames=frames),))
            for number in ranks
        )
        return StacksView(job_id=job_id, ranks=tuple(looks))

    async def health(self) -> HealthView:
        counts: dict[str, int] = {}
        for job in self._jobs.values():
            counts[job.state] = counts.get(job.state, 0) + 1
        return HealthView(
            ready=self.ready,
            version=__version__,
            protocol=PROTOCOL_VERSION,
            pid=1,
            owner=self.owner,
            started_at=FIRST_TIME,
            counts=counts,
            nodes=len(self._nodes),
            problems=() if self.ready else ("Ray is starting",),
        )

    async def not_ready(self) -> Sequence[str]:
        return () if self.ready else ("Ray is starting",)

    def shutdown(self, *, stop_jobs: bool, caller: Caller) -> ShutdownReply:
        self.calls.append(("shutdown", (stop_jobs, caller.user)))
        running = tuple(job.id for job in self._jobs.values() if not job.is_terminal)
        return ShutdownReply(stopped=running) if stop_jobs else ShutdownReply(running=running)

    async def prune(self, *, older_than_seconds: float, dry_run: bool) -> PruneReply:
        self.calls.append(("prune", (older_than_seconds, dry_run)))
        ended = [key for key, job in self._jobs.items() if job.is_terminal]
        old = [key for key in ended if dry_run or key not in self.unremovable]
        left = [
            PruneLeft(job_id=key, directory=f"/home/jobs/{key}", reason="out: Operation not permitted")
            for key in ended
            if key not in old
        ]
        if not dry_run:
            for key in old:
                del self._jobs[key]
        kept = tuple(f"s3://bucket/{key}" for key in old)
        return PruneReply(removed=tuple(old), freed_bytes=1024 * len(old), dry_run=dry_run, kept=kept, left=tuple(left))

    async def metrics(self, accept: str) -> MetricsPage:
        kind = "application/openmetrics-text" if "openmetrics" in accept else "text/plain"
        return MetricsPage(b"orch_up 1\n", f"{kind}; version=0.0.4")

    async def targets(self) -> Sequence[TargetGroup]:
        return [TargetGroup(targets=("127.0.0.1:9400",), labels={"node": "node-a"})]

    async def curves(self, job_id: JobId, query: CurveQuery) -> CurvesView:
        self.curve_queries.append(query)
        return self.recorded.get(job_id, CurvesView(job_id=job_id))

    async def gpu_history(self, uuids: Sequence[str], query: CurveQuery) -> GpuHistoryView:
        self.curve_queries.append(query)
        return replace(self.history, uses=tuple(use for use in self.history.uses if use.gpu_uuid in uuids))

    async def gpus(self, max_age_seconds: float = 0.0) -> Sequence[Mapping[str, Any]]:  # noqa: ARG002 - the port's signature
        return self.gpu_rows

    async def find_matrix(self, ref: str, caller: Caller) -> str | None:  # noqa: ARG002
        named = [found.id for found in self.matrices.values() if found.name == ref]
        return ref if ref in self.matrices else named[-1] if named else None

    async def matrix(self, matrix_id: str) -> MatrixView:
        if matrix_id not in self.matrices:
            raise NotFoundError(f"there is no matrix {matrix_id!r}")
        return self.matrices[matrix_id]

    async def usage(self, query: UsageQuery) -> UsageReport:
        self.calls.append(("usage", query))
        return self.used

    async def estimate_quality(self) -> EstimateQualityView:
        return self.quality

    async def act_on_matrix(self, matrix_id: str, request: ActionRequest, caller: Caller) -> ActionReply:
        self.calls.append((f"{request.verb} matrix", (request, caller.user)))
        found = self.matrices[matrix_id]
        ids = tuple(job.job_id for job in found.jobs)
        return ActionReply(job_id=matrix_id, state=found.state, message=f"{len(ids)} jobs", job_ids=ids)

    async def nodes(self) -> Sequence[NodeView]:
        return sorted(self._nodes.values(), key=lambda node: node.name)

    async def node_action(self, node: str, verb: NodeVerb, caller: Caller) -> NodeActionReply:
        self.calls.append((verb, caller.user))
        state = {"cordon": "CORDONED", "drain": "DRAINING", "uncordon": "READY"}[verb]
        self._nodes[node] = replace(self._known(node), state=state)
        return NodeActionReply(node=node, state=state, message=f"{node} is {state.lower()}")

    async def change_node(self, node: str, change: NodeChange, caller: Caller) -> NodeActionReply:
        self.calls.append(("change_node", (node, change, caller.user)))
        known = self._known(node)
        after = {**known.labels, **change.labels}
        labels = {key: value for key, value in after.items() if value is not None}
        kept = tuple(one for one in known.reservations if one.id != change.unreserve)
        if (asked := change.reserve) is not None:
            view = ReservationView(
                id=f"r{len(kept) + 1}",
                start_at=asked.start,
                end_at=asked.start + asked.seconds,
                reason=asked.reason,
                by=caller.user,
            )
            kept = (*kept, view)
        self._nodes[node] = replace(known, labels=labels, reservations=kept)
        return NodeActionReply(node=node, state=known.state, message=f"{node} has {len(labels)} labels")

    def _known(self, node: str) -> NodeView:
        if node not in self._nodes:
            raise NoSuchNodeError(f"no node is called {node!r}")
        return self._nodes[node]

    async def queue_shares(self) -> QueueShares:
        waiting = [job for job in self._jobs.values() if job.state == "PENDING"]
        waiting.sort(key=lambda job: (-job.priority, job.submitted_at))
        return QueueShares(order=tuple(job.id for job in waiting), queues=self._queues, users=self._users)

    async def outlook(self, job_id: JobId | None) -> OutlookView:
        self.calls.append(("outlook", job_id))
        return self.outlook_answer

    async def set_queue(self, name: str, change: QueueChange, caller: Caller) -> QueueView:
        self.calls.append(("set_queue", (name, change, caller.user)))
        known = {queue.name: queue for queue in self._queues}
        before = known.get(name, QueueView(name=name))
        after = replace(
            before,
            parent=before.parent if change.parent is None else change.parent,
            guaranteed=before.guaranteed if change.guaranteed is None else change.guaranteed,
            maximum=None if change.unbounded else before.maximum if change.maximum is None else change.maximum,
            weight=before.weight if change.weight is None else change.weight,
            changed_by=caller.user,
        )
        self._queues = tuple({**known, name: after}.values())
        return after

    async def open_session(self, job_id: JobId, rank: int, request: SessionRequest, caller: Caller) -> SessionChannel:
        if self._jobs[job_id].state != "RUNNING":
            raise RefusedError(f"{job_id} does not run")
        self.calls.append(("session", (rank, request, caller.user)))
        return FakeSession()

    async def spec(self, job_id: JobId) -> SpecView:
        job = self._jobs[job_id]
        return SpecView(
            job_id=job.id,
            name=job.name,
            user=job.user,
            submitted_at=job.submitted_at,
            spec={"name": job.name, "entrypoint": "python train.py"},
            yaml=f"name: {job.name}\nentrypoint: python train.py\n",
            python=PYTHON,
            command=(PYTHON, "train.py"),
        )

    async def diff(self, before: JobId, after: JobId) -> SpecDiff:
        names = (self._jobs[before].name, self._jobs[after].name)
        values = () if names[0] == names[1] else (ValueChange(key="name", before=names[0], after=names[1]),)
        return SpecDiff(before=before, after=after, values=values)

    async def job_files(self, job_id: JobId) -> FileReader:
        return self.files_of[job_id]

    def link(self, caller: Caller) -> PageLinkView:
        return PageLinkView(url=f"{PAGE_ADDRESS}signin?link={caller.user}", address=PAGE_ADDRESS, valid_seconds=600.0)

    async def missing_pieces(self, digests: Sequence[str], size_bytes: int, caller: Caller) -> Sequence[str]:  # noqa: ARG002
        return [digest for digest in digests if digest not in self.pieces]

    async def put_piece(self, digest: str, data: bytes, caller: Caller) -> None:  # noqa: ARG002
        self.pieces[digest] = data

    def with_files(self, request: SubmitRequest, caller: Caller) -> SubmitRequest:
        """Return the request. Raises WorkdirNeededError if its files are on another machine."""
        if caller.is_elsewhere and not request.upload:
            raise WorkdirNeededError("working_dir . is on the submitter's machine")
        return request


class ServedFake:
    """A FakeService behind real listeners, on an event loop in its own thread."""

    def __init__(self, directory: Path, policy: GatePolicy, token: str, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self.service = FakeService()
        self.endpoint = Endpoint(socket_path=str(directory / "orch.sock"))
        self.tcp_endpoint = Endpoint()
        self.read_address = ""
        self._directory = directory
        self._policy = policy
        self._token = token
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="orch-fake")
        self._closing = asyncio.Event()
        self._servers: list[ApiServer] = []
        self._held: list[ControlSocket | Routes] = []

    def do(self, work: Callable[[FakeService], Any]) -> Any:
        """Run ``work`` on the service, in its thread; return its result."""

        async def inside() -> Any:
            return work(self.service)

        return asyncio.run_coroutine_threadsafe(inside(), self._loop).result(timeout=300)

    def start(self) -> None:
        """Listen; the jobs of an earlier start still exist."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(timeout=300)

    def stop(self) -> None:
        """Stop listening, like a daemon that stops in an orderly way."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(timeout=300)

    def read_with_token(self, token: str) -> Endpoint:
        """Open another reading port, which requires this token."""

        async def open_port() -> Endpoint:
            sock = bind_tcp("127.0.0.1", 0)
            host, _, port = address_of(sock).rpartition(":")
            policy = read_policy("orch.example", token, self._policy.owner_uid)
            await self._serve(create_read_app(self.service, policy), sock)
            return Endpoint(host=host, port=int(port))

        return asyncio.run_coroutine_threadsafe(open_port(), self._loop).result(timeout=300)

    async def _start(self) -> None:
        self._closing = asyncio.Event()
        control = bind_control_socket(self._directory / "orch.sock")
        routes = lend(self.service, self._closing)
        self._held = [control, routes]
        await self._serve(Gate(routes.app, self._policy), control.sock)
        if self._token:
            tcp = bind_tcp("127.0.0.1", 0)
            host, _, port = address_of(tcp).rpartition(":")
            self.tcp_endpoint = Endpoint(host=host, port=int(port), token=self._token)
            policy = replace(self._policy, token=self._token, hosts=host_names(host))
            await self._serve(Gate(routes.app, policy), tcp)
        reading = bind_tcp("127.0.0.1", 0)
        self.read_address = address_of(reading)
        policy = read_policy("127.0.0.1", "", self._policy.owner_uid)
        await self._serve(create_read_app(self.service, policy), reading)

    async def _serve(self, app: Any, sock: Any) -> None:
        server = ApiServer(app, [sock], deadlines=self._deadlines, sessions=True)
        await server.start()
        self._servers.append(server)

    async def _stop(self) -> None:
        self._closing.set()
        await asyncio.gather(*(server.stop() for server in self._servers))
        self._servers.clear()
        while self._held:
            self._held.pop().release()

    @contextmanager
    def running(self) -> Iterator[ServedFake]:
        """Run the thread, and listen, during the block."""
        self._thread.start()
        try:
            self.start()
            yield self
        finally:
            self.stop()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=300)
            self._loop.close()


@contextmanager
def serve_fake(
    directory: Path,
    *,
    owner_uid: int,
    token: str = "",
    max_body_bytes: int = MAX_BODY_BYTES,
    body_seconds: float = BODY_SECONDS,
    deadlines: Deadlines | None = None,
) -> Iterator[ServedFake]:
    """Serve a FakeService on ``directory/orch.sock``, on a reading port, and with ``token`` on a TCP control port."""
    policy = GatePolicy(owner_uid=owner_uid, max_body_bytes=max_body_bytes, body_seconds=body_seconds)
    served = ServedFake(directory, policy, token, deadlines or Deadlines())
    with served.running():
        yield served
