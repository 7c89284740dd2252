"""A real daemon with real jobs, scraped by Prometheus with the generated configuration, with a real Alertmanager.

Two scenarios: simulated GPUs, whose load is what the ranks really do; and the fake NVIDIA driver, which has every
sensor and every fault. Each runs once; the tests check what was seen. Durations are shortened (tests/support/
prometheus.py), nothing else. Conditions that a real daemon cannot be brought to are in test_prometheus_stand_in.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
import urllib.request
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.support import steps
from tests.support.fake_nvml import FakeNvml
from tests.support.prometheus import Watched, alerts, board_queries, check_rules_are_well, check_texts, recorded
from tests.support.stack import Stack, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("prometheus-alertmanager") is None,
        reason="prometheus or its alertmanager is missing: .ci/install-test-tools",
    ),
]

ONLY_IN_THE_STAND_IN = {
    "OrchDiskFilling": "the disk of whoever runs the tests would have to be nearly full",
    "OrchDiskAlmostFull": "the same",
    "OrchStoreCommitFailing": "the same",
    "OrchJobHangSuspected": "nobody is suspected within a minute",
    "OrchNodeUnreachable": "takes a second machine",
}
"""Alerts that a real daemon is not made to raise here, and why."""

ONLY_WITH_PROMTOOL = {
    "OrchJobNeverSaved": "takes two hours of a job that does not save",
    "OrchJobGpusIdle": "jobs of these stories use their GPUs",
}
"""Alerts that no daemon is made to raise here, and why; tests/integration/test_rules_promtool.py has them fire."""

ASK_SECONDS = 3.0  # there are two hundred queries, and two processors for everything
UNEVEN = ("OrchJobImbalance", "OrchGpuStraggler", "OrchRankStraggler")

JOB = """\
version: 1
name: {name}
entrypoint: python steps.py {arguments}
queue: {queue}
resources: {{num_workers: {ranks}, resources_per_worker: {{gpu: {gpu}, cpu: 0}}}}
{more}
"""


SILENT = "job_id_gpu_uuid_rank:orch_job_gpu:silent"


@dataclass(slots=True)
class Seen:
    """Observations of a scenario: queries with data, alerts by name, webhook messages, facts noted on the way."""

    answered: set[str] = field(default_factory=set)
    fired: dict[str, list[dict[str, str]]] = field(default_factory=lambda: defaultdict(list))
    received: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    asked_at: float = 0.0

    def look(self, watched: Watched) -> None:
        """Note the firing alerts; and, every few seconds, run every query that had no data yet."""
        for name, series in watched.firing().items():
            self.fired[name] += [labels for labels in series if labels not in self.fired[name]]
        if time.monotonic() - self.asked_at > ASK_SECONDS:
            self.ask(watched)
            self.asked_at = time.monotonic()

    def ask(self, watched: Watched) -> None:
        """Run every query that had no data yet."""
        self.answered |= {
            where for where, expr in board_queries() if where not in self.answered and watched.query(expr)
        }
        self.answered |= {name for name in recorded() if name not in self.answered and watched.query(name)}

    def until_fired(self, watched: Watched, *names: str) -> None:
        """Look until these alerts have fired."""

        def all_of_them() -> bool:
            self.look(watched)
            return set(names) <= self.fired.keys()

        watched.eventually(all_of_them, "alerts fire", lambda: set(names) - self.fired.keys())

    def finish(self, watched: Watched) -> None:
        """Check the rules and texts, and note the messages, at the end of each scenario."""
        check_rules_are_well(watched)
        check_texts(watched)
        self.received = watched.received()

    def received_of(self, name: str, **labels: str) -> list[dict[str, Any]]:
        """Return the messages about this alert that the webhook received."""
        return [a for a in self.received if {"alertname": name, **labels}.items() <= a["labels"].items()]

    def jobs(self, name: str) -> set[str]:
        """Return the names of the jobs for which this alert fired."""
        return {labels["job_id"].rpartition("-")[0] for labels in self.fired.get(name, ())}


class World:
    """A daemon, and a Prometheus that scrapes it."""

    def __init__(self, folder: Path, cleanup: ExitStack, stack: Stack) -> None:
        self.stack, self._folder = stack, folder
        cleanup.callback(stack.close)
        self.read = stack.up()["read_address"]
        (folder / "prometheus").mkdir()
        self.watched = Watched(folder / "prometheus", self.read, cleanup)

    def targets(self) -> list[dict[str, Any]]:
        """Return the targets that the daemon tells Prometheus to scrape."""
        with urllib.request.urlopen(f"http://{self.read}/api/v1/prometheus/targets", timeout=300) as reply:
            found: list[dict[str, Any]] = json.load(reply)
            return found

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Print the end of the daemon's log if the scenario fails."""
        try:
            yield
        except BaseException:
            print(self.stack.settings.paths.daemon_log.read_text()[-5000:])
            raise

    def submit(
        self, name: str, arguments: str, *, ranks: int = 1, gpu: int = 1, queue: str = "default", more: str = ""
    ) -> str:
        """Submit a job of tests/support/steps.py."""
        text = JOB.format(name=name, arguments=arguments, ranks=ranks, gpu=gpu, queue=queue, more=more)
        return self.stack.submit(text, self._folder / name, steps=Path(steps.__file__).read_text())


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """Run healthy and unhealthy jobs on simulated GPUs, and yield what was seen."""
    with ExitStack() as cleanup:
        world = World(tmp_path_factory.mktemp("simulated"), cleanup, Stack(simulate_gpus=6))
        with world.blamed():
            seen = tell_of_jobs(world)
        yield seen


