"""Measures the cost of scrapes: latency under 10 scrapers, processor time at 1 Hz, memory, and latency while a driver hangs.

Ours is a real daemon's exporter actors, one for each of eight GPUs; the peer is nvitop-exporter for all eight, as it is
run. Both see the same fake driver library with the same latencies in the same run. A round of scrapes goes through
everything that Prometheus would scrape: our eight pages, the peer's one. The cost of an actor is compared with that of
as many actors of the same Ray that do nothing. The library's calls take as long as those of an H100's driver
(`tests.support.fake_nvml.CALL_US`); with --real it is the machine's own driver.

`ours` and `peers` are seconds for one page; `scrape_all` compares all eight of ours with the peer's one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import psutil

from benchmarks.measure import cpu_seconds, parser, report, result, summary, wait_for
from benchmarks.record_rate import LATENCY_US, Driver, machines_own
from orchestrator.runtime.cluster.head import ray_environment
from tests.support.fake_nvml import FakeNvml
from tests.support.processes import ray_workers
from tests.support.stack import Stack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GPUS = 8
SCRAPERS = 10
SWITCH_SECONDS = 0.0005
"""Longest time that a thread of the scrapers may keep the interpreter while another thread's answer is there."""
_LENGTH = re.compile(rb"(?i)content-length: *(\d+)\r")
MEMORY_CLAIM_MIB = 10.0
"""The source's claim: 10 MB more for monitoring four GPUs."""


def main() -> None:
    """Measure and report."""
    options = parser(__doc__ or "", pairs=4)
    options.add_argument("--scrape-seconds", type=float, default=3.0, help="length of a round of scrapes")
    options.add_argument("--idle-seconds", type=float, default=5.0, help="length of the window for processor time")
    options.add_argument("--hang-seconds", type=float, default=30.0, help="how long one GPU's driver hangs")
    options.add_argument(
        "--real", action="store_true", help="the machine's own GPUs, not the test driver's; none hangs then"
    )
    arguments = options.parse_args()
    if arguments.real:
        _compare(machines_own(), None, arguments)
        return
    with tempfile.TemporaryDirectory(prefix="orch-bench-") as directory:
        fake = FakeNvml.create(Path(directory), gpus=GPUS)
        for gpu in fake:
            gpu.take_time()
        driver = Driver(fake.environment(), GPUS, LATENCY_US)
        _compare(driver, fake, arguments)


def _compare(driver: Driver, fake: FakeNvml | None, arguments: Any) -> None:
    with _ours(driver) as (ours, idle), _nvitop(driver) as peer:
        sys.setswitchinterval(SWITCH_SECONDS)
        found = _measure(driver, ours, idle, peer, arguments)
        hang = {} if fake is None else {"while_one_driver_hangs": _hang(fake, ours, arguments.hang_seconds)}
        report({**found, **hang}, arguments.json)


class Contender:
    """Processes that export, and the pages that they serve."""

    def __init__(self, pids: Sequence[int], urls: Sequence[str]) -> None:
        self.processes = [psutil.Process(pid) for pid in pids]
        self.urls = list(urls)

    def cpu_seconds(self) -> list[float]:
        """Return the processor time of each process so far."""
        return [cpu_seconds(process.pid) for process in self.processes]

    def pss_mib(self) -> list[float]:
        """Return each process's share of memory."""
        return [process.memory_full_info().pss / 2**20 for process in self.processes]


def cpu_percents(contenders: Sequence[Contender], seconds: float) -> list[list[float]]:
    """Return the percentage of a core that each one's processes use over the same next seconds."""
    before, started = [one.cpu_seconds() for one in contenders], time.perf_counter()
    time.sleep(seconds)
    elapsed = time.perf_counter() - started
    return [
        [100.0 * (now - then) / elapsed for now, then in zip(one.cpu_seconds(), earlier, strict=True)]
        for one, earlier in zip(contenders, before, strict=True)
    ]


