"""Application of the page: routes, each a few lines between the guard and the service.

A route reads the address, calls the service, renders. The API's own functions decide what a user may do.
"""

from __future__ import annotations

import asyncio
import re
import time
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from orchestrator.api.errors import (
    BadRequestError,
    DaemonStoppingError,
    InternalError,
    MethodNotAllowedError,
    NotFoundError,
    OrchError,
    TooManyTriesError,
    UnauthenticatedError,
)
from orchestrator.api.protocol import MAX_NUMBER, Verb
from orchestrator.api.requests import ActionRequest
from orchestrator.api.server.app import own_job
from orchestrator.api.server.audit import audited
from orchestrator.api.server.gate import FAILED, STOPPING
from orchestrator.api.server.ownership import from_path, own_job_view
from orchestrator.api.service import JobFilter
from orchestrator.core.states import JobState
from orchestrator.spec.plain_files import read_plain
from orchestrator.store.errors import StoreClosedError
from orchestrator.web.answers import MAX_NOTE, caller_of, event_stream, form_of, frame, job_address, markup, page
from orchestrator.web.charts import ChartCache, window_of
from orchestrator.web.compare_page import CompareViews
from orchestrator.web.guard import Guard
from orchestrator.web.job_page import (
    EFFECTS,
    LogQuestion,
    follow_log,
    job_parts,
    log_lines,
    related_jobs,
    verbs_for,
)
from orchestrator.web.live import Channel, Channels, follow, stream
from orchestrator.web.node_page import NodeViews
from orchestrator.web.overview import SHOWN, overview_parts
from orchestrator.web.rendering import render, static_files
from orchestrator.web.sign_in import COOKIE_SECONDS
from orchestrator.web.submit_page import SubmitViews

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from starlette.requests import Request

    from orchestrator.api.server.audit import AuditLog
    from orchestrator.api.service import Caller, JobService
    from orchestrator.core.ids import JobId
    from orchestrator.web.charts import Window
    from orchestrator.web.sign_in import SignIn

JOBS_ON_A_PAGE: Final = 100
MAX_REPORT_BYTES: Final = 64 * 1024 * 1024
REPORT_POLICY: Final = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; sandbox; base-uri 'none'; frame-ancestors 'none'"
)


def create_page_app(
    service: JobService, sign_in: SignIn, closing: asyncio.Event, *, owner_uid: int, audit: AuditLog | None = None
) -> Guard:
    """Return the page behind its guard."""
    views = PageViews(service, closing)
    nodes = NodeViews(service, views.shelf, views.streamed)
    compare, submission = CompareViews(service), SubmitViews(service)
    doors = Doors(sign_in)
    routes = [
        Route("/", views.overview),
        Route("/jobs", views.jobs),
        Route("/jobs/{ref}", views.job),
        Route("/jobs/{ref}/report", views.report),
        Route("/jobs/{ref}/{verb}", views.confirm, methods=["GET"]),
        Route("/jobs/{ref}/{verb}", views.act, methods=["POST"]),
        Route("/nodes/{name}", nodes.node),
        Route("/nodes/{name}/{verb}", nodes.confirm, methods=["GET"]),
        Route("/nodes/{name}/{verb}", nodes.act, methods=["POST"]),
        Route("/compare", compare.compare),
        Route("/submit", submission.form, methods=["GET"]),
        Route("/submit", submission.send, methods=["POST"]),
        Route("/live/overview", views.live_overview),
        Route("/live/nodes/{name}", nodes.live),
        Route("/live/jobs/{ref}", views.live_job),
        Route("/live/jobs/{ref}/log", views.live_log),
        Route("/signin", doors.enter),
        Route("/signin", doors.enter_with_token, methods=["POST"]),
        Route("/signout", doors.leave, methods=["POST"]),
        Route("/static/{digest}/{name}", static),
    ]
    handlers: dict[Any, Any] = {
        OrchError: _ours,
        StoreClosedError: _stopping,
        HTTPException: _http,
        Exception: _internal,
    }
    return Guard(
        Starlette(routes=routes, exception_handlers=handlers),
        sign_in,
        owner_uid=owner_uid,
        refusal=error_page,
        audit=audit,
    )


