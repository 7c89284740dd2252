"""The exporter as a scraper sees it: catalogued names, no values of GPUs that do not answer, closed to strangers."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.gpu.drivers.nvidia import open_nvidia
from orchestrator.gpu.exporter import (
    FAMILIES,
    MAX_HEAD_BYTES,
    ExporterSettings,
    GpuExporter,
    HttpSettings,
)
from orchestrator.gpu.recording.job_record import read_job_telemetry
from orchestrator.gpu.sample import GpuInfo, GpuLostError, Sample
from orchestrator.gpu.sampler import Health, Pace
from tests.support import fake_nvml
from tests.support.fake_nvml import FakeNvml
from tests.unit.gpu.support import ScriptedReader, full_sample, gpu_info, sample, wait_for

MakeReader = Callable[[str], ScriptedReader]
QUICK = Pace(full_seconds=0.05, retry_seconds=(0.02,))
FAST = ExporterSettings(rate=50.0, pace=QUICK)


@pytest.fixture
def exporter(make_reader: MakeReader) -> Iterator[tuple[GpuExporter, ScriptedReader, ScriptedReader]]:
    first, second = make_reader("GPU-a"), make_reader("GPU-b")
    settings = ExporterSettings(rate=50.0, pace=QUICK, stale_after=0.5)
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
    return f'orch_exporter_up{{gpu="0",gpu_uuid="{uuid}",node="node1"}} {value}.0'


def test_it_serves_samples_in_the_text_format(exporter: tuple[GpuExporter, ScriptedReader, ScriptedReader]) -> None:
    running, first, _ = exporter
    wait_for(has(running, 'orch_gpu_power_watts{gpu_uuid="GPU-a"} 300.0'), "the first sample")
    first.power = 444.0
    wait_for(has(running, 'orch_gpu_power_watts{gpu_uuid="GPU-a"} 444.0'), "the new value")
    assert up("GPU-b", 1) in scrape(running.url)
    with urllib.request.urlopen(running.url, timeout=300) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_a_request_never_asks_the_driver(nvml: FakeNvml) -> None:
    readers = open_nvidia()
    with GpuExporter(readers, "n", ExporterSettings(rate=0.01)) as running:
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
        lambda: 'orch_exporter_read_errors_total{gpu_uuid="GPU-a"} 3.0' in scrape(running.url), "errors being counted"
    )


def test_xid_events_of_a_real_driver_library_arrive(nvml: FakeNvml) -> None:
    readers = open_nvidia()
    with GpuExporter(readers, "n", FAST) as running:
        wait_for(lambda: readers[0]._xids and readers[0]._xids.wait_until_armed(0), "the watch")
        nvml[0].xid(79)
        line = f'orch_gpu_xid_errors_total{{gpu_uuid="{nvml.uuid(0)}",xid="79"}} 1.0'
        wait_for(has(running, line), "the event")
        nvml[0].error = fake_nvml.GPU_IS_LOST
        wait_for(
            lambda: f'orch_exporter_up{{gpu="0",gpu_uuid="{nvml.uuid(0)}",node="n"}} 0.0' in scrape(running.url),
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
        settings = ExporterSettings(http=HttpSettings(port=taken.getsockname()[1]))
        with pytest.raises(OSError, match="in use"):
            GpuExporter([make_reader("GPU-a")], "n", settings).start()


def test_the_first_free_port_of_a_range_is_taken(make_reader: MakeReader) -> None:
    first, taken = two_ports_in_a_row()
    with taken:
        http = HttpSettings(port=first, last_port=first + 1)
        with GpuExporter([make_reader("GPU-a")], "n", ExporterSettings(http=http)) as running:
            assert running.url == f"http://127.0.0.1:{first + 1}/metrics"
            with pytest.raises(OSError, match="ORCH_EXPORTER_PORTS"):
                GpuExporter([make_reader("GPU-b")], "n", ExporterSettings(http=http)).start()


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


def test_the_token_is_demanded_for_metrics_and_not_for_health(make_reader: MakeReader) -> None:
    settings = ExporterSettings(http=HttpSettings(token="secret"))
    with GpuExporter([make_reader("GPU-a")], "n", settings) as running:
        for token in (None, "wrong", "secre"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                scrape(running.url, token=token)
            assert refused.value.code == 401
            assert refused.value.headers["WWW-Authenticate"] == "Bearer"
            refused.value.close()
        assert "orch_exporter_up" in scrape(running.url, token="secret")
        assert scrape(running.url.replace("/metrics", "/healthz")) == "ok\n"


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Return a certificate of this machine and its key."""
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
    return certificate, key


