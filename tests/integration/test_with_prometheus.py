"""``orch up --with-prometheus``: a machine without containers has metrics and alerts too."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from orchestrator.telemetry.local_prometheus import find_binaries, prepare
from tests.support.ports import free_port
from tests.support.stack import Stack, process_gone, wait_until

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus: .ci/install-test-tools")


def _get(url: str, password: str = "") -> Any:
    request = urllib.request.Request(url)
    if password:
        request.add_header("Authorization", f"Basic {base64.b64encode(f'orch:{password}'.encode()).decode()}")
    with urllib.request.urlopen(request, timeout=300) as reply:
        return json.load(reply)


def _query(url: str, expression: str, password: str) -> list[dict[str, object]]:
    return _get(f"{url}/api/v1/query?query={urllib.parse.quote(expression)}", password)["data"]["result"]


def test_daemon_and_exporters_are_scraped_and_everything_stops_with_the_daemon() -> None:
    stack = Stack(simulate_gpus=2, extra=("--with-prometheus",))
    try:
        told = stack.up()
        url = told["prometheus_url"]
        again = stack.orch("up").stderr
        assert {f"Prometheus: {url}", f"Alertmanager: {told['alertmanager_url']}"} <= set(again.splitlines())
        file = Path(told["prometheus_password_file"])
        assert file.stat().st_mode & 0o777 == 0o600
        password, alerts = file.read_text().strip(), f"{told['alertmanager_url']}/api/v2/silences"
        up = ('up{job="orch-daemon"} == 1', password)
        wait_until("the daemon is scraped", lambda: _ready(url, *up, 1), interval=0.5)
        wait_until("both exporters are scraped", lambda: _ready(url, "orch_gpu_info", password, 2), interval=0.5)
        for address in (f"{url}/api/v1/query?query=up", f"{url}/metrics", alerts):
            for wrong in ("", "wrong"):
                with pytest.raises(urllib.error.HTTPError, match="401"):
                    _get(address, wrong)
        assert _get(alerts, password) == []
        pids = [int(pid) for pid in json.loads((stack.home / "prometheus" / "pids.json").read_text())]
        assert all(psutil.pid_exists(pid) for pid in pids)
        assert stack.orch("down").returncode == 0
        wait_until("both have stopped", lambda: all(process_gone(pid) for pid in pids))
    finally:
        stack.close()


def _ready(url: str, expression: str, password: str, count: int) -> bool:
    try:
        return len(_query(url, expression, password)) == count
    except OSError:
        return False


def test_alerts_reach_an_alertmanager_that_requires_the_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-the-owner\n")
    places = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    folder = tmp_path / "prometheus"
    stack = prepare(
        folder,
        daemon="127.0.0.1:1",
        binaries=find_binaries(),
        prometheus_address=places[0],
        alertmanager_address=places[1],
        token_file=str(token),
    )
    rule = {"alert": "Always", "expr": "vector(1)"}
    (folder / "orch.rules.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "g", "interval": "1s", "rules": [rule]}]})
    )
    alerts = f"{stack.alertmanager_url}/api/v2/alerts"
    processes = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in stack.commands]
    try:
        wait_until("the alert has arrived", lambda: _names(alerts, "a-token-of-the-owner") == ["Always"], interval=0.2)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            _get(alerts)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _names(alerts: str, password: str) -> list[str]:
    try:
        return [alert["labels"]["alertname"] for alert in _get(alerts, password)]
    except OSError:
        return []