class Doors:
    """Routes for signing in and out."""

    def __init__(self, sign_in: SignIn) -> None:
        self._sign_in = sign_in

    async def enter(self, request: Request) -> Response:
        """Exchange a one-time link for a cookie and redirect to the overview; without a link, show the form."""
        link = request.query_params.get("link")
        if link is None and self._sign_in.takes_token:
            return page(request, "sign_in.html", title="Sign in", caller=None, problem=None)
        return self._entered(request, self._sign_in.redeem(link or ""))

    async def enter_with_token(self, request: Request) -> Response:
        """Exchange the daemon's token for a cookie."""
        token = (await form_of(request)).get("token", "")
        try:
            cookie = self._sign_in.redeem_token(token, request.client.host if request.client else "")
        except (UnauthenticatedError, TooManyTriesError) as error:
            audited(request).result = error.code
            values = {"title": "Sign in", "caller": None, "problem": error}
            return page(request, "sign_in.html", status=error.http_status, **values)
        return self._entered(request, cookie)

    def _entered(self, request: Request, cookie: str) -> Response:
        answer = RedirectResponse("/", status_code=HTTPStatus.SEE_OTHER)
        secure = self._sign_in.reach.tls or request.headers.get("origin", "").startswith("https:")
        answer.set_cookie(
            self._sign_in.cookie_name,
            cookie,
            max_age=int(COOKIE_SECONDS),
            httponly=True,
            samesite="strict",
            secure=secure,
        )
        return answer

    async def leave(self, request: Request) -> Response:
        """End every session of the user, and remove the cookie."""
        await self._sign_in.sign_out(caller_of(request).uid)
        answer = page(request, "signed_out.html", title="Signed out", caller=None)
        name, tls = self._sign_in.cookie_name, self._sign_in.reach.tls
        answer.delete_cookie(name, httponly=True, samesite="strict", secure=tls)
        return answer


