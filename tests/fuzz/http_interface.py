"""Fuzzes the HTTP interface: schemathesis sends requests that its OpenAPI document allows, and others.

No request may be answered with an error of the server, nor with a status, a content type or a body that the document lacks.
"""

from __future__ import annotations

import collections
import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as openapi

from orchestrator.api.server.testing import serve_fake
from orchestrator.api.usage_views import UsageReport, UsageRow
from orchestrator.daemon.requests.files import LeftFiles
from tests.stateful.daemon import AtOnce
from tests.support.plain_http import ask
from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

TOKEN: Final = "t" * 40
HEADERS: Final = {"Authorization": f"Bearer {TOKEN}"}
CHECKS: Final = (
    checks.not_a_server_error,
    openapi.status_code_conformance,
    openapi.content_type_conformance,
    openapi.response_schema_conformance,
)
WAITS: Final = {"follow": "false", "timeout": 0}
"""Parameters with which following a log, and waiting for a change, are answered at once."""


def findings(*, number: int, examples: int) -> tuple[dict[str, Counter[int]], list[str]]:
    """Send ``examples`` requests of each kind; return the statuses of the answers by operation, and their problems."""
    statuses: dict[str, Counter[int]] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as place, serve_fake(Path(place), owner_uid=os.getuid(), token=TOKEN) as served:
        job = served.do(lambda service: service.add(state="RUNNING", uid=os.getuid()))
        nothing = UsageRow(keys={}, jobs=0, gpu_hours=0.0, waiting_gpu_hours=0.0)
        (Path(place) / "out").mkdir()
        (Path(place) / "out" / "a.txt").write_text("left behind")
        files = LeftFiles(job.id, {"outputs": Path(place) / "out"}, cast("Any", AtOnce()))
        served.do(lambda service: service.files_of.update({job.id: files}))
        report = UsageReport(by=("user",), since=0.0, until=1.0, rows=(), total=nothing)
        served.do(lambda service: setattr(service, "used", report))
        document = ask(served.endpoint, "GET", "/api/v1/openapi.json").json
        url = f"http://{served.tcp_endpoint.host}:{served.tcp_endpoint.port}"
        for found in schemathesis.openapi.from_dict(document).get_all_operations():
            operation = found.ok()
            counts = statuses.setdefault(operation.label, collections.Counter())
            for mode in GenerationMode:
                wrong += _asked(operation, mode, url, str(job.id), counts, number=number, examples=examples)
    return statuses, wrong


def _asked(
    operation: Any, mode: GenerationMode, url: str, job_id: str, counts: Counter[int], *, number: int, examples: int
) -> Iterator[str]:
    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def request(case: Any) -> None:
        query = case.query or {}
        query.update({name: value for name, value in WAITS.items() if name in query or name in _names(operation)})
        case.query = query
        if mode is GenerationMode.POSITIVE and counts.total() % 2 and "ref" in (case.path_parameters or {}):
            case.path_parameters["ref"] = job_id
        answer = case.call(base_url=url, headers=HEADERS, timeout=PATIENCE_SECONDS)
        counts[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    try:
        with contextlib.suppress(Unsatisfiable):  # the operation has no invalid requests
            request()
    except BaseExceptionGroup as error:
        yield f"{operation.label}: {[str(one) for one in error.exceptions]}"


def _names(operation: Any) -> set[str]:
    return {parameter.name for parameter in operation.query}