def _measure(driver: Driver, ours: Contender, idle: Contender, peer: Contender, arguments: Any) -> dict[str, Any]:
    latencies: dict[str, list[float]] = {"ours": [], "nvitop": []}
    pages: dict[str, list[float]] = {"ours": [], "nvitop": []}
    cpu: dict[str, list[float]] = {"ours": [], "nvitop": []}
    resting: list[float] = []
    arms = (("ours", ours), ("nvitop", peer))
    for number in range(arguments.pairs):
        for name, contender in arms if number % 2 == 0 else reversed(arms):
            spent, rested = cpu_percents((contender, idle), arguments.idle_seconds)
            cpu[name].append(sum(spent) / driver.gpus)
            if contender is ours:
                resting.append(sum(rested) / driver.gpus)
            per_page, per_round = scrape(contender.urls, arguments.scrape_seconds)
            latencies[name] += per_page
            pages[name] += per_round
            print(f"round {number}: {name} cpu {cpu[name][-1]:.3f} %/GPU, {len(per_page)} scrapes", file=sys.stderr)
    mine, theirs = summary(latencies["ours"]), summary(latencies["nvitop"])
    return result(
        "exporter_cost" if driver.environment else "exporter_cost_gpu",
        "s",
        "lower",
        latencies["ours"],
        {"nvitop-exporter": latencies["nvitop"]},
        scrapers=SCRAPERS,
        p99_ratio={"nvitop-exporter": mine["p99"] / theirs["p99"]},
        scrape_all={"ours": summary(pages["ours"]), "nvitop-exporter": summary(pages["nvitop"])},
        cpu_percent_per_gpu={
            "ours": summary(cpu["ours"]),
            "ours_beyond_idle_actor": summary([a - b for a, b in zip(cpu["ours"], resting, strict=True)]),
            "idle_actor": summary(resting),
            "nvitop-exporter": summary(cpu["nvitop"]),
        },
        memory_pss_mib={
            "ours_each": ours.pss_mib(),
            "idle_actor_each": idle.pss_mib(),
            "ours_beyond_idle_actor": statistics.fmean(ours.pss_mib()) - statistics.fmean(idle.pss_mib()),
            "nvitop-exporter": sum(peer.pss_mib()),
            "claim_for_4_gpus": MEMORY_CLAIM_MIB,
        },
        driver_latency_us=dict(driver.latency_us),
    )