def tell_of_jobs(world: World) -> Seen:
    seen, watched, stack = Seen(), world.watched, world.stack
    slow = world.submit("slow", "--busy 0.4 --slow-rank 1", ranks=2)
    # a job starved of CPU can go four seconds without saving: its own interval allows it a minute
    even = world.submit("even", "--busy 0.25 --save", ranks=2, more="checkpoint: {interval: 20s}")
    world.submit("stale", "", more="checkpoint: {interval: 1s}")
    stack.wait_step(slow, 1)
    waits = world.submit("waits", "", ranks=2, queue="night")
    crash = "retry: {max_restarts: {user: 4}, max_no_progress: 9, backoff: {initial: 100ms, max: 1s}}"
    wait_until(
        "the crashing job's restarts are counted", lambda: watched.query('orch_job_restarts_total{class="user"}')
    )
    world.submit("crash", "--fail-after 3", gpu=0, more=crash)
    seen.until_fired(
        watched, "OrchJobImbalance", "OrchGpuStraggler", "OrchRankStraggler", "OrchCheckpointTooOld", "OrchQueueStuck",
        "OrchJobRestartLoop", "OrchJobFailed",
    )  # fmt: skip
    watched.eventually(
        lambda: watched.received_of("OrchJobImbalance", job_id=slow), "the imbalance reaches the webhook"
    )
    seen.facts["uneven"] = {name: seen.jobs(name) for name in UNEVEN}  # before anything is killed or ended
    stack.client.cancel(waits)
    note_the_ledger(world, seen, slow, even)
    stack.client.cancel(even)
    stack.wait(even)
    watched.eventually(lambda: not watched.query(f'orch_job_gpu{{job_id="{even}"}}'), "an ended job holds no GPU")
    seen.facts["state after the end"] = watched.query(f'orch_job_state{{job_id="{even}", state="CANCELLED"}} == 1')
    freeze_the_daemon(stack, seen, watched)
    seen.finish(watched)
    return seen


def note_the_ledger(world: World, seen: Seen, slow: str, even: str) -> None:
    """Kill a rank of ``even``, end ``slow``, and note its GPU-seconds by its events and by its metrics."""
    stack = world.stack
    before = len(stack.job(even).attempts)
    os.kill(stack.pids(even)[0], signal.SIGKILL)
    wait_until("the job tries again", lambda: len(stack.job(even).attempts) > before)
    stack.wait_step(even, 10)
    stack.client.cancel(slow)
    stack.wait(slow)
    events = {
        kind: [e.at for e in stack.client.events(slow) if e.kind == kind]
        for kind in ("attempt_started", "gang_released")
    }
    seen.facts["held"] = 2 * (events["gang_released"][-1] - events["attempt_started"][0])
    spent = f'sum(orch_job_gpu_seconds_total{{job_id="{slow}"}})'
    world.watched.eventually(
        lambda: world.watched.query(f'orch_job_state{{job_id="{slow}", state="CANCELLED"}} == 1'), "scraped"
    )
    seen.facts["spent"] = float(world.watched.query(spent)[0]["value"][1])


