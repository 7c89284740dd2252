"""Submission from the browser: job.yaml, its errors at their lines, a preview, and the submission."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from starlette.responses import RedirectResponse, Response

from orchestrator.api.errors import BadRequestError, InvalidSpecError, OrchError
from orchestrator.api.protocol import MAX_YAML_BYTES
from orchestrator.api.requests import SubmitRequest
from orchestrator.api.server.audit import audited
from orchestrator.api.transport.submission import find_python
from orchestrator.web.answers import caller_of, form_of, job_address, page
from orchestrator.web.rendering import Verbatim

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.requests import Request

    from orchestrator.api.errors import Problem
    from orchestrator.api.service import JobService
    from orchestrator.api.views import PlanReply

SOURCE: Final = "job.yaml"
FIRST: Final = """version: 1
name: digits
entrypoint: python train.py
working_dir: .
resources:
  num_workers: 1
  resources_per_worker: {gpu: 1, cpu: 1}
"""
MAX_KEY: Final = 64
BESIDE: Final = 3
"""Number of lines shown before and after an invalid one."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the text, with its errors."""

    number: int
    text: str
    problems: Sequence[Problem]


class SubmitViews:
    """Routes of submission. ``environ`` is the daemon's: it defines ``python`` for a job that is submitted here."""

    def __init__(self, service: JobService, environ: Mapping[str, str] = os.environ) -> None:
        self._service = service
        self._environ = environ

    async def form(self, request: Request) -> Response:
        """Show the form, with a default text or the job.yaml of the job that ``from`` names."""
        query = request.query_params
        text, directory = FIRST, self._environ.get("HOME", "/")
        masked: tuple[str, ...] = ()
        if query.get("from"):
            job_id = await self._service.resolve(query["from"], caller_of(request))
            spec = await self._service.spec(job_id)
            text, masked = spec.yaml, spec.masked
            directory = (await self._service.job(job_id)).working_dir or directory
        return _shown(request, {"yaml": text, "cwd": directory, "key": secrets.token_hex(16)}, masked=masked)

    async def send(self, request: Request) -> Response:
        """Check or submit the job; show errors beside the text."""
        form = await form_of(request)
        try:
            asked = self._request(form)
            if form.get("do") != "submit":
                audited(request).detail = "a preview"
                return _shown(request, form, plan=await self._service.plan(asked, caller_of(request)))
            reply = await self._service.submit(asked, caller_of(request))
            audited(request).job = reply.matrix_id or reply.job_id or ""
        except OrchError as error:
            audited(request).result = error.code
            return _shown(request, form, error=error, status=error.http_status)
        if reply.job_id is None:
            names = ", ".join(reply.needs_secrets)
            wanted = BadRequestError(
                f"the job needs values of {names}, which come from the submitter's environment",
                hint="submit it with `orch submit job.yaml`",
            )
            return _shown(request, form, error=wanted, status=wanted.http_status)
        notes = {"note": " ".join([f"{reply.job_id} was submitted.", *reply.notes])}
        return RedirectResponse(f"{job_address(reply.job_id)}?{urlencode(notes)}", status_code=HTTPStatus.SEE_OTHER)

    def _request(self, form: Mapping[str, str]) -> SubmitRequest:
        text, directory, key = form.get("yaml", ""), form.get("cwd", "").strip(), form.get("key", "")
        if len(text.encode("utf-8", "replace")) > MAX_YAML_BYTES:
            raise BadRequestError(f"a job.yaml of more than {MAX_YAML_BYTES // 1024} KiB is refused")
        if not directory.startswith("/") or "\0" in directory:
            raise BadRequestError(
                f"{directory[:200]!r} is not an absolute directory", hint="name one of the daemon's machine"
            )
        if not 16 <= len(key) <= MAX_KEY or not key.isalnum():
            raise BadRequestError("the form is not this page's", hint="load the page again")
        path = self._environ.get("PATH", os.defpath)
        return SubmitRequest(
            yaml=text.replace("\r\n", "\n"),
            source=SOURCE,
            idempotency_key=key,
            cwd=directory,
            path=path,
            python=find_python(path),
        )


def _shown(
    request: Request,
    form: Mapping[str, str],
    *,
    error: OrchError | None = None,
    plan: PlanReply | None = None,
    masked: Sequence[str] = (),
    status: int = HTTPStatus.OK,
) -> Response:
    text = form.get("yaml", "").replace("\r\n", "\n")
    problems = list(error.problems) if isinstance(error, InvalidSpecError) else []
    return page(
        request,
        "submit.html",
        status=status,
        title="Submit",
        here="/submit",
        yaml=Verbatim(text),
        cwd=form.get("cwd", ""),
        key=form.get("key", ""),
        plan=plan,
        masked=masked,
        error=error,
        rows=numbered(text, problems) if problems else [],
        others=[one for one in problems if not _has_line(one, text)],
    )


def numbered(text: str, problems: Sequence[Problem]) -> list[Row]:
    """Return the lines with problems and their neighbours, each with its number; other lines are left out."""
    wrong = {one.line for one in problems if one.line is not None}
    return [
        Row(number, line, [one for one in problems if one.line == number])
        for number, line in enumerate(text.split("\n"), 1)
        if any(number + beside in wrong for beside in range(-BESIDE, BESIDE + 1))
    ]


def _has_line(problem: Problem, text: str) -> bool:
    return problem.line is not None and 1 <= problem.line <= text.count("\n") + 1