class PageViews:
    """Routes of the pages, and of the streams that keep them current. ``now`` returns Unix time."""

    def __init__(self, service: JobService, closing: asyncio.Event, now: Callable[[], float] = time.time) -> None:
        self._service = service
        self._closing = closing
        self._now = now
        self._channels = Channels()
        self.shelf = ChartCache(service)

    def streamed(
        self,
        key: tuple[object, ...],
        draw: Callable[[], Awaitable[Mapping[str, str]]],
        jobs: frozenset[JobId] = frozenset(),
    ) -> AsyncGenerator[bytes, None]:
        """Return server-sent events with the parts that ``draw`` returns, after changes of ``jobs`` (none: of any)."""

        def make() -> Channel:
            return self._channel(draw, jobs)

        return stream(self._channels.channel(key, make), self._closing)

    async def overview(self, request: Request) -> Response:
        """Show findings, running and waiting jobs, and every GPU."""
        shown = _shown(request)
        parts = await overview_parts(self._service, self._now(), shown)
        live = f"/live/overview?gpus={shown}"
        return page(request, "overview.html", title="Overview", here="/", live=live, parts=markup(parts))

    async def live_overview(self, request: Request) -> Response:
        """Stream the overview."""
        shown = _shown(request)

        return event_stream(
            self.streamed(("overview", shown), lambda: overview_parts(self._service, self._now(), shown))
        )

    async def jobs(self, request: Request) -> Response:
        """List jobs, newest first, by state and user."""
        query = request.query_params
        state, user = query.get("state", "").upper(), query.get("user", "")
        if state and state not in JobState.__members__:
            raise BadRequestError(f"unknown job state {state!r}", hint=f"one of {', '.join(JobState)}")
        before = await self._service.resolve(query["before"], caller_of(request)) if query.get("before") else None
        wanted = JobFilter(
            states=frozenset({state} if state else ()), user=user or None, before=before, limit=JOBS_ON_A_PAGE
        )
        found = await self._service.jobs(wanted)
        more = {"state": state.lower(), "user": user, "before": found[-1].id} if len(found) == JOBS_ON_A_PAGE else {}
        return page(
            request,
            "jobs.html",
            title="Jobs",
            here="/jobs",
            jobs=found,
            states=list(JobState),
            chosen_state=state,
            chosen_user=user,
            more=f"/jobs?{urlencode(more)}" if more else "",
        )

    async def job(self, request: Request) -> Response:
        """Show one job and its log; redirect a prefix or a name to the job's permanent address."""
        job_id = await self._resolved(request)
        if job_id != request.path_params["ref"]:
            return RedirectResponse(job_address(job_id), status_code=HTTPStatus.SEE_OTHER)
        question = _log_question(request)
        job = await self._service.job(job_id)
        window = window_of(request.query_params)
        parts = await self._job_parts(job_id, window, may_act=await self._may_act(request, job_id))
        lines = await log_lines(self._service, job_id, question)
        return page(
            request,
            "job.html",
            title=job.id,
            live=f"/live{job_address(job_id)}{f'?{urlencode(window.query)}' if window.query else ''}",
            parts=markup(parts),
            job=job,
            asked=question,
            lines=lines,
            log_live=f"/live{job_address(job_id)}/log?{_log_query(question)}",
            spec=await self._service.spec(job_id),
            related=await related_jobs(self._service, job),
        )

    async def report(self, request: Request) -> Response:
        """Show the report that was written at the job's end: one file, which may not run scripts or load others."""
        caller = caller_of(request)
        job = await own_job_view(self._service, from_path(request.path_params["ref"]), caller, "read the report of")
        try:
            data = (
                await asyncio.to_thread(read_plain, Path(job.report), MAX_REPORT_BYTES, real=True)
                if job.report
                else b""
            )
        except OSError as error:
            raise NotFoundError(f"the report of {job.id} cannot be read: {error.strerror}") from error
        if not data:
            raise NotFoundError(f"{job.id} has no report", hint=f"`orch report {job.id}` writes one")
        return HTMLResponse(data, headers={"content-security-policy": REPORT_POLICY})

    async def live_job(self, request: Request) -> Response:
        """Stream a job; users who may act on it get other parts than others."""
        job_id = await self._resolved(request)
        may_act, window = await self._may_act(request, job_id), window_of(request.query_params)
        return event_stream(
            self.streamed(
                ("job", job_id, may_act, window),
                lambda: self._job_parts(job_id, window, may_act=may_act),
                frozenset({job_id}),
            )
        )

    async def live_log(self, request: Request) -> Response:
        """Stream the lines of a job's log as they are written."""
        job_id = await self._resolved(request)
        return event_stream(follow(follow_log(self._service, job_id, _log_question(request)), self._closing))

    async def confirm(self, request: Request) -> Response:
        """Show the effect of an action, and the button that runs it."""
        verb = _verb(request)
        job_id = await own_job(self._service, from_path(request.path_params["ref"]), caller_of(request), verb)
        job = await self._service.job(job_id)
        title = f"{verb.capitalize()} {job_id}?"
        return page(request, "confirm.html", title=title, verb=verb, job=job, effect=EFFECTS[verb])

    async def act(self, request: Request) -> Response:
        """Cancel, pause, resume or rerun a job, if the API lets this user act on it."""
        verb, caller = _verb(request), caller_of(request)
        ref = from_path(request.path_params["ref"])
        audited(request).job = await self._service.resolve(ref, caller)
        job_id = await own_job(self._service, ref, caller, verb)
        form = await form_of(request)
        rerun = verb is Verb.RERUN
        wanted = ActionRequest(
            verb=verb,
            from_checkpoint=rerun and form.get("from_checkpoint") == "yes",
            overrides=tuple(form.get("overrides", "").split()) if rerun else (),
        )
        reply = await self._service.act(job_id, wanted, caller)
        note = urlencode({"note": f"{reply.job_id} {reply.message}"})
        return RedirectResponse(f"{job_address(reply.job_id)}?{note}", status_code=HTTPStatus.SEE_OTHER)

    async def _resolved(self, request: Request) -> JobId:
        return await self._service.resolve(from_path(request.path_params["ref"]), caller_of(request))

    async def _job_parts(self, job_id: JobId, window: Window, *, may_act: bool) -> Mapping[str, str]:
        charts = await self.shelf.of_job(await self._service.job(job_id), job_id, window)
        return await job_parts(self._service, job_id, self._now(), may_act=may_act, charts=charts)

    async def _may_act(self, request: Request, job_id: JobId) -> bool:
        caller, job = caller_of(request), await self._service.job(job_id)
        return bool(verbs_for(job, may_act=caller.is_owner or job.uid == caller.uid))

    def _channel(self, render_parts: Callable[[], Awaitable[Mapping[str, str]]], jobs: frozenset[JobId]) -> Channel:
        async def wait(version: int, seconds: float) -> int:
            return await self._service.wait_change(version, seconds, jobs)

        return Channel(render_parts, self._service.change_version, wait)