def freeze_the_daemon(stack: Stack, seen: Seen, watched: Watched) -> None:
    """Stop the daemon for a while: it does not answer, and when it continues, it reports how late it is."""
    pid = stack.daemon_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        seen.until_fired(watched, "OrchDaemonDown")
        missed = 'count_over_time((up{job="orch-daemon"} == 0)[1m:1s]) >= 5'
        watched.eventually(lambda: watched.query(missed), "it is late enough to be called slow")
    finally:
        os.kill(pid, signal.SIGCONT)
    seen.until_fired(watched, "OrchDaemonSlow")


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """Run jobs on fake hardware that fails in every way, and yield what was seen."""
    folder = tmp_path_factory.mktemp("nvidia")
    driver = FakeNvml.create(folder, gpus=5)
    for gpu in driver:
        gpu.fan = 40  # a value that a GPU lacks when it is opened is not read again
        gpu.processes({4711: 1 << 30})
    with ExitStack() as cleanup:
        world = World(folder, cleanup, Stack(environ={**driver.environment(), "ORCH_EXPORTER_PROCESSES": "yes"}))
        cleanup.callback(setattr, driver[1], "hang", 0)
        with world.blamed():
            seen = tell_of_hardware(world, driver)
        yield seen


def tell_of_hardware(world: World, driver: FakeNvml) -> Seen:
    seen, watched = Seen(), world.watched
    job = world.submit("train", "--save", ranks=2)
    world.stack.wait_step(job, 1)
    preempt(world, job)
    watched.eventually(lambda: len(watched.query("orch_exporter_up == 1")) == len(driver), "every GPU is scraped")
    watched.eventually(lambda: len(watched.query("orch_job_gpu")) == 2, "the job's GPUs are known")
    seen.facts["ports"] = [int(group["targets"][0].rpartition(":")[2]) for group in world.targets()]
    ill, held, lost = driver[0], driver[1], driver[2]
    ill.xid(79)
    ill.xid(31)  # the program's own fault
    ill.field(4, 2)
    ill.field(144, 1)
    ill.reasons = 0x040
    lost.error = 15
    lost.xid(79)
    stop_exporter(world, driver.uuid(3))
    seen.until_fired(
        watched,
        "OrchGpuXid",
        "OrchGpuEccUncorrected",
        "OrchGpuRowRemap",
        "OrchGpuThrottled",
        "OrchGpuLost",
        "OrchExporterDown",
    )
    gone = driver.uuid(2)
    watched.eventually(
        lambda: not watched.query(f'orch_gpu_power_watts{{gpu_uuid="{gone}"}}'), "a lost GPU shows no power"
    )
    seen.facts["lost GPU's exporter"] = watched.query(f'orch_exporter_up{{gpu_uuid="{gone}"}} == 0')
    seen.ask(watched)
    watched.eventually(lambda: watched.query('sum(orch_gpus{state="broken"}) >= 1'), "the lost GPU counts as broken")
    held.hang = 1
    seen.until_fired(watched, "OrchGpuSilent", "OrchExporterStale")

    def is_asked_for() -> bool:
        seen.ask(watched)
        return SILENT in seen.answered

    watched.eventually(is_asked_for, "the silent GPU is on its panel")

    with stopped_daemon(world):  # the daemon would replace the exporters; Prometheus keeps their addresses

        def is_node_down() -> bool:
            stop_exporters(world)
            seen.look(watched)
            return "OrchNodeDown" in seen.fired

        watched.eventually(is_node_down, "the node is down")
        watched.eventually(lambda: watched.received_of("OrchNodeDown"), "the node reaches the webhook")
    seen.finish(watched)
    return seen