def test_tls(make_reader: MakeReader, certificate: tuple[Path, Path]) -> None:
    settings = ExporterSettings(http=HttpSettings(tls_certificate=certificate[0], tls_key=certificate[1]))
    with GpuExporter([make_reader("GPU-a")], "n", settings) as running:
        assert running.url.startswith("https://")
        assert "orch_exporter_up" in scrape(running.url, context=ssl.create_default_context(cafile=str(certificate[0])))


@pytest.fixture
def connection(make_reader: MakeReader) -> Iterator[http.client.HTTPConnection]:
    with GpuExporter([make_reader("GPU-a")], "n", FAST) as running:
        client = http.client.HTTPConnection(*address_of(running), timeout=300)
        yield client
        client.close()


def address_of(running: GpuExporter) -> tuple[str, int]:
    address = urlsplit(running.url)
    return address.hostname or "", address.port or 0


def until_closed(plain: socket.socket) -> bytes:
    chunks = []
    with contextlib.suppress(ConnectionResetError):
        while chunk := plain.recv(65536):
            chunks.append(chunk)
    return b"".join(chunks)


def raw(client: http.client.HTTPConnection, *pieces: bytes) -> bytes:
    with socket.create_connection((client.host, client.port), timeout=300) as plain:
        for piece in pieces:
            plain.sendall(piece)
        return until_closed(plain)


@pytest.mark.parametrize("request_head", [b"hello\r\n\r\n", b"GET /metrics HTTP/2\r\n\r\n", b"\0\xff\r\n\r\n"])
def test_what_is_not_http_is_refused_and_closed(connection: http.client.HTTPConnection, request_head: bytes) -> None:
    answer = raw(connection, request_head)
    assert b"400" in answer
    assert b"orch_exporter_up" not in answer


def test_an_endless_request_is_cut_off(connection: http.client.HTTPConnection) -> None:
    head = b"GET /metrics HTTP/1.1\r\nX: " + b"a" * MAX_HEAD_BYTES
    assert b" 431 " in raw(connection, head + b"a" * 1000)
    many = b"GET /metrics HTTP/1.1\r\n" + b"X: a\r\n" * (MAX_HEAD_BYTES // 5)
    assert b" 200 " not in raw(connection, many)


@pytest.mark.parametrize("sent", [b"", b"GET /slow", b"GET /metrics HTTP/1.1\r\nX: "])
def test_a_connection_ends_however_slow_its_client_is(make_reader: MakeReader, sent: bytes) -> None:
    settings = HttpSettings(request_seconds=0.2)
    with GpuExporter([make_reader("GPU-a")], "n", replace(FAST, http=settings)) as running:
        with socket.create_connection(address_of(running), timeout=300) as plain:
            plain.sendall(sent)
            until_closed(plain)
        assert scrape(running.url)


def test_more_clients_than_connections_do_not_keep_a_scrape_waiting(make_reader: MakeReader) -> None:
    settings = HttpSettings(request_seconds=3600.0, max_connections=4)
    with (
        GpuExporter([make_reader("GPU-a")], "n", replace(FAST, http=settings)) as running,
        contextlib.ExitStack() as idle,
    ):
        sockets = [idle.enter_context(socket.create_connection(address_of(running), timeout=300)) for _ in range(20)]
        assert "orch_exporter_up" in scrape(running.url)
        for plain in sockets[:10]:
            assert until_closed(plain) == b"", "the oldest ones gave way"
        threads = [one for one in threading.enumerate() if "process_request_thread" in one.name]
        assert len(threads) <= 10, "as many as there may be connections, and those that are ending"


def test_a_client_that_delays_its_tls_handshake_delays_no_other(
    make_reader: MakeReader, certificate: tuple[Path, Path]
) -> None:
    http_settings = HttpSettings(tls_certificate=certificate[0], tls_key=certificate[1], request_seconds=3600.0)
    with (
        GpuExporter([make_reader("GPU-a")], "n", replace(FAST, http=http_settings)) as running,
        socket.create_connection(address_of(running), timeout=300),
    ):
        trusted = ssl.create_default_context(cafile=str(certificate[0]))
        assert "orch_exporter_up" in scrape(running.url, context=trusted)


def test_the_sampler_goes_on_under_clients_that_read_nothing(make_reader: MakeReader) -> None:
    reader = make_reader("GPU-a")
    with GpuExporter([reader], "n", FAST) as running, contextlib.ExitStack() as idle:
        for _ in range(50):
            plain = idle.enter_context(socket.create_connection(address_of(running), timeout=300))
            with contextlib.suppress(ConnectionError):
                plain.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * 100)
        before = reader.reads
        wait_for(lambda: reader.reads > before + 10, "more readings")


def test_the_load_is_that_of_the_seconds_that_are_asked_for(
    exporter: tuple[GpuExporter, ScriptedReader, ScriptedReader],
) -> None:
    running, first, _ = exporter
    wait_for(lambda: None not in running.loads(60.0), "a sample of both")
    assert [load and (load.power, load.utilization) for load in running.loads(60.0)] == [(first.power, 0.5)] * 2
    assert running.loads(0.0) == (None, None)


