"""Conditions that a real daemon cannot be brought to at will: full disks, a store that cannot write, a lost node.

The read listener, the collectors and Prometheus are real; the values are set by hand. test_prometheus_stack.py
has the rest, with a real daemon.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.api.server.listeners import ApiServer, bind_tcp
from orchestrator.api.server.read_app import MetricsPage, create_read_app, read_policy
from orchestrator.api.views import HealthView, TargetGroup
from orchestrator.telemetry.collectors import LINGER_SECONDS, DaemonFacts, Disk, JobSeries, Snapshot, registry, render
from tests.integration.test_prometheus_stack import ONLY_IN_THE_STAND_IN
from tests.support.prometheus import Watched, check_rules_are_well, check_texts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = [
    pytest.mark.rare,
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("prometheus-alertmanager") is None,
        reason="prometheus or its alertmanager is missing: .ci/install-test-tools",
    ),
]
BEGAN = time.time()


class StandIn:
    """The daemon's read listener with values that a test sets: the real application, the real collectors."""

    def __init__(self) -> None:
        self.ended_ago = 1.0
        self._registry = registry(self.snapshot)
        sock = bind_tcp("127.0.0.1", 0)
        self.address = f"127.0.0.1:{sock.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._server = ApiServer(create_read_app(self, read_policy("127.0.0.1", "", 0)), [sock])

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result(300)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(300)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def metrics(self, accept: str) -> MetricsPage:
        return MetricsPage(*render(self._registry, accept))

    async def targets(self) -> Sequence[TargetGroup]:
        return ()

    async def health(self) -> HealthView:
        return HealthView(ready=True, version="0", protocol=1, pid=1, owner="ada", started_at=BEGAN)

    def snapshot(self) -> Snapshot:
        now = time.time()
        age = now - BEGAN
        return Snapshot(
            at=now,
            daemon=DaemonFacts(
                version="0.1.0",
                node="n0",
                started_at=BEGAN,
                commit_failures=int(age / 2),
                disks=(
                    Disk(node="n0", path="/full", free_bytes=10, size_bytes=1000),
                    Disk(node="n0", path="/filling", free_bytes=int(2e8 - age * 1e5), size_bytes=int(1e9)),
                ),
            ),
            series=[
                job("stuck", state="RUNNING", live=True, hang_suspected=True, checkpoint_at=now - 4000,
                    checkpoint_interval_seconds=1.0),
                job("ended", state="FAILED", live=False, ended_at=now - self.ended_ago),
            ],
            nodes={"ready": 1, "unreachable": 1},
        )  # fmt: skip


def job(name: str, **facts: Any) -> JobSeries:
    return JobSeries(job_id=f"{name}-222222", name=name, user="ada", queue="default", **facts)


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    made = StandIn()
    made.start()
    try:
        yield made
    finally:
        made.stop()


def test_alerts_for_what_no_test_may_do_to_a_machine(
    stand_in: StandIn, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with ExitStack() as cleanup:
        watched = Watched(tmp_path_factory.mktemp("prometheus"), stand_in.address, cleanup)
        wanted = set(ONLY_IN_THE_STAND_IN)
        watched.eventually(
            lambda: wanted <= watched.firing().keys(), "alerts fire", lambda: wanted - watched.firing().keys()
        )
        # A cause inhibits its effects: the hang inhibits the old checkpoint, the full disk the filling one.
        watched.eventually(lambda: "OrchCheckpointTooOld" in watched.firing(), "the checkpoint is too old")
        watched.eventually(lambda: watched.received_of("OrchJobHangSuspected"), "the hang reaches the webhook")
        watched.eventually(
            lambda: watched.received_of("OrchDiskAlmostFull", path="/full"), "the disk reaches the webhook"
        )
        assert not watched.received_of("OrchCheckpointTooOld", job_id="stuck-222222")
        check_rules_are_well(watched)
        check_texts(watched)
        assert watched.query('orch_job_state{job_id="ended-222222"}')
        stand_in.ended_ago = LINGER_SECONDS + 1
        watched.eventually(lambda: not watched.query('orch_job_state{job_id="ended-222222"}'), "an ended job vanishes")
