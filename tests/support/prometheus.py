"""A real Prometheus and a real Alertmanager on the generated configuration with shortened durations, and a webhook."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import ExitStack
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dashboards import build, lint
from dashboards.widgets import to_json
from orchestrator.telemetry import local_prometheus as lp
from tests.support.ports import free_port
from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BOARDS = [to_json(board) for board in build.BOARDS]
_LONG_AGO = {"3600": "3", "1800": "4", "600": "4", "60": "3"}


class Page(BaseHTTPRequestHandler):
    """Serves the server's `text`, or appends a posted document to its `taken`."""

    server: Any

    def do_GET(self) -> None:
        self.answer(self.server.text.encode())

    def do_POST(self) -> None:
        self.server.taken.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.answer(b"")

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Served(ThreadingHTTPServer):
    """A page, or a webhook, on a port of its own."""

    daemon_threads = True

    def __init__(self, text: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.text = text
        self.taken: list[dict[str, Any]] = []
        self._thread = Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


def shortened_rules() -> str:
    """Return the rules with short durations and no other change: averages over eight seconds, `for` of two to eight."""
    document = yaml.safe_load(lp.bundled_rules())
    for group in document["groups"]:
        group["interval"] = "1s"
        for rule in group["rules"]:
            rule["expr"] = re.sub(r"\[(1m|5m)\]", "[8s]", rule["expr"])
            # ages in seconds: "over an hour", "half an hour at least"
            rule["expr"] = re.sub(r"(> |, )(3600|1800|600|60)\b", lambda m: m[1] + _LONG_AGO[m[2]], rule["expr"])
            rule["expr"] = rule["expr"].replace("_count[1h]", "_count[5s]")
            if "for" in rule:
                # as long as an average: ranks that start one after the other are uneven for that time, as with 1m and 5m
                rule["for"] = "8s" if rule["for"] == "5m" else "2s"
            if "keep_firing_for" in rule:
                rule["keep_firing_for"] = "1s"
    return yaml.safe_dump(document, sort_keys=False)


def _shorten(folder: Path) -> None:
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    exporters = config["scrape_configs"][1]
    exporters |= {"scrape_interval": "1s", "scrape_timeout": "1s"}
    exporters["http_sd_configs"][0]["refresh_interval"] = "1s"
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "orch.rules.yml").write_text(shortened_rules())
    text = (folder / "alertmanager.yml").read_text()
    text = re.sub(r"group_wait: \w+", "group_wait: 1s", text)
    (folder / "alertmanager.yml").write_text(text.replace("group_interval: 5m", "group_interval: 2s"))


class Watched:
    """Prometheus and Alertmanager watching a daemon; `daemon` is the address of its reading listener."""

    def __init__(self, folder: Path, daemon: str, stack: ExitStack, *, seconds: float = PATIENCE_SECONDS) -> None:
        self._seconds = seconds
        self.webhook = Served()
        stack.callback(self.webhook.close)
        local = lp.prepare(
            folder,
            daemon=daemon,
            binaries=lp.find_binaries(),
            prometheus_address=f"127.0.0.1:{free_port()}",
            alertmanager_address=f"127.0.0.1:{free_port()}",
            webhook=f"http://{self.webhook.address}/",
        )
        _shorten(folder)
        self.url = local.prometheus_url
        login = f"{lp.USER}:{local.password_file.read_text().strip()}".encode()
        self._login = {"Authorization": f"Basic {base64.b64encode(login).decode()}"}
        for i, command in enumerate(local.commands):
            log = stack.enter_context((folder / f"{i}.log").open("w"))
            stack.callback(_end, subprocess.Popen(command, stdout=log, stderr=log))
        for url in (local.prometheus_url, str(local.alertmanager_url)):
            self.eventually(partial(self._ready, f"{url}/-/ready"), f"{url} is ready")

    def _opened(self, url: str) -> Any:
        """Open an address of Prometheus or Alertmanager, with their password."""
        return urllib.request.urlopen(urllib.request.Request(url, headers=self._login), timeout=PATIENCE_SECONDS)

    def _ready(self, url: str) -> bool:
        try:
            with self._opened(url) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the series of an instant query; fail the test if the query fails."""
        text = urllib.parse.urlencode({"query": expr})
        try:
            with self._opened(f"{self.url}/api/v1/query?{text}") as response:
                found: list[dict[str, Any]] = json.load(response)["data"]["result"]
                return found
        except urllib.error.HTTPError as error:
            pytest.fail(f"{expr}: {error.read().decode()}")

    def firing(self) -> dict[str, list[dict[str, str]]]:
        """Return the labels of the alerts that fire, by alert."""
        found: dict[str, list[dict[str, str]]] = {}
        for series in self.query('ALERTS{alertstate="firing"}'):
            found.setdefault(series["metric"]["alertname"], []).append(series["metric"])
        return found

    def received_of(self, name: str, **labels: str) -> list[dict[str, Any]]:
        """Return the firing alerts of this name and labels that the webhook received."""
        return [a for a in self.received() if {"alertname": name, **labels}.items() <= a["labels"].items()]

    def received(self) -> list[dict[str, Any]]:
        """Return every firing alert that the webhook received."""
        return [alert for message in self.webhook.taken for alert in message["alerts"] if alert["status"] == "firing"]

    def rules(self) -> Iterator[dict[str, Any]]:
        """Yield every rule as Prometheus has loaded and evaluated it."""
        with self._opened(f"{self.url}/api/v1/rules") as response:
            for group in json.load(response)["data"]["groups"]:
                yield from group["rules"]

    def eventually(self, condition: Callable[[], Any], what: str, missing: Callable[[], Any] | None = None) -> Any:
        """Poll for `condition`, and return its value; fail the test with `what` at the deadline."""
        deadline = time.monotonic() + self._seconds
        while not (found := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"not within {self._seconds:g} s: {what}" + (f"; missing {missing()}" if missing else ""))
            time.sleep(0.25)
        return found


def recorded() -> set[str]:
    """Return the names of the recording rules."""
    groups = yaml.safe_load(lp.bundled_rules())["groups"]
    return {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}


def alerts() -> set[str]:
    """Return the names of the alerts."""
    groups = yaml.safe_load(lp.bundled_rules())["groups"]
    return {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}


def board_queries() -> Iterator[tuple[str, str]]:
    """Yield (place, query) of every query of every board, as Grafana sends it with every variable at All."""
    for board in BOARDS:
        for where, expr in lint.queries(board):
            yield f"{board['title']}: {where}: {expr}", _filled(expr, board)


def _filled(expr: str, board: dict[str, Any]) -> str:
    for name, span in (("__range_s", "60"), ("__rate_interval", "10s"), ("__range", "1m"), ("__interval", "2s")):
        expr = expr.replace(f"${name}", span)
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            expr = expr.replace(f"${variable['name']}", variable["allValue"])
        elif variable["type"] == "textbox":
            expr = expr.replace(f"${variable['name']}", "2.5")
    return expr


def check_rules_are_well(watched: Watched) -> None:
    """Check that Prometheus has loaded every rule, and that none fails."""
    found = list(watched.rules())
    assert {rule["name"] for rule in found} == recorded() | alerts()
    for rule in found:
        assert rule["health"] == "ok", (rule["name"], rule.get("lastError"))


def check_texts(watched: Watched) -> None:
    """Check that every template in the received alerts was filled in completely."""
    for alert in watched.received():
        for text in alert["annotations"].values():
            assert "<no value>" not in text, alert
            assert "%!" not in text, alert
            assert "error" not in text.split(":")[0].lower(), alert


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=300)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
