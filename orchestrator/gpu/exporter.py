"""Publishes GPUs to Prometheus: samples them in the background, and serves their newest samples by prometheus-client.

A plain object, for the Ray actor and other users. No request calls a driver: each GPU's thread keeps its newest sample
and the last minute of its load, and a scrape turns the samples that are not too old into text. So a GPU that hangs
disappears from the page instead of showing its last values for ever.

On an address other than loopback the server requires a bearer token or TLS. Its clients may be hostile: a connection
serves one request and lives for a limited time, a request's head has a limited size, and beyond the limit on
connections a new one takes the place of the oldest.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import http.client
import io
import ipaddress
import socket
import socketserver
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from orchestrator import catalogue
from orchestrator.catalogue import METRICS, Metric
from orchestrator.gpu.load import LoadWindow
from orchestrator.gpu.recording.job_record import JobRecorder
from orchestrator.gpu.sample import Detail, GpuInfo, Sample
from orchestrator.gpu.sampler import Health, Pace, Reading, Sampler, SamplerGroup

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from orchestrator.gpu.load import GpuLoad
    from orchestrator.gpu.sample import GpuReader

MAX_HEAD_BYTES: Final = 16 * 1024
EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
RETRY_SECONDS: Final = 1.0
"""Without descriptors, the server accepts again after this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Settings of the server. Port 0 takes a free one; with `last_port`, the first free one from `port` on.

    A connection is closed `request_seconds` after it was accepted, whatever its client does.
    """

    host: str = "127.0.0.1"
    port: int = 0
    last_port: int | None = None
    token: str | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    request_seconds: float = 10.0
    max_connections: int = 32

    def validate(self) -> None:
        """Raise ValueError for an address that would be open to anyone, and for half of a TLS pair."""
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("TLS needs both a certificate and its key; only one of them is set.")
        if self.tls_certificate is None and self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"metrics on {self.host} would be readable by everyone who reaches it. Set a token or TLS, or listen on"
                " 127.0.0.1."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterSettings:
    """The sampling rate (hertz), the silence in seconds after which a GPU counts as gone, and the address.

    `processes` adds a series for every process on a GPU to the page; `statuses` has them in any case.
    """

    rate: float = 1.0
    stale_after: float | None = None
    processes: bool = False
    pace: Pace = field(default_factory=Pace)
    http: HttpSettings = field(default_factory=HttpSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStatus:
    """A GPU's present state in its exporter; `sample` is None unless it is healthy."""

    info: GpuInfo
    health: Health
    sample: Sample | None
    error: str | None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class GpuExporter:
    """Exports one or more GPUs."""

    def __init__(self, readers: Sequence[GpuReader], node: str, settings: ExporterSettings | None = None) -> None:
        """Export what `readers` read, as GPUs of `node`. Raises ValueError for an address without protection."""
        settings = settings or ExporterSettings()
        settings.http.validate()
        self.gpus = tuple(_ExportedGpu(reader, node, settings) for reader in readers)
        self._group = SamplerGroup(gpu.sampler for gpu in self.gpus)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_GpuCollector(self.gpus))
        # Most scrapers ask for gzip, which costs more than it saves on a page of some KiB.
        page = make_wsgi_app(self.registry, disable_compression=True)
        self._server = _Server(settings.http, _protected(page, settings.http.token))

    def start(self) -> None:
        """Begin to sample and to serve. Raises OSError when the address is taken."""
        self._server.start()
        self._group.start()

    @property
    def url(self) -> str:
        """Return the page's address."""
        return self._server.url

    def statuses(self) -> tuple[GpuStatus, ...]:
        """Return the present state of every GPU, for the API, without calling a driver."""
        now = time.monotonic()
        return tuple(gpu.status(now) for gpu in self.gpus)

    def loads(self, seconds: float) -> tuple[GpuLoad | None, ...]:
        """Return each GPU's averages over the last `seconds`, at most a minute; None without a sample."""
        now = time.monotonic()
        return tuple(gpu.window.load(now, seconds) for gpu in self.gpus)

    def recorded_jobs(self) -> frozenset[str]:
        """Return the jobs whose telemetry is being written."""
        return frozenset(job_id for gpu in self.gpus for job_id in gpu.jobs)

    def record_job(
        self, job_id: str, directory: Path, *, rate: float = 1.0, gpu_uuids: Sequence[str] | None = None
    ) -> None:
        """Append samples of these GPUs (all of them by default) to the telemetry in `directory` from now on.

        `rate` in hertz: a GPU is sampled at the highest rate that its jobs require; the page is still renewed once a
        second.
        """
        for gpu in self.gpus:
            if gpu_uuids is None or gpu.sampler.info.uuid in gpu_uuids:
                gpu.record(job_id, directory, rate)

    def stop_recording(self, job_id: str) -> None:
        """End the job's telemetry; a job that is not recorded is no error."""
        for gpu in self.gpus:
            gpu.stop_recording(job_id)

    def stop(self) -> tuple[str, ...]:
        """Stop serving and sampling; return the UUIDs of GPUs whose driver hangs and whose threads still run."""
        self._server.stop()
        hanging = self._group.stop()
        for gpu in self.gpus:
            for job_id in tuple(gpu.jobs):
                gpu.stop_recording(job_id)
        return hanging

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self.stop()


