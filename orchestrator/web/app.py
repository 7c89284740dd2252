"""The page's application: routes, each a few lines between the guard and the service.

A route reads the address, asks the service, renders. What a user may do is decided by the API's own functions.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, quote, urlencode

from markupsafe import Markup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from orchestrator.api.errors import (
    BadRequestError,
    DaemonStoppingError,
    InternalError,
    MethodNotAllowedError,
    NotFoundError,
    OrchError,
    UnauthenticatedError,
)
from orchestrator.api.server.app import own_job
from orchestrator.api.server.gate import FAILED, STOPPING
from orchestrator.api.service import ActionRequest, Caller, JobFilter, Verb
from orchestrator.core.states import JobState
from orchestrator.store.errors import StoreClosedError
from orchestrator.web.guard import Guard
from orchestrator.web.job_page import EFFECTS, LogQuestion, follow_log, job_parts, log_lines, verbs_for
from orchestrator.web.live import Channel, Channels, follow, stream
from orchestrator.web.overview import SHOWN, overview_parts
from orchestrator.web.rendering import render, static_files
from orchestrator.web.sign_in import COOKIE_SECONDS, REMEDY

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.requests import Request

    from orchestrator.api.service import JobService
    from orchestrator.core.ids import JobId
    from orchestrator.web.sign_in import SignIn

JOBS_ON_A_PAGE: Final = 100
EVENT_STREAM: Final = "text/event-stream"
MOST_NOTE: Final = 400


def create_page_app(service: JobService, sign_in: SignIn, closing: asyncio.Event, *, owner_uid: int) -> Guard:
    """The page behind its guard."""
    views = PageViews(service, closing)
    doors = Doors(sign_in)
    routes = [
        Route("/", views.overview),
        Route("/jobs", views.jobs),
        Route("/jobs/{ref}", views.job),
        Route("/jobs/{ref}/{verb}", views.confirm, methods=["GET"]),
        Route("/jobs/{ref}/{verb}", views.act, methods=["POST"]),
        Route("/live/overview", views.live_overview),
        Route("/live/jobs/{ref}", views.live_job),
        Route("/live/jobs/{ref}/log", views.live_log),
        Route("/signin", doors.enter),
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
        Starlette(routes=routes, exception_handlers=handlers), sign_in, owner_uid=owner_uid, refusal=error_page
    )


class Doors:
    """Signing in and out."""

    def __init__(self, sign_in: SignIn) -> None:
        self._sign_in = sign_in

    async def enter(self, request: Request) -> Response:
        """A link that works once becomes a cookie; the address then holds no secret any more."""
        cookie = self._sign_in.redeem(request.query_params.get("link", ""))
        answer = RedirectResponse("/", status_code=HTTPStatus.SEE_OTHER)
        answer.set_cookie(
            self._sign_in.cookie_name, cookie, max_age=int(COOKIE_SECONDS), httponly=True, samesite="strict"
        )
        return answer

    async def leave(self, request: Request) -> Response:
        """Remove the cookie."""
        answer = _page(request, "signed_out.html", title="Signed out", caller=None)
        answer.delete_cookie(self._sign_in.cookie_name, httponly=True, samesite="strict")
        return answer


class PageViews:
    """The pages, and the streams that keep them current. ``now`` gives Unix time."""

    def __init__(self, service: JobService, closing: asyncio.Event, now: Callable[[], float] = time.time) -> None:
        self._service = service
        self._closing = closing
        self._now = now
        self._channels = Channels()

    async def overview(self, request: Request) -> Response:
        """What is wrong, what runs, what waits, every GPU."""
        shown = _shown(request)
        parts = await overview_parts(self._service, self._now(), shown)
        live = f"/live/overview?gpus={shown}"
        return _page(request, "overview.html", title="Overview", here="/", live=live, parts=_markup(parts))

    async def live_overview(self, request: Request) -> Response:
        """The overview's stream."""
        shown = _shown(request)

        def make() -> Channel:
            return self._channel(lambda: overview_parts(self._service, self._now(), shown), frozenset())

        return _stream(stream(self._channels.channel(("overview", shown), make), self._closing))

    async def jobs(self, request: Request) -> Response:
        """All jobs, newest first, by state and user."""
        query = request.query_params
        state, user = query.get("state", "").upper(), query.get("user", "")
        if state and state not in JobState.__members__:
            raise BadRequestError(f"unknown job state {state!r}", hint=f"one of {', '.join(JobState)}")
        before = await self._service.resolve(query["before"]) if query.get("before") else None
        wanted = JobFilter(
            states=frozenset({state} if state else ()), user=user or None, before=before, limit=JOBS_ON_A_PAGE
        )
        found = await self._service.jobs(wanted)
        more = {"state": state.lower(), "user": user, "before": found[-1].id} if len(found) == JOBS_ON_A_PAGE else {}
        return _page(
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
        """One job and its log. A prefix or a name leads to the address that lasts."""
        job_id = await self._service.resolve(request.path_params["ref"])
        if job_id != request.path_params["ref"]:
            return RedirectResponse(_job_address(job_id), status_code=HTTPStatus.SEE_OTHER)
        question = _log_question(request)
        job = await self._service.job(job_id)
        parts = await job_parts(self._service, job_id, self._now(), may_act=await self._may_act(request, job_id))
        lines = await log_lines(self._service, job_id, question)
        return _page(
            request,
            "job.html",
            title=job.id,
            live=f"/live{_job_address(job_id)}",
            parts=_markup(parts),
            job=job,
            asked=question,
            lines=lines,
            log_live=f"/live{_job_address(job_id)}/log?{_log_query(question)}",
            spec=await self._service.spec(job_id),
        )

    async def live_job(self, request: Request) -> Response:
        """A job's stream; users who may act on it see other parts than those who may not."""
        job_id = await self._service.resolve(request.path_params["ref"])
        may_act = await self._may_act(request, job_id)

        def make() -> Channel:
            return self._channel(
                lambda: job_parts(self._service, job_id, self._now(), may_act=may_act), frozenset({job_id})
            )

        return _stream(stream(self._channels.channel(("job", job_id, may_act), make), self._closing))

    async def live_log(self, request: Request) -> Response:
        """The lines of a job's log, as they are written."""
        job_id = await self._service.resolve(request.path_params["ref"])
        return _stream(follow(follow_log(self._service, job_id, _log_question(request)), self._closing))

    async def confirm(self, request: Request) -> Response:
        """What an action does, and the button that does it."""
        verb = _verb(request)
        job_id = await own_job(self._service, request.path_params["ref"], _caller(request), verb)
        job = await self._service.job(job_id)
        title = f"{verb.capitalize()} {job_id}?"
        return _page(request, "confirm.html", title=title, verb=verb, job=job, effect=EFFECTS[verb])

    async def act(self, request: Request) -> Response:
        """Cancel, pause, resume or rerun a job that the API lets this user act on."""
        verb, caller = _verb(request), _caller(request)
        job_id = await own_job(self._service, request.path_params["ref"], caller, verb)
        form = _form(await request.body())
        rerun = verb is Verb.RERUN
        wanted = ActionRequest(
            verb=verb,
            from_checkpoint=rerun and form.get("from_checkpoint") == "yes",
            overrides=tuple(form.get("overrides", "").split()) if rerun else (),
        )
        reply = await self._service.act(job_id, wanted, caller)
        note = urlencode({"note": f"{job_id} {reply.message}"})
        return RedirectResponse(f"{_job_address(reply.job_id)}?{note}", status_code=HTTPStatus.SEE_OTHER)

    async def _may_act(self, request: Request, job_id: JobId) -> bool:
        caller, job = _caller(request), await self._service.job(job_id)
        return bool(verbs_for(job, may_act=caller.is_owner or job.uid == caller.uid))

    def _channel(self, render_parts: Callable[[], Awaitable[Mapping[str, str]]], jobs: frozenset[JobId]) -> Channel:
        async def wait(version: int, seconds: float) -> int:
            return await self._service.wait_change(version, seconds, jobs)

        return Channel(render_parts, self._service.change_version, wait)


async def static(request: Request) -> Response:
    """A static file; its address changes with its content, so that it can be kept for ever."""
    found = static_files().get(request.path_params["name"])
    if found is None or found.path != request.url.path:
        raise NotFoundError(f"there is no page {request.url.path}")
    return Response(
        found.body, media_type=found.media_type, headers={"cache-control": "public, max-age=31536000, immutable"}
    )


def error_page(error: OrchError, caller: Caller | None) -> bytes:
    """An error for people, with what to do next."""
    title = "Sign in" if isinstance(error, UnauthenticatedError) else error.code.replace("_", " ").capitalize()
    return render("error.html", **_frame(caller), title=title, error=error).encode("utf-8", "replace")


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, OrchError)
    body = error_page(error, getattr(request.state, "caller", None))
    return HTMLResponse(body, status_code=error.http_status)