def test_it_tells_which_jobs_it_records(
    exporter: tuple[GpuExporter, ScriptedReader, ScriptedReader], tmp_path: Path
) -> None:
    running, *_ = exporter
    assert running.recorded_jobs() == frozenset()
    running.record_job("digits-1", tmp_path, gpu_uuids=["GPU-b"])
    assert running.recorded_jobs() == {"digits-1"}
    running.stop_recording("digits-1")
    assert running.recorded_jobs() == frozenset()


# ------------------------------------------------------------------------------------------------------- the page


def page(*values: Sample | None, info: GpuInfo | None = None, processes: bool = True) -> str:
    """Return the page of GPUs with these samples; None is a GPU that does not answer."""
    readers = [ScriptedReader(f"GPU-{letter}") for letter in "abcdefgh"[: len(values)]]
    for reader in readers:
        reader.info = info or reader.info
    exporter = GpuExporter(readers, "node1", ExporterSettings(processes=processes))
    for gpu, value in zip(exporter.gpus, values, strict=True):
        gpu.sampler.latest = None if value is None else replace(value, monotonic=time.monotonic())
    return generate_latest(exporter.registry).decode()


def test_every_gpu_metric_of_the_catalogue_is_exported_with_its_type_labels_and_help() -> None:
    by_name = {metric.name: metric for metric in FAMILIES}
    assert {metric.owner for metric in FAMILIES} == {"gpu"}
    families = list(text_string_to_metric_families(page(full_sample())))
    for family in families:
        metric = by_name.get(family.name) or by_name[f"{family.name}_total"]
        assert (family.type, family.documentation) == (metric.type, metric.help)
        for row in family.samples:
            assert set(row.labels) == set(metric.labels)
    assert len(families) == len(FAMILIES)


def test_values_in_base_units() -> None:
    lines = page(full_sample()).splitlines()
    for line in (
        (
            'orch_gpu_info{driver_version="580.65.06",gpu="0",gpu_uuid="GPU-a",model="NVIDIA H100",node="node1",'
            'pci_bus_id="0000:01:00.0",vendor="nvidia"} 1.0'
        ),
        'orch_gpu_utilization_ratio{gpu_uuid="GPU-a"} 0.5',
        'orch_gpu_power_watts{gpu_uuid="GPU-a"} 300.5',
        'orch_gpu_pcie_transmit_bytes_total{gpu_uuid="GPU-a"} 9.007199254740992e+15',
        'orch_gpu_temperature_celsius{gpu_uuid="GPU-a",sensor="memory"} 62.0',
        'orch_gpu_throttle_active{gpu_uuid="GPU-a",reason="thermal"} 1.0',
        'orch_gpu_throttle_active{gpu_uuid="GPU-a",reason="power_cap"} 0.0',
        'orch_gpu_xid_errors_total{gpu_uuid="GPU-a",xid="79"} 2.0',
        'orch_gpu_process_memory_bytes{gpu_uuid="GPU-a",pid="4711"} 5.0',
        'orch_exporter_up{gpu="0",gpu_uuid="GPU-a",node="node1"} 1.0',
    ):
        assert line in lines


def test_processes_have_a_series_only_when_asked_for() -> None:
    assert "orch_gpu_process_memory_bytes" not in page(full_sample(), processes=False)


def test_what_is_absent_has_no_line() -> None:
    text = page(sample(power_watts=300.0))
    assert "orch_gpu_power_watts{" in text
    for name in ("utilization", "temperature", "energy", "xid", "ecc", "fan"):
        assert f"orch_gpu_{name}" not in text
    sent = [line for line in page(full_sample()).splitlines() if line.startswith("orch_gpu_nvlink_transmit")]
    assert not any('link="1"' in line for line in sent)


def test_a_gpu_that_is_down_leaves_only_the_exporters_own_series() -> None:
    names = {line.split()[2] for line in page(None).splitlines() if line.startswith("# TYPE")}
    assert names == {"orch_exporter_read_errors_total", "orch_exporter_up"}


def test_families_of_several_gpus_stand_together() -> None:
    seen: list[str] = []
    for line in page(*[sample(power_watts=1.0)] * 3).splitlines():
        name = line.split()[2] if line.startswith("#") else line.partition("{")[0]
        if not seen or seen[-1] != name:
            seen.append(name)
    assert len(seen) == len(set(seen)), "a family's lines must not be scattered"


def test_labels_are_escaped() -> None:
    text = page(sample(), info=gpu_info(model='weird "GPU"\\'))
    rows = [row for family in text_string_to_metric_families(text) for row in family.samples]
    (identity,) = [row for row in rows if row.name == "orch_gpu_info"]
    assert identity.labels["model"] == 'weird "GPU"\\'
