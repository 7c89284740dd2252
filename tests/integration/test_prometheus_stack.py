"""A real Prometheus and a real Alertmanager on the generated configuration, scraping real exporters and collectors.

The daemon is a stand-in here: its reading listener and its collectors are the real ones, fed by hand, so that every event
there is can be injected at once. Durations are shortened (a minute is a few seconds), nothing else.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dashboards import build, lint, rules
from dashboards.widgets import to_json
from orchestrator import catalogue as c
from orchestrator.api.read_app import MetricsPage, create_read_app, read_policy
from orchestrator.api.serve import ApiServer, bind_tcp
from orchestrator.api.views import HealthView, TargetGroup
from orchestrator.gpu.exporter import ExporterSettings, GpuExporter
from orchestrator.gpu.reader import Detail, GpuLostError, ReaderOptions
from orchestrator.gpu.sample import GpuInfo, GpuProcess, Sample, Throttle, Vendor, XidCount
from orchestrator.telemetry import local_prometheus as lp
from orchestrator.telemetry.collectors import registry, render
from orchestrator.telemetry.histogram import Histogram
from orchestrator.telemetry.snapshot import DaemonFacts, Disk, JobSeries, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("prometheus-alertmanager") is None,
        reason="prometheus or its alertmanager is missing: .ci/install-test-tools",
    ),
]
DEADLINE_SECONDS = 90.0
BEGAN = time.time()
BOARDS = [to_json(board) for board in build.BOARDS]


class Reader:
    """A GPU with every sensor there is, under a load that never changes; counters count with the time."""

    def __init__(self, index: int, utilization: float, watts: float, *, ill: bool = False, lost: bool = False) -> None:
        self.info = GpuInfo(
            uuid=f"GPU-{index}", index=index, ordinal=index, vendor=Vendor.NVIDIA, model="H100",
            memory_total_bytes=80 << 30, pci_bus_id=f"0000:0{index}:00.0", driver_version="580",
        )  # fmt: skip
        self.options = ReaderOptions(processes=True)
        self.utilization, self.watts, self.ill, self.lost = utilization, watts, ill, lost

    def read(self, detail: Detail = Detail.FULL) -> Sample:
        if self.lost:
            raise GpuLostError(f"{self.info.uuid} is lost")
        now = time.time()
        counter = int((now - BEGAN) * 1e6)
        return Sample(
            gpu_uuid=self.info.uuid,
            timestamp=now,
            monotonic=time.monotonic(),
            utilization=self.utilization,
            memory_activity=0.3,
            memory_used_bytes=40 << 30,
            memory_total_bytes=80 << 30,
            power_watts=self.watts,
            power_limit_watts=700.0,
            energy_joules=(now - BEGAN) * self.watts,
            fan=0.4,
            pcie_transmit_bytes=counter,
            pcie_receive_bytes=counter,
            temperatures=(("gpu", 60.0), ("memory", 70.0)),
            temperature_limits=(("gpu", "slowdown", 90.0),),
            clocks=(("sm", 1.9e9),),
            throttle=((Throttle.HARDWARE_THERMAL, self.ill), (Throttle.POWER_CAP, True)),
            throttle_seconds=((Throttle.POWER_CAP, now - BEGAN),),
            ecc_errors=(("uncorrected", "volatile", 2 if self.ill else 0), ("corrected", "volatile", 5)),
            remapped_rows=(("pending", int(self.ill)), ("failure", 0)),
            nvlinks=((0, counter, counter),),
            xids=(XidCount(code=79, count=1, last_timestamp=BEGAN), XidCount(code=31, count=1, last_timestamp=BEGAN))
            if self.ill
            else (),
            processes=(GpuProcess(pid=4711, memory_bytes=40 << 30),),
        )

    def reopen(self) -> None:
        self.read()

    def close(self) -> None:
        pass


def job(job_id: str, seats: Sequence[str] = (), **facts: Any) -> JobSeries:
    values: dict[str, Any] = {
        "job_id": job_id, "name": job_id.split("-", maxsplit=1)[0], "user": "ada", "queue": "default", "state": "RUNNING", "live": True,
        "seats": tuple((uuid, rank) for rank, uuid in enumerate(seats)), "gpus": len(seats), "heartbeat_at": time.time(),
        "hang_suspected": False, "silent_gpus": 0, "gpu_seconds": {"productive": time.time() - BEGAN},
    }  # fmt: skip
    return JobSeries(**{**values, **facts})


class StandIn:
    """The daemon's reading listener on what a test says: the real application, the real collectors."""

    def __init__(self, targets: Sequence[TargetGroup]) -> None:
        self._targets = targets
        self.gone: set[str] = set()
        self.restarts = 0  # raised once Prometheus has seen it low: increase() needs both
        self._registry = registry(self.snapshot)
        self._wait, self._submission = Histogram(c.QUEUE_WAIT), Histogram(c.SUBMISSION)
        self._decision = Histogram(c.SCHEDULING)
        for histogram in (self._wait, self._submission, self._decision):
            histogram.observe(0.01)
        self._sock = bind_tcp("127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._sock.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._server = ApiServer(create_read_app(self, read_policy("127.0.0.1", "", 0)), [self._sock])

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result(20)

    def stop(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(20)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def metrics(self, accept: str) -> MetricsPage:
        return MetricsPage(*render(self._registry, accept))

    async def targets(self) -> Sequence[TargetGroup]:
        return self._targets

    async def health(self) -> HealthView:
        return HealthView(ready=True, version="0", protocol=1, pid=1, owner="ada", started_at=BEGAN)

    def snapshot(self) -> Snapshot:
        now = time.time()
        age = now - BEGAN
        full = {
            "step": int(age * 10), "progress": 0.5, "samples": int(age * 100), "tokens": int(age * 1000), "mfu": 0.4,
            "metrics": {"loss": 1 / (1 + age), "accuracy": 0.5}, "checkpoint_at": now - 5, "checkpoint_interval_seconds": 60.0,
            "balance_cv": {"utilization": 0.6}, "balance_min_per_median": {"utilization": 0.3},
            "events": dict.fromkeys(("start", "checkpoint", "failure", "recovery", "preemption"), BEGAN),
        }  # fmt: skip
        jobs = [
            job("slow-222222", ["GPU-0", "GPU-1"], rank_step_seconds={0: 0.1, 1: 0.3}, **full),
            job("even-222222", ["GPU-2", "GPU-3"], rank_step_seconds={0: 0.1, 1: 0.1}, restarts={"infra": self.restarts}),
            job("ghost-222222", ["GPU-ghost"], hang_suspected=True, silent_gpus=1, checkpoint_at=now - 4000,
                checkpoint_interval_seconds=1.0),
            replace(job("lost-222222"), state="FAILED", live=False, ended_at=now - 1),
        ]  # fmt: skip
        return Snapshot(
            at=now,
            daemon=DaemonFacts(
                version="0.1.0", node="n0", started_at=BEGAN, loop_lag_seconds=2.0, commit_failures=int(age / 2),
                disks=(
                    Disk(node="n0", path="/full", free_bytes=10, size_bytes=1000),
                    Disk(node="n0", path="/filling", free_bytes=int(2e8 - age * 1e5), size_bytes=int(1e9)),
                ),
            ),
            series=[each for each in jobs if each.job_id not in self.gone],
            jobs={("default", "RUNNING"): 3, ("night", "PENDING"): 1},
            queues=("default", "night"),
            gpus={("n0", "busy"): 4, ("n0", "idle"): 1, ("n0", "broken"): 1},
            nodes={"ready": 1, "unreachable": 1},
            oldest_pending_seconds={"night": 4000.0},
            gpu_seconds={("default", "productive"): age * 3, ("default", "lost"): age},
            gpu_seconds_uncommitted={"default": 3.0},
            queue_wait={"default": self._wait.counts()},
            scheduling=self._decision.counts(),
            submission=self._submission.counts(),
        )  # fmt: skip


class Page(BaseHTTPRequestHandler):
    """Serves the server's `text`, or takes what is posted into its `taken`."""

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
    daemon_threads = True

    def __init__(self, text: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.text = text
        self.taken: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


def free_address() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


def shortened_rules() -> str:
    """The rules with short waits: `for` is one or two seconds, averages run over 8, groups every second."""
    document = yaml.safe_load(lp.bundled_rules())
    for group in document["groups"]:
        group["interval"] = "1s"
        for rule in group["rules"]:
            rule["expr"] = re.sub(r"\[(1m|5m)\]", "[8s]", rule["expr"])
            if "for" in rule:
                rule["for"] = "2s"
            if "keep_firing_for" in rule:
                rule["keep_firing_for"] = "1s"
    return yaml.safe_dump(document, sort_keys=False)


def shortened(folder: Path) -> None:
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


class Rig:
    """Everything, running."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.readers = [
            Reader(0, 0.95, 650.0, ill=True),
            Reader(1, 0.20, 150.0),
            Reader(2, 0.95, 650.0),
            Reader(3, 0.93, 640.0),
            Reader(4, 0.5, 300.0),
        ]
        self.exporter = GpuExporter(self.readers, "n0", ExporterSettings(rate=5, processes=True))
        self.exporter.start()
        stack.callback(self.exporter.stop)
        stuck = Served(_stuck_exporter())
        stack.callback(stuck.close)
        self.webhook = Served()
        stack.callback(self.webhook.close)
        self.daemon = StandIn(
            [
                _group("n0", self.exporter.url.split("/")[2]),
                _group("n1", stuck.address),
                _group("n9", free_address()),
            ]
        )
        self.daemon.start()
        stack.callback(self.daemon.stop)
        self._start(folder, stack)

    def _start(self, folder: Path, stack: ExitStack) -> None:
        local = lp.prepare(
            folder,
            daemon=self.daemon.address,
            binaries=lp.find_binaries(),
            prometheus_address=free_address(),
            alertmanager_address=free_address(),
            webhook=f"http://{self.webhook.address}/",
        )
        shortened(folder)
        self.url, self.alertmanager = local.prometheus_url, local.alertmanager_url
        for i, command in enumerate(local.commands):
            log = stack.enter_context((folder / f"{i}.log").open("w"))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(_end, process)
        for url in (self.url, self.alertmanager):
            self.eventually(lambda url=url: _ready(f"{url}/-/ready"), f"{url} is ready")

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query; fails the test when the query errs."""
        text = urllib.parse.urlencode({"query": expr})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query?{text}", timeout=10) as response:
                found: list[dict[str, Any]] = json.load(response)["data"]["result"]
                return found
        except urllib.error.HTTPError as error:
            pytest.fail(f"{expr}: {error.read().decode()}")

    def firing(self) -> dict[str, list[dict[str, str]]]:
        found: dict[str, list[dict[str, str]]] = {}
        for series in self.query('ALERTS{alertstate="firing"}'):
            found.setdefault(series["metric"]["alertname"], []).append(series["metric"])
        return found

    def received(self) -> list[dict[str, Any]]:
        return [alert for message in self.webhook.taken for alert in message["alerts"] if alert["status"] == "firing"]

    def eventually(self, condition: Callable[[], Any], what: str, missing: Callable[[], Any] | None = None) -> Any:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (found := condition()):
            if time.monotonic() > deadline:
                pytest.fail(
                    f"not within {DEADLINE_SECONDS:g} s: {what}" + (f"; missing {missing()}" if missing else "")
                )
            time.sleep(0.25)
        return found


def _group(node: str, address: str) -> TargetGroup:
    return TargetGroup(targets=(address,), labels={"__meta_orch_node": node})


def _stuck_exporter() -> str:
    return (
        'orch_gpu_info{gpu_uuid="GPU-stuck",gpu="0",node="n1",vendor="nvidia",model="H100",pci_bus_id="0",driver_version="1"} 1\n'
        'orch_exporter_up{gpu_uuid="GPU-stuck",gpu="0",node="n1"} 1\n'
        f'orch_exporter_last_success_timestamp_seconds{{gpu_uuid="GPU-stuck"}} {BEGAN - 300}\n'
    )


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(tmp_path_factory.mktemp("prometheus"), stack)


def filled(expr: str, board: dict[str, Any]) -> str:
    """A query as Grafana sends it with every variable at All."""
    for name, span in (("__rate_interval", "10s"), ("__range", "1m"), ("__interval", "2s")):
        expr = expr.replace(f"${name}", span)
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            expr = expr.replace(f"${variable['name']}", variable["allValue"])
    return expr


def empty_queries(rig: Rig) -> list[str]:
    return [
        f"{board['title']}: {where}: {expr}"
        for board in BOARDS
        for where, expr in lint.queries(board)
        if not rig.query(filled(expr, board))
    ]


def test_every_query_rule_and_alert_returns_data_and_reaches_people(rig: Rig) -> None:
    """One long story, since starting it all takes longer than any part of it."""
    rig.eventually(lambda: rig.query("orch_exporter_up") and rig.query("orch_daemon_info"), "first scrapes")
    rig.eventually(lambda: rig.query('orch_job_restarts_total{job_id="even-222222"}'), "restarts are counted")
    rig.daemon.restarts = 3
    rig.readers[4].lost = True

    rig.eventually(lambda: not empty_queries(rig), "every query of every panel has data", lambda: empty_queries(rig))
    rig.eventually(
        lambda: all(rig.query(record.name) for record in rules.RECORDS),
        "every recording rule has data",
        lambda: [record.name for record in rules.RECORDS if not rig.query(record.name)],
    )

    wanted = {alert.name for alert in rules.ALERTS} - {"OrchDaemonDown"}
    rig.eventually(lambda: wanted <= set(rig.firing()), "every alert fires", lambda: wanted - set(rig.firing()))
    firing = rig.firing()
    for name in ("OrchJobImbalance", "OrchGpuStraggler"):
        assert {labels["job_id"] for labels in firing[name]} == {"slow-222222"}, "a balanced job makes no sound"
    assert {labels["job_id"] for labels in firing["OrchGpuSilent"]} == {"ghost-222222"}
    assert {labels["xid"] for labels in firing["OrchGpuXid"]} == {"79"}, "31 is the program's own"
    assert {labels["gpu_uuid"] for labels in firing["OrchGpuLost"]} == {"GPU-4"}
    check_rules_are_well(rig)
    check_what_people_are_told(rig)
    check_that_series_vanish(rig)

    rig.daemon.stop()
    rig.eventually(lambda: "OrchDaemonDown" in rig.firing(), "the daemon's end is noticed")


def check_rules_are_well(rig: Rig) -> None:
    with urllib.request.urlopen(f"{rig.url}/api/v1/rules", timeout=10) as response:
        groups = json.load(response)["data"]["groups"]
    assert {group["name"] for group in groups} == {group.name for group in rules.GROUPS}
    for group in groups:
        for rule in group["rules"]:
            assert rule["health"] == "ok", (rule["name"], rule.get("lastError"))


def check_what_people_are_told(rig: Rig) -> None:
    def told(name: str, **labels: str) -> list[dict[str, Any]]:
        return [a for a in rig.received() if {"alertname": name, **labels}.items() <= a["labels"].items()]

    (first, *_) = rig.eventually(
        lambda: told("OrchJobImbalance", job_id="slow-222222"), "the imbalance reaches the webhook"
    )
    assert first["annotations"]["summary"].startswith("Job slow-222222: its GPUs are not equally busy")
    assert first["annotations"]["runbook_url"].endswith("/OrchJobImbalance.md")
    # A cause hides its effects: the node that is down its exporter, the hang the old checkpoint.
    rig.eventually(lambda: told("OrchNodeDown", node="n9"), "the dead node reaches the webhook")
    assert not told("OrchExporterDown", node="n9")
    rig.eventually(lambda: told("OrchJobHangSuspected"), "the hang reaches the webhook")
    assert not told("OrchCheckpointTooOld", job_id="ghost-222222")
    for alert in rig.received():
        for text in alert["annotations"].values():
            assert "<no value>" not in text, alert
            assert "%!" not in text, alert
            assert "error" not in text.split(":")[0].lower(), alert


def check_that_series_vanish(rig: Rig) -> None:
    assert rig.query('orch_job_gpu{job_id="even-222222"}')
    assert rig.query('orch_gpu_power_watts{gpu_uuid="GPU-3"}')
    rig.daemon.gone.add("even-222222")
    rig.readers[3].lost = True
    for expr in ('orch_job_gpu{job_id="even-222222"}', 'orch_gpu_power_watts{gpu_uuid="GPU-3"}'):
        rig.eventually(lambda expr=expr: not rig.query(expr), f"{expr} vanishes")
    assert rig.query('orch_exporter_up{gpu_uuid="GPU-3"}')