def scrape(urls: Sequence[str], seconds: float) -> tuple[list[float], list[float]]:
    """Return (seconds for each page, seconds for each round through all pages) of `SCRAPERS` clients, which pause 0.1 s after a round."""
    per_page: list[float] = []
    per_round: list[float] = []
    stop = time.perf_counter() + seconds

    def client(offset: float) -> None:
        with contextlib.ExitStack() as stack:
            scrapers = [stack.enter_context(Scraper(url)) for url in urls]
            time.sleep(offset)
            while time.perf_counter() < stop:
                begun = time.perf_counter()
                for scraper in scrapers:
                    start = time.perf_counter()
                    scraper.get()
                    per_page.append(time.perf_counter() - start)
                per_round.append(time.perf_counter() - begun)
                time.sleep(0.1)

    threads = [threading.Thread(target=client, args=(0.1 * number / SCRAPERS,)) for number in range(SCRAPERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return per_page, per_round


class Scraper:
    """Requests one page again and again, with so little work of its own that the time is the server's.

    It reconnects to a server that closes after each answer, as Prometheus would.
    """

    def __init__(self, url: str) -> None:
        self._address = _address(url)
        self._request = f"GET /metrics HTTP/1.1\r\nHost: {self._address[0]}\r\n\r\n".encode()
        self._socket: socket.socket | None = None

    def __enter__(self) -> Self:
        """Return the scraper; the first `get` connects."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self._close()

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def get(self) -> bytes:
        """Return the page. Raises OSError when the server disconnects in the middle or answers with an error."""
        if self._socket is None:
            self._socket = socket.create_connection(self._address, timeout=10)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(self._request)
        answer = bytearray()
        head, length = -1, None
        while length is None or len(answer) < head + 4 + length:
            part = self._socket.recv(1 << 18)
            if not part:
                break
            answer += part
            if head < 0 and (head := answer.find(b"\r\n\r\n")) >= 0:
                found = _LENGTH.search(answer, 0, head + 2)
                length = int(found[1]) if found else None
        if not answer.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200")) or (length or 0) > len(answer) - head - 4:
            raise OSError(f"{self._address}: {bytes(answer[:80])!r}")
        if length is None or answer.startswith(b"HTTP/1.0") or b"onnection: close" in answer[:head]:
            self._close()
        return bytes(answer[head + 4 :])


def _hang(fake: FakeNvml, ours: Contender, seconds: float) -> dict[str, Any]:
    """Measure scrapes of the other GPUs while the first one's driver hangs, and of its own page then."""
    down = re.compile(rf'orch_exporter_up\{{gpu_uuid="{re.escape(fake.uuid(0))}".*\}} 0'.encode())
    hanging = next(url for url in ours.urls if fake.uuid(0).encode() in _get(url))
    fake[0].hang = 1
    try:
        others, _ = scrape([url for url in ours.urls if url != hanging], seconds)
        wait_for("the hanging GPU being told", lambda: down.search(_get(hanging)), 30)
        own, _ = scrape([hanging], 1.0)
    finally:
        fake[0].hang = 0
    return {"other_gpus": summary(others), "its_own_page": summary(own), "seconds": seconds}


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 0


def _get(url: str) -> bytes:
    with Scraper(url) as scraper:
        return scraper.get()


@contextlib.contextmanager
def _ours(driver: Driver) -> Iterator[tuple[Contender, Contender]]:
    """Yield the exporter actors of a daemon of its own, and as many actors of the same Ray that idle."""
    stack = Stack(environ=driver.environment)
    try:
        read_address = stack.up()["read_address"]

        def targets() -> list[str] | None:
            with urllib.request.urlopen(f"http://{read_address}/api/v1/prometheus/targets", timeout=10) as answer:
                groups = json.load(answer)
            return [f"http://{group['targets'][0]}/metrics" for group in groups] if len(groups) == driver.gpus else None

        urls = wait_for("an exporter for every GPU", targets, 60)
        for url in urls:
            wait_for("the first sample", functools.partial(_sampled, url), 30)
        exporters = [process.pid for process in ray_workers(stack, "ray::ExporterActor")]
        yield Contender(exporters, urls), Contender(_idle_actors(stack, driver.gpus), [])
    finally:
        stack.close()


def _sampled(url: str) -> bool:
    return b"orch_gpu_power_watts" in _get(url)


IDLE = """
import json, os, sys
import ray

class Idle:
    def pid(self):
        return os.getpid()

ray.init(address=sys.argv[1], namespace="idle", log_to_driver=False, configure_logging=False)
options = {"num_cpus": 0, "lifetime": "detached", "max_restarts": -1}
actors = [ray.remote(Idle).options(name=f"idle-{n}", **options).remote() for n in range(int(sys.argv[2]))]
print(json.dumps(ray.get([actor.pid.remote() for actor in actors])))
"""


def _idle_actors(stack: Stack, count: int) -> list[int]:
    """Return the process ids of actors that do nothing, made like those of the exporters."""
    head = stack.settings.paths.ray
    address = json.loads((head / "head.json").read_text())["gcs_address"]
    done = subprocess.run(
        [sys.executable, "-c", IDLE, address, str(count)],
        env={**os.environ, **ray_environment(head / "token")},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    pids: list[int] = json.loads(done.stdout.splitlines()[-1])
    return pids


@contextlib.contextmanager
def _nvitop(driver: Driver) -> Iterator[Contender]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).parent / "nvitop-exporter"), "--port", str(port), "--interval", "1.0"]
    environ = {**os.environ, **driver.environment}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    url = f"http://127.0.0.1:{port}/metrics"

    def up() -> bool:
        with contextlib.suppress(OSError):
            return b"gpu_power_usage" in _get(url)
        return False

    with _ended([process]):
        wait_for("nvitop-exporter", up, 60)
        yield Contender([process.pid], [url])


@contextlib.contextmanager
def _ended(processes: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
