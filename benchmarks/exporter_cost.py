"""What a scrape costs whom: latency under 10 scrapers, processor time at 1 Hz, memory, and the same while a driver hangs.

Ours is one exporter process for each of eight GPUs, as the runtime has one actor each; the peer is nvitop-exporter for
all eight, as it is run. Both see the same fake driver library with the same latencies in the same run. A round of scrapes
goes through everything that Prometheus would scrape: our eight pages, the peer's one. Latencies of the driver are
assumed (see `tests.support.fake_nvml.ASSUMED_LATENCY_US`), not captured from hardware.

`ours` and `peers` are seconds for one page; `scrape_all` compares all eight of ours with the peer's one.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil

from benchmarks.measure import parser, report, result, summary, wait_for
from tests.support.fake_nvml import ASSUMED_LATENCY_US, FakeNvml

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GPUS = 8
SCRAPERS = 10
ROOT = Path(__file__).parents[1]
EXPORTER = ROOT / "benchmarks" / "workloads" / "exporter.py"
MEMORY_CLAIM_MIB = 10.0
"""The source's claim: 10 MB more for monitoring four GPUs."""


def main() -> None:
    """Measure and report."""
    options = parser(__doc__ or "", pairs=4)
    options.add_argument("--scrape-seconds", type=float, default=3.0, help="length of a round of scrapes")
    options.add_argument("--idle-seconds", type=float, default=5.0, help="length of the window for processor time")
    options.add_argument("--hang-seconds", type=float, default=3.0, help="how long one GPU's driver hangs")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="orch-bench-") as directory:
        fake = FakeNvml.create(Path(directory), gpus=GPUS)
        for gpu in fake:
            gpu.latency(ASSUMED_LATENCY_US)
        with _ours(fake) as ours, _nvitop(fake) as peer:
            report(_measure(fake, ours, peer, arguments), arguments.json)


class Contender:
    """Processes that export, and the pages that they serve."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]], urls: Sequence[str]) -> None:
        self.processes = [psutil.Process(process.pid) for process in processes]
        self.urls = list(urls)

    def cpu_seconds(self) -> float:
        """Processor time of all processes so far, to the nanosecond: the usual counters tick in hundredths of a second."""
        tasks = (task for process in self.processes for task in Path(f"/proc/{process.pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def pss_mib(self) -> list[float]:
        """Each process's share of memory."""
        return [process.memory_full_info().pss / 2**20 for process in self.processes]


def _measure(fake: FakeNvml, ours: Contender, peer: Contender, arguments: Any) -> dict[str, Any]:
    latencies: dict[str, list[float]] = {"ours": [], "nvitop": []}
    pages: dict[str, list[float]] = {"ours": [], "nvitop": []}
    cpu: dict[str, list[float]] = {"ours": [], "nvitop": []}
    arms = (("ours", ours), ("nvitop", peer))
    for number in range(arguments.pairs):
        for name, contender in arms if number % 2 == 0 else reversed(arms):
            before, started = contender.cpu_seconds(), time.perf_counter()
            time.sleep(arguments.idle_seconds)
            spent = contender.cpu_seconds() - before
            cpu[name].append(100.0 * spent / (time.perf_counter() - started) / GPUS)
            per_page, per_round = scrape(contender.urls, arguments.scrape_seconds)
            latencies[name] += per_page
            pages[name] += per_round
            print(f"round {number}: {name} cpu {cpu[name][-1]:.3f} %/GPU, {len(per_page)} scrapes", file=sys.stderr)
    hang = _hang(fake, ours, arguments.hang_seconds)
    mine, theirs = summary(latencies["ours"]), summary(latencies["nvitop"])
    return result(
        "exporter_cost",
        "s",
        "lower",
        latencies["ours"],
        {"nvitop-exporter": latencies["nvitop"]},
        scrapers=SCRAPERS,
        p99_ratio={"nvitop-exporter": mine["p99"] / theirs["p99"]},
        scrape_all={"ours": summary(pages["ours"]), "nvitop-exporter": summary(pages["nvitop"])},
        cpu_percent_per_gpu={"ours": summary(cpu["ours"]), "nvitop-exporter": summary(cpu["nvitop"])},
        memory_pss_mib={
            "ours_each": ours.pss_mib(),
            "nvitop-exporter": sum(peer.pss_mib()),
            "claim_for_4_gpus": MEMORY_CLAIM_MIB,
        },
        while_one_driver_hangs=hang,
        driver_latency_us={"assumed": True, **ASSUMED_LATENCY_US},
    )


def scrape(urls: Sequence[str], seconds: float) -> tuple[list[float], list[float]]:
    """(seconds for each page, seconds for each round through all pages) of `SCRAPERS` clients, one round a 0.1 s each."""
    per_page: list[float] = []
    per_round: list[float] = []
    stop = time.perf_counter() + seconds

    def client(offset: float) -> None:
        connections = [http.client.HTTPConnection(*_address(url), timeout=10) for url in urls]
        time.sleep(offset)
        while time.perf_counter() < stop:
            begun = time.perf_counter()
            for connection in connections:
                start = time.perf_counter()
                connection.request("GET", "/metrics")
                connection.getresponse().read()
                per_page.append(time.perf_counter() - start)
            per_round.append(time.perf_counter() - begun)
            time.sleep(0.1)
        for connection in connections:
            connection.close()

    threads = [threading.Thread(target=client, args=(0.1 * number / SCRAPERS,)) for number in range(SCRAPERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return per_page, per_round


def _hang(fake: FakeNvml, ours: Contender, seconds: float) -> dict[str, Any]:
    """Scrapes of the other GPUs while the first one's driver hangs, and what its own page says then."""
    fake[0].hang = 1
    try:
        others, _ = scrape(ours.urls[1:], seconds)
        wait_for(
            "the hanging GPU being told",
            lambda: f'gpu_uuid="{fake.uuid(0)}",gpu="0",node="bench"}} 0' in _get(ours.urls[0]),
            30,
        )
        own, _ = scrape(ours.urls[:1], 1.0)
    finally:
        fake[0].hang = 0
    return {"other_gpus": summary(others), "its_own_page": summary(own), "seconds": seconds}


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 0


def _get(url: str) -> str:
    connection = http.client.HTTPConnection(*_address(url), timeout=10)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


@contextlib.contextmanager
def _ours(fake: FakeNvml) -> Iterator[Contender]:
    environ = {**os.environ, **fake.environment(), "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(EXPORTER), "1", fake.uuid(index)], env=environ, stdout=subprocess.PIPE, text=True
        )
        for index in range(GPUS)
    ]
    with _ended(processes):
        urls = [process.stdout.readline().strip() for process in processes if process.stdout is not None]
        for url in urls:
            wait_for("the first sample", lambda url=url: "orch_gpu_power_watts" in _get(url), 30)
        yield Contender(processes, urls)


@contextlib.contextmanager
def _nvitop(fake: FakeNvml) -> Iterator[Contender]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).parent / "nvitop-exporter"), "--port", str(port), "--interval", "1.0"]
    environ = {**os.environ, **fake.environment()}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    url = f"http://127.0.0.1:{port}/metrics"

    def up() -> bool:
        with contextlib.suppress(OSError):
            return "gpu_power_usage" in _get(url)
        return False

    with _ended([process]):
        wait_for("nvitop-exporter", up, 60)
        yield Contender([process], [url])


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