class _ExportedGpu:
    """One GPU: its sampler, the window of its load, the jobs that record it."""

    def __init__(self, reader: GpuReader, node: str, settings: ExporterSettings) -> None:
        reader.options.processes = True
        reader.options.xids = True
        reader.options.sparing = True
        self.sampler = Sampler(
            reader, rate=settings.rate, stale_after=settings.stale_after, on_reading=self._read, pace=settings.pace
        )
        self.window = LoadWindow()
        self.jobs: dict[str, JobRecorder] = {}
        self._node = node
        self._processes = settings.processes
        self._rate = settings.rate

    def _read(self, reading: Reading) -> None:
        if reading.detail is Detail.FULL:
            self.window.add(reading.sample)
        for recorder in self.jobs.values():  # the dictionary is replaced, never changed
            recorder.append(reading)

    def status(self, now: float) -> GpuStatus:
        """Return the GPU's state at monotonic time `now`."""
        return GpuStatus(
            info=self.sampler.info,
            health=self.sampler.health(now),
            sample=self.sampler.fresh(now),
            error=self.sampler.trouble(now),
        )

    def series(self, now: float) -> Iterator[Series]:
        """Return the GPU's series; without a fresh sample only the exporter's own, which report that it is not up."""
        sample, latest, info = self.sampler.fresh(now), self.sampler.latest, self.sampler.info
        yield catalogue.EXPORTER_UP, (str(info.index), self._node), float(sample is not None)
        yield catalogue.EXPORTER_READ_ERRORS, (), self.sampler.errors
        if latest is not None:
            yield catalogue.EXPORTER_LAST_SUCCESS_TIMESTAMP, (), latest.timestamp
        if sample is not None:
            identity = (str(info.index), self._node, info.vendor, info.model, info.pci_bus_id, info.driver_version)
            yield catalogue.GPU_INFO, identity, 1.0
            yield from series_of(sample, processes=self._processes)

    def record(self, job_id: str, directory: Path, rate: float) -> None:
        """Record for a job from the next reading on."""
        if job_id not in self.jobs:
            self.jobs = {**self.jobs, job_id: JobRecorder(directory, self.sampler.info, rate=rate)}
            self._adjust_rate()

    def stop_recording(self, job_id: str) -> None:
        """End a job's recording."""
        recorder = self.jobs.get(job_id)
        if recorder is not None:
            self.jobs = {key: value for key, value in self.jobs.items() if key != job_id}
            self._adjust_rate()
            recorder.close()

    def _adjust_rate(self) -> None:
        self.sampler.rate = max([self._rate, *(recorder.rate for recorder in self.jobs.values())])


# --------------------------------------------------------------------------------------------------------- metrics

