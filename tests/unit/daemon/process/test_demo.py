"""The demo waits for its job while the job progresses, however slow the machine is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from orchestrator.api.errors import RefusedError
from orchestrator.api.views import JobView, ProgressView
from orchestrator.daemon.process import demo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestrator.api.client import Client

ANSWER_SECONDS = 30.0
"""Time that each answer of the daemon takes on this slow machine."""


class SlowClient:
    """A daemon that answers with one view after the other, and a clock that only its answers move."""

    def __init__(self, views: Iterator[JobView]) -> None:
        self.views = views
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def wait_change(self, *_: Any, **__: Any) -> int:
        self.at += ANSWER_SECONDS
        return 1

    def job(self, job_id: str) -> JobView:
        return next(self.views)


def job(state: str, step: int = 0) -> JobView:
    return JobView(
        id="digits-abc234", name="digits", user="me", uid=0, queue="default", priority=0, state=state, reason="", submitted_at=0.0,
        progress=ProgressView(step=step, total_steps=1320),
    )  # fmt: skip


def follow(client: SlowClient) -> JobView:
    printer = demo._Printer(quiet=True, began=0.0)
    return demo._follow(cast("Client", client), "digits-abc234", printer, now=client.now)


def test_a_job_that_takes_an_hour_and_progresses_is_waited_for() -> None:
    client = SlowClient(iter([*(job("RUNNING", step=5 * n) for n in range(120)), job("SUCCEEDED", step=1320)]))
    assert follow(client).state == "SUCCEEDED"
    assert client.at > 3600


def test_a_job_that_makes_no_more_steps_is_given_up_with_what_it_last_did() -> None:
    client = SlowClient(job("RUNNING", step=555) for _ in iter(int, 1))
    with pytest.raises(RefusedError, match=r"is RUNNING at step 555 and has not progressed for 3m"):
        follow(client)
    assert client.at < 2 * demo.PATIENCE_SECONDS