async def static(request: Request) -> Response:
    """Return a static file; its address changes with its content, so that browsers can cache it for ever."""
    found = static_files().get(request.path_params["name"])
    if found is None or found.path != request.url.path:
        raise NotFoundError(f"there is no page {request.url.path}")
    return Response(
        found.body, media_type=found.media_type, headers={"cache-control": "public, max-age=31536000, immutable"}
    )


def error_page(error: OrchError, caller: Caller | None) -> bytes:
    """Render an error for users, with what to do next."""
    title = "Sign in" if isinstance(error, UnauthenticatedError) else error.code.replace("_", " ").capitalize()
    return render("error.html", **frame(caller), title=title, error=error).encode("utf-8", "replace")


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, OrchError)
    audited(request).result = error.code
    body = error_page(error, getattr(request.state, "caller", None))
    return HTMLResponse(body, status_code=error.http_status)


async def _stopping(request: Request, _: Exception) -> Response:
    return await _ours(request, DaemonStoppingError(STOPPING))


async def _internal(request: Request, _: Exception) -> Response:
    return await _ours(request, InternalError(FAILED))  # Starlette raises it again for the guard, which logs it


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return await _ours(request, MethodNotAllowedError(f"{request.method} is not a method of {request.url.path}"))
    return await _ours(request, NotFoundError(f"there is no page {request.url.path}"))


def _verb(request: Request) -> Verb:
    text = request.path_params["verb"]
    if text not in EFFECTS:
        raise NotFoundError(f"there is no page {request.url.path}")
    return Verb(text)


def _shown(request: Request) -> str:
    shown = request.query_params.get("gpus", SHOWN[0])
    if shown not in SHOWN:
        raise BadRequestError(f"{shown!r} cannot be shown of GPUs", hint=f"one of {', '.join(SHOWN)}")
    return shown


def _log_question(request: Request) -> LogQuestion:
    query = request.query_params

    def count(name: str, least: int) -> int | None:
        text = query.get(name, "")
        if not text:
            return None
        if not (re.fullmatch("[0-9]{1,10}", text) and least <= int(text) <= MAX_NUMBER):
            raise BadRequestError(f"{name} {text[:20]!r} is not a number from {least} to {MAX_NUMBER}")
        return int(text)

    return LogQuestion(rank=count("rank", 0), attempt=count("attempt", 1), text=query.get("q", "")[:MAX_NOTE])


def _log_query(question: LogQuestion) -> str:
    values = {"rank": question.rank, "attempt": question.attempt, "q": question.text}
    return urlencode({name: value for name, value in values.items() if value not in {None, ""}})