Series = tuple[Metric, tuple[str, ...], float]
"""(metric, values of the labels after gpu_uuid, value)."""

FAMILIES: Final[tuple[Metric, ...]] = tuple(metric for metric in METRICS if metric.owner == "gpu")
_VALUES: Final = (
    (catalogue.GPU_UTILIZATION, "utilization"),
    (catalogue.GPU_MEMORY_ACTIVITY, "memory_activity"),
    (catalogue.GPU_MEMORY_USED, "memory_used_bytes"),
    (catalogue.GPU_MEMORY_TOTAL, "memory_total_bytes"),
    (catalogue.GPU_POWER, "power_watts"),
    (catalogue.GPU_POWER_LIMIT, "power_limit_watts"),
    (catalogue.GPU_ENERGY, "energy_joules"),
    (catalogue.GPU_FAN, "fan"),
    (catalogue.GPU_PCIE_TRANSMIT, "pcie_transmit_bytes"),
    (catalogue.GPU_PCIE_RECEIVE, "pcie_receive_bytes"),
    (catalogue.EXPORTER_COLLECT_DURATION, "duration_seconds"),
)
"""Metrics of a single value of a sample."""
_ROWS: Final = (
    (catalogue.GPU_TEMPERATURE, "temperatures"),
    (catalogue.GPU_TEMPERATURE_LIMIT, "temperature_limits"),
    (catalogue.GPU_CLOCK, "clocks"),
    (catalogue.GPU_THROTTLE_ACTIVE, "throttle"),
    (catalogue.GPU_THROTTLE, "throttle_seconds"),
    (catalogue.GPU_ECC_ERRORS, "ecc_errors"),
    (catalogue.GPU_REMAPPED_ROWS, "remapped_rows"),
)
"""Metrics of a sample's rows, which hold labels and, last, a value."""


def series_of(sample: Sample, *, processes: bool) -> Iterator[Series]:
    """Return the series of a sample; a value that it does not have yields none. One for each process if wanted."""
    for metric, attribute in _VALUES:
        value = getattr(sample, attribute)
        if value is not None:
            yield metric, (), value
    for metric, attribute in _ROWS:
        for *labels, value in getattr(sample, attribute):
            yield metric, tuple(labels), value
    for link, sent, received in sample.nvlinks:
        if sent is not None:
            yield catalogue.GPU_NVLINK_TRANSMIT, (str(link),), sent
        if received is not None:
            yield catalogue.GPU_NVLINK_RECEIVE, (str(link),), received
    for xid in sample.xids:
        yield catalogue.GPU_XID_ERRORS, (str(xid.code),), xid.count
        yield catalogue.GPU_XID_LAST_TIMESTAMP, (str(xid.code),), xid.last_timestamp
    for process in sample.processes if processes else ():
        if process.memory_bytes is not None:
            yield catalogue.GPU_PROCESS_MEMORY, (str(process.pid),), process.memory_bytes


class _GpuCollector(Collector):
    """Collects the newest samples of GPUs, by the names of the catalogue. A family without a series is left out."""

    def __init__(self, gpus: Sequence[_ExportedGpu]) -> None:
        self._gpus = gpus

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield the families, in the catalogue's order."""
        now = time.monotonic()
        families = {
            metric.name: (CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily)(
                metric.name, metric.help, labels=metric.labels
            )
            for metric in FAMILIES
        }
        for gpu in self._gpus:
            uuid = gpu.sampler.info.uuid
            for metric, labels, value in gpu.series(now):
                families[metric.name].add_metric((uuid, *labels), float(value))
        yield from (found for found in families.values() if found.samples)


# ---------------------------------------------------------------------------------------------------------- server