async def _stopping(request: Request, _: Exception) -> Response:
    return await _ours(request, DaemonStoppingError(STOPPING))


async def _internal(request: Request, _: Exception) -> Response:
    return await _ours(request, InternalError(FAILED))  # Starlette raises it on to the guard, which logs it


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return await _ours(request, MethodNotAllowedError(f"{request.method} is not a method of {request.url.path}"))
    return await _ours(request, NotFoundError(f"there is no page {request.url.path}"))


def _frame(caller: Caller | None) -> dict[str, Any]:
    return {"caller": caller, "here": "", "live": "", "note": ""}


def _page(request: Request, template: str, **values: Any) -> HTMLResponse:
    note = request.query_params.get("note", "")[:MOST_NOTE]
    frame = {**_frame(getattr(request.state, "caller", None)), "note": note}
    return HTMLResponse(render(template, **{**frame, **values}).encode("utf-8", "replace"))


def _stream(events: Any) -> Response:
    return StreamingResponse(events, media_type=EVENT_STREAM, headers={"cache-control": "no-store"})


def _markup(parts: Mapping[str, str]) -> dict[str, Markup]:
    return {name: Markup(html) for name, html in parts.items()}  # noqa: S704 - a template's output, escaped there


def _caller(request: Request) -> Caller:
    caller = getattr(request.state, "caller", None)
    if not isinstance(caller, Caller):
        raise UnauthenticatedError("this browser is not signed in", hint=REMEDY)
    return caller


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
        if not (text.isascii() and text.isdecimal() and least <= int(text) < 2**31):
            raise BadRequestError(f"{name} {text!r} is not a number from {least} on")
        return int(text)

    return LogQuestion(rank=count("rank", 0), attempt=count("attempt", 1), text=query.get("q", "")[:MOST_NOTE])


def _log_query(question: LogQuestion) -> str:
    values = {"rank": question.rank, "attempt": question.attempt, "q": question.text}
    return urlencode({name: value for name, value in values.items() if value not in {None, ""}})


def _job_address(job_id: str) -> str:
    return f"/jobs/{quote(job_id, safe='')}"


def _form(body: bytes) -> dict[str, str]:
    found = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=32)
    return {name: values[-1] for name, values in found.items()}
