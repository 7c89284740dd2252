"""The client's queries about specs, queues and sessions: a part of ``api.client.Client``."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from orchestrator.api.errors import BadRequestError, NotFoundError, OrchError
from orchestrator.api.protocol import REFERENCE_SEPARATOR

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from orchestrator.api.files import FileDigest, FileList
    from orchestrator.api.matrix_views import MatrixView
    from orchestrator.api.page_links import PageLinkView
    from orchestrator.api.queue_views import OutlookView, QueueShares, QueueView, ReservationRequest
    from orchestrator.api.spec_views import SpecDiff, SpecView
    from orchestrator.api.transport.endpoint import Endpoint
    from orchestrator.api.transport.session_stream import SessionStream
    from orchestrator.api.usage_views import EstimateQualityView, UsageReport
    from orchestrator.api.views import ActionReply, NodeActionReply, SubmitReply

USAGE_SECONDS = 600.0
"""Deadline of a usage request: the daemon reads every event of every job in the time range."""


class QueueQuestions(ABC):
    """Queries about queues and when jobs start, and changes of queues and nodes."""

    @abstractmethod
    def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: object = None,
        seconds: float = 0.0,
    ) -> Any:
        """Return the daemon's answer; implemented by the client."""

    def queue_shares(self) -> QueueShares:
        """Return the order of waiting jobs, and the shares of queues and users."""
        from orchestrator.api.queue_views import QueueShares

        return QueueShares.from_json(self._call("GET", "/queues"))

    def outlook(self, ref: str = "") -> OutlookView:
        """Return when a job is expected to start and why; without ``ref``, the starts of the queue's first jobs."""
        from urllib.parse import urlencode

        from orchestrator.api.queue_views import OutlookView

        return OutlookView.from_json(self._call("GET", f"/outlook?{urlencode({'job': ref})}"))

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


class SpecQuestions(QueueQuestions):
    """Queries about what was submitted, differences of submissions, shares of queues, and sessions beside ranks."""

    endpoint: Endpoint

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
        from urllib.parse import urlencode

        from orchestrator.api.protocol import API_PREFIX
        from orchestrator.api.transport.wire import pieces

        query = urlencode({"path": path, "offset": offset})
        return pieces(self.endpoint, f"{API_PREFIX}{job_path(ref, '/files/content')}?{query}")

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
        return UsageReport.from_json(self._call("GET", "/usage", query=query, seconds=USAGE_SECONDS))

    def estimate_quality(self) -> EstimateQualityView:
        """Return how often the intervals of estimates contained the time that jobs took."""
        from orchestrator.api.usage_views import EstimateQualityView

        return EstimateQualityView.from_json(self._call("GET", "/estimates"))

    def diff(self, before: str, after: str) -> SpecDiff:
        """Return the differences of the job ``after`` from the job ``before``."""
        from orchestrator.api.spec_views import SpecDiff

        return SpecDiff.from_json(self._call("GET", job_path(before, f"/diff{_segment(after)}")))


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


class SubmissionQuestions(SpecQuestions):
    """Submissions of several jobs at once."""

    _environ: Mapping[str, str]

    def submit_together(
        self, texts: Sequence[str], *, source: str = "job.yaml", cwd: str | None = None
    ) -> list[SubmitReply | OrchError]:
        """Submit several job.yaml given as texts, in few requests; ``cwd`` is as in ``submit_text``.

        Returns the result of each, in order: the accepted job, or the error that refused it. Each accepted job is on
        disk.
        """
        from orchestrator.api.transport import submission
        from orchestrator.api.views import SubmitReply

        base = cwd or os.getcwd()  # noqa: PTH109 - every command imports this module
        bodies = [submission.request_body(text, source, environ=self._environ, cwd=base) for text in texts]
        found = submission.submit_together(self.endpoint, bodies, environ=self._environ)
        return [each if isinstance(each, OrchError) else SubmitReply.from_json(each) for each in found]