def _protected(page: WSGIApplication, token: str | None) -> WSGIApplication:
    """Return the application: the page at `/metrics`, with the token where one is set, and `/healthz`."""
    expected = None if token is None else f"Bearer {token}".encode()

    def plain(start: StartResponse, status: str, text: bytes, *headers: tuple[str, str]) -> Iterable[bytes]:
        start(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text))), *headers])
        return [text]

    def application(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/healthz":
            return plain(start, "200 OK", b"ok\n")
        given = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1", "replace")
        if expected is not None and not hmac.compare_digest(given, expected):
            text = b"send the exporter's token: Authorization: Bearer TOKEN\n"
            return plain(start, "401 Unauthorized", text, ("WWW-Authenticate", "Bearer"))
        if environ["PATH_INFO"] != "/metrics":
            return plain(start, "404 Not Found", b"the metrics are at /metrics\n")
        return page(environ, start)

    return application


class _Head(io.BufferedIOBase):
    """A request's head, of limited size."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = MAX_HEAD_BYTES

    def readline(self, size: int | None = -1) -> bytes:
        """Return the next line. Raises LineTooLong, which http.server answers with 431, for too long a head."""
        del size
        line: bytes = self._file.readline(self._left + 1)
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong("request head")
        return line

    def close(self) -> None:
        """Close the connection's file."""
        self._file.close()


class _Handler(WSGIRequestHandler):
    """One request of one connection; reports nothing of what clients do wrong."""

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile)

    def get_stderr(self) -> Any:
        return io.StringIO()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # http.server's name
        """Log nothing."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """The WSGI server, with a thread for each of a limited number of connections, each for a limited time."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False
    request_queue_size = 128

    def __init__(self, settings: HttpSettings, application: WSGIApplication) -> None:
        self._settings = settings
        self._deadlines: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.served = application

    def start(self) -> None:
        """Listen. Raises OSError when no port is free or the certificate is unreadable."""
        settings = self._settings
        for port in range(settings.port, max(settings.port, settings.last_port or 0) + 1):
            try:
                self._bind(port)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or settings.last_port is None:
                    raise
        else:
            raise OSError(
                errno.EADDRINUSE,
                f"every port from {settings.port} to {settings.last_port} of {settings.host} is taken; widen the range"
                " (ORCH_EXPORTER_PORTS)",
            )
        self._thread = threading.Thread(target=self.serve_forever, name="orch-metrics-http", daemon=True)
        self._thread.start()

    def _bind(self, port: int) -> None:
        found = socket.getaddrinfo(self._settings.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        super().__init__(found[0][4][:2], _Handler)  # type: ignore[arg-type]  # (host, port) of either family
        self.set_app(self.served)
        if self._settings.tls_certificate is not None:
            import ssl

            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(self._settings.tls_certificate, self._settings.tls_key)
            # The handshake is the connection's own: a client that delays it must not delay the next one.
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def server_bind(self) -> None:
        """Bind without HTTPServer's question for the host's name, which may wait for a name server."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self._settings.host, self.server_address[1]
        self.setup_environ()

    @property
    def url(self) -> str:
        """Return the page's address, once started."""
        host, port = str(self.server_address[0]), self.server_address[1]
        scheme = "https" if self._settings.tls_certificate else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    def stop(self) -> None:
        """Stop listening and drop every connection."""
        if self._thread is None:
            return
        self._stopping.set()
        self.shutdown()
        self._thread.join()
        self._thread = None
        self.server_close()
        with self._lock:
            for connection in self._deadlines:
                _drop(connection)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; wait a moment where there are no descriptors, as the listener stays ready."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in EXHAUSTED:
                self._stopping.wait(RETRY_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, in place of the oldest one where there are too many."""
        with self._lock:
            if len(self._deadlines) >= self._settings.max_connections:
                self._end(min(self._deadlines, key=self._deadlines.__getitem__))
            self._deadlines[request] = time.monotonic() + self._settings.request_seconds
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Drop the connections that have lasted too long; called twice a second."""
        now = time.monotonic()
        with self._lock:
            for connection in [one for one, deadline in self._deadlines.items() if deadline <= now]:
                self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        del self._deadlines[connection]
        _drop(connection)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report nothing: clients that break off or do not speak HTTP are no error of ours."""


def _drop(connection: socket.socket) -> None:
    """End a connection under its thread, which closes it; an SSLSocket's own `shutdown` is not safe to call from here."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
