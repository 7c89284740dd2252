"""Measures the page under load: the daemon's cost of updating browsers that watch many jobs and GPUs.

A service in memory with ``--jobs`` jobs (a quarter runs) and ``--gpus`` GPUs is served over HTTP from this process, and changes
all the time. ``--viewers`` processes of one kind read the overview's stream. ``ours`` is the share of one core that serving
takes beyond what it takes without viewers, in percent; ``assets_kb`` and ``page_kb`` are compressed sizes. The jobs' own
records are not read: this is the cost of rendering and sending. ``paint_ms`` is the median first contentful paint of the
overview and of a job's page with charts, in Debian's chromium, each in a new context; it is left out where that is missing.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import shutil
import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.measure import parser, report, result
from orchestrator.api.curve_views import POINTS, ChartView, CurveQuery, CurvesView, CurveView
from orchestrator.api.server.listeners import ApiServer, address_of, bind_tcp
from orchestrator.api.server.testing import FakeService
from orchestrator.api.views import NodeView, ProgressView
from orchestrator.core.ids import JobId
from orchestrator.web.rendering import static_files
from orchestrator.web.serving import LazyPage
from orchestrator.web.sign_in import SignIn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WINDOW_SECONDS = 5.0
PAINTS = 6
"""Number of paints of each page; the first one is left out."""

PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
READER = """
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1])
connection.request("GET", "/live/overview", headers={"Cookie": sys.argv[2]})
answer = connection.getresponse()
while answer.read1(65536):
    pass
"""


class BusyService(FakeService):
    """A service with many jobs, and with GPUs whose load changes all the time."""

    def __init__(self, jobs: int, gpus: int) -> None:
        super().__init__("ada")
        self.count = gpus
        self.turn = 0
        nodes = [f"node-{number:03d}" for number in range(-(-gpus // 8))]
        self._nodes = {name: NodeView(id=name, name=name, state="READY") for name in nodes}
        self.ids = [
            self.add(f"job-{number}", state="PENDING" if number % 4 else "RUNNING").id for number in range(jobs)
        ]

    async def curves(self, job_id: JobId, query: CurveQuery) -> CurvesView:  # noqa: ARG002 - the port's signature
        """Return eight charts of eight lines."""
        xs = tuple(float(n) for n in range(POINTS))
        lines = tuple(
            CurveView(label=f"GPU {n}", x=xs, values=tuple((x * 7 + 11 * n) % 100 for x in xs)) for n in range(8)
        )
        charts = tuple(ChartView(name=f"quantity {n}", unit="%", curves=lines) for n in range(8))
        return CurvesView(job_id=job_id, begin=0.0, end=float(POINTS), charts=charts)

    async def gpus(self, max_age_seconds: float = 0.0) -> Sequence[Mapping[str, Any]]:  # noqa: ARG002 - the port's signature
        """Return a row for each GPU, with the values that the heat map shows."""
        return [
            {"node": f"node-{n // 8:03d}", "index": n % 8, "utilization_ratio": (n * 7 + self.turn) % 100 / 100}
            for n in range(self.count)
        ]

    def step(self) -> None:
        """Advance every running job by a step."""
        self.turn += 1
        for job_id in self.ids[::4]:
            self.set(job_id, progress=ProgressView(step=self.turn, fraction=self.turn % 1000 / 1000))


def main() -> None:
    """Measure and report."""
    options = parser(__doc__ or "", pairs=6)
    options.add_argument("--jobs", type=int, default=1000)
    options.add_argument("--gpus", type=int, default=256)
    options.add_argument("--viewers", type=int, default=10)
    arguments = options.parse_args()
    shares, sizes = asyncio.run(_measure(arguments))
    more = {"jobs": arguments.jobs, "gpus": arguments.gpus, "viewers": arguments.viewers, **sizes}
    report(result("page", "% of a core", "lower", shares, {}, **more), arguments.json)


async def _measure(arguments: Any) -> tuple[list[float], dict[str, float]]:
    service, closing = BusyService(arguments.jobs, arguments.gpus), asyncio.Event()
    sign_in = SignIn(os.urandom(32), time.time)
    sock = bind_tcp("127.0.0.1", 0)
    server = ApiServer(LazyPage(service, sign_in, closing), [sock])
    await server.start()
    cookie = f"{sign_in.cookie_name}={sign_in.redeem(sign_in.new_link(os.getuid()))}"
    alone = [await _share(service) for _ in range(arguments.pairs)]
    command = [sys.executable, "-c", READER, address_of(sock), cookie]
    viewers = [subprocess.Popen(command) for _ in range(arguments.viewers)]  # noqa: ASYNC220 - some milliseconds each
    try:
        watched = [await _share(service) for _ in range(arguments.pairs)]
        for viewer in viewers:
            viewer.kill()
            viewer.wait()
        links = [sign_in.new_link(os.getuid()) for _ in range(2 * PAINTS)]
        paints = await asyncio.to_thread(_paints, f"http://{address_of(sock)}", links, service.ids[0])
    finally:
        for viewer in viewers:
            viewer.kill()
            viewer.wait()
        closing.set()
        await server.stop()
    shares = [with_them - without for with_them, without in zip(watched, alone, strict=True)]
    return shares, {**await _sizes(service), **paints}


def _paints(address: str, links: list[str], job_id: str) -> dict[str, float]:
    """Return the first contentful paints that the browser reports; empty without a browser."""
    program = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        return {}
    found: dict[str, list[float]] = {"/": [], f"/jobs/{job_id}": []}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for number, link in enumerate(links):
            path = list(found)[number % 2]
            context = browser.new_context()
            tab = context.new_page()
            tab.goto(f"{address}/signin?link={link}")
            tab.goto(f"{address}{path}")
            while (paint := tab.evaluate(PAINT)) is None:
                tab.wait_for_timeout(10)
            found[path].append(paint)
            context.close()
        browser.close()
    return {
        f"paint_ms_{name}": round(median(found[path][1:]))
        for name, path in zip(("overview", "job"), found, strict=True)
    }


async def _share(service: BusyService) -> float:
    before, until = time.process_time(), time.monotonic() + WINDOW_SECONDS
    while time.monotonic() < until:
        service.step()
        await asyncio.sleep(1.0)
    return 100.0 * (time.process_time() - before) / WINDOW_SECONDS


async def _sizes(service: BusyService) -> dict[str, float]:
    from orchestrator.web.charts import Window, charts_html
    from orchestrator.web.overview import overview_parts

    parts = await overview_parts(service, time.time(), "load")
    begin, end = 0.0, float(POINTS)
    charts = charts_html(
        (await service.curves(JobId(service.ids[0]), CurveQuery())).charts, (begin, end), Window(), "/jobs/x"
    )
    assets = sum(len(gzip.compress(file.body)) for file in static_files().values())
    return {
        "assets_kb": round(assets / 1000, 1),
        "page_kb": round(len(gzip.compress("".join(parts.values()).encode())) / 1000, 1),
        "charts_kb": round(len(gzip.compress(charts.encode())) / 1000, 1),
    }


if __name__ == "__main__":
    main()