def preempt(world: World, job: str) -> None:
    """Drain the job's node, and uncordon it, so that the job leaves it and returns."""
    (node,) = world.stack.client.nodes()
    assert world.stack.orch("nodes", "drain", node.name).returncode == 0
    world.stack.wait_state(job, "PENDING")
    assert world.stack.orch("nodes", "uncordon", node.name).returncode == 0
    world.stack.wait_state(job, "RUNNING")


@contextmanager
def stopped_daemon(world: World) -> Iterator[None]:
    daemon = psutil.Process(world.stack.daemon_pid())
    daemon.suspend()
    try:
        yield
    finally:
        daemon.resume()


def stop_exporters(world: World) -> None:
    """Send SIGSTOP to all exporters; one may have been starting when the daemon was stopped."""
    for process in world.stack.processes():
        with contextlib.suppress(psutil.Error):
            if "ray::exporter" in " ".join(process.cmdline()).lower():
                process.suspend()


def stop_exporter(world: World, uuid: str) -> None:
    """Send SIGSTOP to a GPU's exporter: it exists but does not answer. One that is being replaced has no address."""
    groups = [group for group in world.targets() if group["labels"]["__meta_orch_gpu_uuid"] == uuid]
    ports = {int(group["targets"][0].rpartition(":")[2]) for group in groups}
    for process in world.stack.processes() if ports else ():
        with contextlib.suppress(psutil.Error):
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port in ports for c in process.net_connections("tcp")):
                process.send_signal(signal.SIGSTOP)


def test_the_imbalance_reaches_people_and_names_the_job(simulated: Seen) -> None:
    (first, *_) = simulated.received_of("OrchJobImbalance")
    assert first["labels"]["job_id"].startswith("slow-")
    assert first["annotations"]["summary"].startswith("Job slow-")
    assert first["annotations"]["runbook_url"].endswith("/OrchJobImbalance.md")


def test_a_balanced_job_makes_no_sound(simulated: Seen) -> None:
    assert simulated.facts["uneven"] == {name: {"slow"} for name in UNEVEN}


def test_alerts_name_the_job_or_the_queue(simulated: Seen) -> None:
    assert simulated.jobs("OrchCheckpointTooOld") == {"stale"}
    assert simulated.jobs("OrchJobRestartLoop") == simulated.jobs("OrchJobFailed") == {"crash"}
    assert {labels["queue"] for labels in simulated.fired["OrchQueueStuck"]} == {"night"}


@pytest.mark.rare
def test_alerts_name_the_gpu(nvidia: Seen) -> None:
    assert {labels["xid"] for labels in nvidia.fired["OrchGpuXid"]} == {"79"}, "31 is the program's own"
    assert {labels["gpu"] for labels in nvidia.fired["OrchGpuEccUncorrected"]} == {"0"}
    assert {labels["gpu"] for labels in nvidia.fired["OrchGpuLost"]} >= {"2"}


def test_the_ledger_adds_up_to_the_gpu_time_held(simulated: Seen) -> None:
    assert simulated.facts["held"] > 10
    assert simulated.facts["spent"] == pytest.approx(simulated.facts["held"], rel=0.01)


def test_an_ended_job_is_shown_for_a_while(simulated: Seen) -> None:
    assert simulated.facts["state after the end"]


@pytest.mark.rare
def test_exporters_keep_to_the_range_of_ports_that_a_policy_can_name(nvidia: Seen) -> None:
    assert len(set(nvidia.facts["ports"])) == 5
    assert all(9477 <= port <= 9599 for port in nvidia.facts["ports"])


@pytest.mark.rare
def test_a_lost_gpu_stays_in_sight(nvidia: Seen) -> None:
    assert nvidia.facts["lost GPU's exporter"]


@pytest.mark.rare
def test_every_query_of_panels_and_rules_has_data_in_one_story_or_the_other(simulated: Seen, nvidia: Seen) -> None:
    everything = {where for where, _ in board_queries()} | recorded()
    assert everything - simulated.answered - nvidia.answered == set()


@pytest.mark.rare
def test_every_alert_fires_in_one_story_or_the_other(simulated: Seen, nvidia: Seen) -> None:
    elsewhere = ONLY_IN_THE_STAND_IN.keys() | ONLY_WITH_PROMTOOL.keys()
    assert alerts() - simulated.fired.keys() - nvidia.fired.keys() <= elsewhere
