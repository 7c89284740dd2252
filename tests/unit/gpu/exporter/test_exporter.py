"""The exporter as a scraper sees it: quick, without values of GPUs that do not answer, closed to strangers."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from orchestrator.gpu.drivers.nvidia.nvml import open_nvidia
from orchestrator.gpu.exporter.exporter import ExporterTarget, GpuExporter
from orchestrator.gpu.exporter.http import HttpSettings
from orchestrator.gpu.reader import GpuLostError
from orchestrator.gpu.recording.job_record import read_job_telemetry
from orchestrator.gpu.sampler import Health, Pace
from tests.support import fake_nvml
from tests.support.fake_nvml import FakeNvml
from tests.unit.gpu.support import ScriptedReader, wait_for

MakeReader = Callable[[str], ScriptedReader]
QUICK = Pace(full_seconds=0.05, retry_seconds=(0.02,))
FAST = ExporterTarget(rate=50.0, pace=QUICK)


@pytest.fixture
def exporter(make_reader: MakeReader) -> Iterator[tuple[GpuExporter, ScriptedReader, ScriptedReader]]:
    first, second = make_reader("GPU-a"), make_reader("GPU-b")
    settings = ExporterTarget(rate=50.0, pace=QUICK, stale_after=0.5)
    with GpuExporter([first, second], "node1", settings) as running:
        yield running, first, second
        first.release()
        second.release()


def scrape(url: str, *, token: str | None = None, context: ssl.SSLContext | None = None) -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=300, context=context) as answer:
        text: str = answer.read().decode()
        return text


def has(running: GpuExporter, line: str) -> Callable[[], bool]:
    return lambda: line in scrape(running.url).splitlines()


def up(uuid: str, value: int) -> str:
    return f'orch_exporter_up{{gpu_uuid="{uuid}",gpu="0",node="node1"}} {value}'


def test_it_serves_samples_in_the_text_format(exporter: tuple[GpuExporter, ScriptedReader, ScriptedReader]) -> None:
    running, first, _ = exporter
    wait_for(has(running, 'orch_gpu_power_watts{gpu_uuid="GPU-a"} 300.0'), "the first sample")
    first.power = 444.0
    wait_for(has(running, 'orch_gpu_power_watts{gpu_uuid="GPU-a"} 444.0'), "the new value")
    assert up("GPU-b", 1) in scrape(running.url)
    with urllib.request.urlopen(running.url, timeout=300) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_the_event_loop_that_ray_sets_in_its_workers_is_not_used(
    make_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uvloop() -> asyncio.AbstractEventLoop:
        raise AssertionError("its loop does not serve sockets that it has not made")

    monkeypatch.setattr(asyncio, "new_event_loop", uvloop)
    with GpuExporter([make_reader("GPU-a")], "node1", FAST) as running:
        wait_for(has(running, up("GPU-a", 1)), "the first sample")


def test_a_request_never_asks_the_driver(nvml: FakeNvml) -> None:
    readers = open_nvidia()
    with GpuExporter(readers, "n", ExporterTarget(rate=0.01)) as running:
        wait_for(lambda: all(status.health is Health.OK for status in running.statuses()), "both GPUs")
        wait_for(lambda: all(reader._xids and reader._xids.wait_until_armed(0) for reader in readers), "both watches")
        before = [list(gpu.raw.calls) for gpu in nvml]
        for _ in range(50):
            assert nvml.uuid(1) in scrape(running.url)
        assert [list(gpu.raw.calls) for gpu in nvml] == before


def test_a_hanging_gpu_vanishes_and_the_others_are_served_as_before(
    exporter: tuple[GpuExporter, ScriptedReader, ScriptedReader],
) -> None:
    running, first, second = exporter
    wait_for(has(running, up("GPU-a", 1)), "the first sample")
    first.hang()
    wait_for(has(running, up("GPU-a", 0)), "its absence being told")
    text = scrape(running.url)
    assert not [line for line in text.splitlines() if 'gpu_uuid="GPU-a"' in line and line.startswith("orch_gpu_")]
    assert 'orch_exporter_last_success_timestamp_seconds{gpu_uuid="GPU-a"}' in text
    assert running.statuses()[0].health is Health.STALE
    second.power = 555.0
    wait_for(has(running, 'orch_gpu_power_watts{gpu_uuid="GPU-b"} 555.0'), "the other GPU going on")
    first.release()
    wait_for(has(running, up("GPU-a", 1)), "its return")


def test_a_lost_gpu_vanishes_at_once_and_errors_are_counted(
    exporter: tuple[GpuExporter, ScriptedReader, ScriptedReader],
) -> None:
    running, first, _ = exporter
    wait_for(has(running, up("GPU-a", 1)), "the first sample")
    first.error = GpuLostError("gone")
    wait_for(has(running, up("GPU-a", 0)), "the loss")
    assert running.statuses()[0].health is Health.LOST
    assert running.statuses()[0].error == "gone"
    wait_for(
        lambda: 'orch_exporter_read_errors_total{gpu_uuid="GPU-a"} 3' in scrape(running.url), "errors being counted"
    )


def test_xid_events_of_a_real_driver_library_arrive(nvml: FakeNvml) -> None:
    readers = open_nvidia()
    with GpuExporter(readers, "n", FAST) as running:
        wait_for(lambda: readers[0]._xids and readers[0]._xids.wait_until_armed(0), "the watch")
        nvml[0].xid(79)
        line = f'orch_gpu_xid_errors_total{{gpu_uuid="{nvml.uuid(0)}",xid="79"}} 1'
        wait_for(has(running, line), "the event")
        nvml[0].error = fake_nvml.GPU_IS_LOST
        wait_for(
            lambda: f'orch_exporter_up{{gpu_uuid="{nvml.uuid(0)}",gpu="0",node="n"}} 0' in scrape(running.url),
            "the loss",
        )


def test_a_jobs_telemetry_is_recorded_until_told_to_stop(
    exporter: tuple[GpuExporter, ScriptedReader, ScriptedReader], tmp_path: Path
) -> None:
    running, first, _ = exporter
    running.record_job("j1", tmp_path, rate=200.0, gpu_uuids=["GPU-a"])
    running.record_job("j1", tmp_path, rate=200.0, gpu_uuids=["GPU-a"])
    before = first.reads
    wait_for(lambda: first.reads > before + 40, "readings at the job's rate")
    running.stop_recording("j1")
    running.stop_recording("never recorded")
    rows = read_job_telemetry(tmp_path).samples
    assert {row.gpu_uuid for row in rows} == {"GPU-a"}
    assert len(rows) >= 20
    gaps = [later.timestamp - earlier.timestamp for earlier, later in itertools.pairwise(rows)]
    assert min(gaps) < 0.019, "ticks of 5 ms, where the page's own are 20 ms apart"


def test_stopping_leaves_nothing_behind(make_reader: MakeReader) -> None:
    reader = make_reader("GPU-a")
    running = GpuExporter([reader], "n", FAST)
    running.start()
    address = urlsplit(running.url)
    assert running.stop() == ()
    assert reader.closed.is_set()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.hostname or "", address.port or 0), timeout=300)


def test_stopping_names_a_gpu_whose_driver_hangs(make_reader: MakeReader) -> None:
    reader = make_reader("GPU-a")
    running = GpuExporter([reader], "n", FAST)
    running.start()
    wait_for(lambda: reader.reads, "the first reading")
    reader.hang()
    before = reader.reads
    wait_for(lambda: reader.reads > before, "the hang")
    assert running.stop() == ("GPU-a",)


def test_a_taken_port_is_an_error(make_reader: MakeReader) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ExporterTarget(http=HttpSettings(port=taken.getsockname()[1]))
        with pytest.raises(OSError, match="in use"):
            GpuExporter([make_reader("GPU-a")], "n", settings).start()


def test_the_first_free_port_of_a_range_is_taken(make_reader: MakeReader) -> None:
    first, taken = two_ports_in_a_row()
    with taken:
        http = HttpSettings(port=first, last_port=first + 1)
        with GpuExporter([make_reader("GPU-a")], "n", ExporterTarget(http=http)) as running:
            assert running.url == f"http://127.0.0.1:{first + 1}/metrics"
            with pytest.raises(OSError, match="ORCH_EXPORTER_PORTS"):
                GpuExporter([make_reader("GPU-b")], "n", ExporterTarget(http=http)).start()


def two_ports_in_a_row() -> tuple[int, socket.socket]:
    """Return a port and the socket that holds it; the next port was free a moment ago."""
    for _ in range(100):
        taken = socket.create_server(("127.0.0.1", 0))
        first = taken.getsockname()[1]
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", first + 1)):
            return first, taken
        taken.close()
    raise AssertionError("no two free ports in a row in a hundred tries")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "::", "example.org"])
def test_an_open_address_wants_a_token_or_tls(host: str) -> None:
    with pytest.raises(ValueError, match="token or TLS"):
        HttpSettings(host=host).validate()
    HttpSettings(host=host, token="t").validate()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "::1", "localhost"])
def test_loopback_needs_neither(host: str) -> None:
    HttpSettings(host=host).validate()


def test_half_of_a_tls_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="both"):
        HttpSettings(tls_certificate=Path("c.pem")).validate()


def test_the_token_is_demanded_for_metrics_and_not_for_health(make_reader: MakeReader) -> None:
    settings = ExporterTarget(http=HttpSettings(token="secret"))
    with GpuExporter([make_reader("GPU-a")], "n", settings) as running:
        for token in (None, "wrong", "secre"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                scrape(running.url, token=token)
            assert refused.value.code == 401
            assert refused.value.headers["WWW-Authenticate"] == "Bearer"
            refused.value.close()
        assert "orch_exporter_up" in scrape(running.url, token="secret")
        assert scrape(running.url.replace("/metrics", "/healthz")) == "ok\n"


def test_tls(make_reader: MakeReader, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    settings = ExporterTarget(http=HttpSettings(tls_certificate=certificate, tls_key=key))
    with GpuExporter([make_reader("GPU-a")], "n", settings) as running:
        assert running.url.startswith("https://")
        assert "orch_exporter_up" in scrape(running.url, context=ssl.create_default_context(cafile=str(certificate)))


@pytest.fixture
def connection(make_reader: MakeReader) -> Iterator[http.client.HTTPConnection]:
    with GpuExporter([make_reader("GPU-a")], "n", FAST) as running:
        address = urlsplit(running.url)
        client = http.client.HTTPConnection(address.hostname or "", address.port, timeout=300)
        yield client
        client.close()


def ask(client: http.client.HTTPConnection, method: str, path: str) -> tuple[int, bytes]:
    client.request(method, path)
    answer = client.getresponse()
    return answer.status, answer.read()


def test_one_connection_serves_many_requests(connection: http.client.HTTPConnection) -> None:
    connection.connect()
    port = connection.sock.getsockname()[1]
    for _ in range(5):
        assert ask(connection, "GET", "/metrics")[0] == 200
    assert ask(connection, "HEAD", "/metrics") == (200, b"")
    assert ask(connection, "GET", "/metrics?name[]=x")[0] == 200
    assert ask(connection, "GET", "/other")[0] == 404
    assert ask(connection, "DELETE", "/metrics")[0] == 405
    assert connection.sock.getsockname()[1] == port, "still the same connection"


def raw(client: http.client.HTTPConnection, data: bytes) -> bytes:
    with socket.create_connection((client.host, client.port), timeout=300) as plain:
        plain.sendall(data)
        chunks = []
        while chunk := plain.recv(65536):
            chunks.append(chunk)
        return b"".join(chunks)


def test_what_is_not_http_is_refused_and_closed(connection: http.client.HTTPConnection) -> None:
    assert raw(connection, b"hello\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert raw(connection, b"GET /metrics HTTP/2\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_an_endless_request_is_cut_off(connection: http.client.HTTPConnection) -> None:
    assert raw(connection, b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 20_000).startswith(b"HTTP/1.1 431 ")


def test_a_request_in_pieces_and_two_in_one_piece(connection: http.client.HTTPConnection) -> None:
    with socket.create_connection((connection.host, connection.port), timeout=300) as plain:
        plain.sendall(b"GET /healthz HT")
        plain.sendall(b"TP/1.1\r\n\r")
        plain.sendall(b"\nGET /healthz HTTP/1.1\r\n\r\nGET /healthz HTTP/1.0\r\n\r\n")
        received = b""
        while chunk := plain.recv(65536):
            received += chunk
    assert received.count(b"HTTP/1.1 200 OK") == 3
    assert received.endswith(b"ok\n")


def test_a_body_ends_the_connection(connection: http.client.HTTPConnection) -> None:
    answer = raw(connection, b"GET /healthz HTTP/1.1\r\nContent-Length: 5\r\n\r\nhelloGET /metrics HTTP/1.1\r\n\r\n")
    assert answer.count(b"HTTP/1.1") == 1, "what follows is not taken for a request"


def test_idle_and_surplus_connections_are_dropped(make_reader: MakeReader) -> None:
    http_settings = HttpSettings(head_seconds=0.2, max_connections=2)
    with GpuExporter([make_reader("GPU-a")], "n", replace(FAST, http=http_settings)) as running:
        address = urlsplit(running.url)
        sockets = [socket.create_connection((address.hostname or "", address.port or 0), timeout=300) for _ in range(3)]
        for plain in sockets:  # the third one is accepted when there is room for it
            with plain, contextlib.suppress(ConnectionResetError):
                assert plain.recv(1) == b""
        wait_for(lambda: "orch_exporter_up" in scrape(running.url), "room for a scrape again")


@pytest.mark.parametrize("settings", [HttpSettings(head_seconds=0.5), HttpSettings(idle_seconds=0.5)])
def test_a_kept_connection_has_a_deadline_for_the_next_request(make_reader: MakeReader, settings: HttpSettings) -> None:
    begun = b"GET /slow" if settings.head_seconds < 1 else b""
    with GpuExporter([make_reader("GPU-a")], "n", replace(FAST, http=settings)) as running:
        address = urlsplit(running.url)
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=300) as plain:
            plain.sendall(b"GET /healthz HTTP/1.1\r\n\r\n" + begun)
            with contextlib.suppress(ConnectionResetError):
                while plain.recv(65536):
                    pass


def ask_for_ever(plain: socket.socket) -> None:
    while True:
        plain.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * 100)


def test_a_client_that_reads_nothing_is_dropped(make_reader: MakeReader) -> None:
    settings = HttpSettings(max_unsent_bytes=64 * 1024)
    with GpuExporter([make_reader("GPU-a")], "n", replace(FAST, http=settings)) as running:
        address = urlsplit(running.url)
        with (
            socket.create_connection((address.hostname or "", address.port or 0), timeout=300) as plain,
            pytest.raises((ConnectionResetError, BrokenPipeError)),
        ):
            ask_for_ever(plain)


def test_who_asks_later_is_told_what_he_missed(
    exporter: tuple[GpuExporter, ScriptedReader, ScriptedReader],
) -> None:
    running, first, _ = exporter
    wait_for(lambda: len(running.loads_since(0.0)) >= 6, "three samples of both")
    points = running.loads_since(0.0)
    assert all(point.load.power == first.power and point.load.utilization == 0.5 for point in points)
    assert all(point.age_seconds >= 0.0 for point in points)
    newest = max(point.timestamp for point in points)
    later = wait_for(lambda: running.loads_since(newest), "a newer sample")
    assert all(point.timestamp > newest for point in later)


def test_it_tells_which_jobs_it_records(
    exporter: tuple[GpuExporter, ScriptedReader, ScriptedReader], tmp_path: Path
) -> None:
    running, *_ = exporter
    assert running.recorded_jobs() == frozenset()
    running.record_job("digits-1", tmp_path, gpu_uuids=["GPU-b"])
    assert running.recorded_jobs() == {"digits-1"}
    running.stop_recording("digits-1")
    assert running.recorded_jobs() == frozenset()
