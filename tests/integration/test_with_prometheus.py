"""``orch up --with-prometheus``: a machine without containers has metrics and alerts too."""

from __future__ import annotations

import json
import shutil
import urllib.parse
import urllib.request

import psutil
import pytest

from tests.support.stack import Stack, process_gone, wait_until

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus: .ci/install-test-tools")


def _query(url: str, expression: str) -> list[dict[str, object]]:
    with urllib.request.urlopen(f"{url}/api/v1/query?query={urllib.parse.quote(expression)}", timeout=300) as reply:
        return json.load(reply)["data"]["result"]


def test_daemon_and_exporters_are_scraped_and_everything_stops_with_the_daemon() -> None:
    stack = Stack(simulate_gpus=2, extra=("--with-prometheus",))
    try:
        told = stack.up()
        url = told["prometheus_url"]
        again = stack.orch("up").stderr
        assert {f"Prometheus: {url}", f"Alertmanager: {told['alertmanager_url']}"} <= set(again.splitlines())
        wait_until("the daemon is scraped", lambda: _ready(url, 'up{job="orch-daemon"} == 1', 1), interval=0.5)
        wait_until("both exporters are scraped", lambda: _ready(url, "orch_gpu_info", 2), interval=0.5)
        pids = [int(pid) for pid in json.loads((stack.home / "prometheus" / "pids.json").read_text())]
        assert all(psutil.pid_exists(pid) for pid in pids)
        assert stack.orch("down").returncode == 0
        wait_until("both have stopped", lambda: all(process_gone(pid) for pid in pids))
    finally:
        stack.close()


def _ready(url: str, expression: str, count: int) -> bool:
    try:
        return len(_query(url, expression)) == count
    except OSError:
        return False
