"""`orch gpus` and `orch record` as a person uses them: with a daemon, without one, with a command, cut short."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api.client import Client
from orchestrator.api.errors import NotFoundError
from orchestrator.api.transport.endpoint import Endpoint
from orchestrator.api.views import FindingView, JobView, ProgressView, RankView
from orchestrator.cli.app import LazyCommands
from orchestrator.cli.commands import record as recording
from orchestrator.cli.console import Console
from orchestrator.cli.render import gpus as gpu_rows
from orchestrator.cli.render.gpus import COLUMNS, balance_line
from orchestrator.cli.render.table import render_table
from orchestrator.cli.session import guarded
from orchestrator.gpu.load import GpuLoad, balance
from orchestrator.gpu.recording.reading import read_recording
from orchestrator.gpu.row import GpuRow, gpu_row, read_once
from orchestrator.gpu.sample import GpuLostError, Throttle
from orchestrator.gpu.sampler import Health
from tests.support.fake_nvml import FakeNvml
from tests.support.stack import PATIENCE_SECONDS
from tests.unit.gpu.support import ScriptedReader, full_sample, gpu_info, wait_for

ROOT = Path(__file__).parents[3]
COMMANDS = LazyCommands()
Orch = Callable[..., "Outcome"]
MakeReader = Callable[[str], ScriptedReader]


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def orch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Orch:
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "140")
    for name in ("ORCH_ADDRESS", "ORCH_TOKEN", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> Outcome:
        capfd.readouterr()
        console = Console(os.environ)
        command = COMMANDS[arguments[0]]
        code = guarded(
            lambda: int(command.main(list(arguments[1:]), standalone_mode=False) or 0), console, as_json=False
        )
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


# ------------------------------------------------------------------------------------------------------------------ gpus


def test_gpus_without_a_daemon_reads_this_machine(orch: Orch, nvml: FakeNvml) -> None:
    nvml[1].reasons = 0x4
    outcome = orch("gpus")
    assert outcome.code == 0
    head, first, second = outcome.out.splitlines()
    assert head.split() == ["NODE", "GPU", "MODEL", "UTIL", "MEMORY", "POWER", "TEMP", "STATE", "UUID"]
    assert "NVIDIA H100 80GB HBM3" in first
    assert "50%" in first
    assert "10.0/80.0 GiB" in first
    assert "300/700 W" in first
    assert "55 C" in first
    assert "power_cap" in second


def test_gpus_json_has_every_key_of_every_gpu(orch: Orch, nvml: FakeNvml) -> None:
    document = json.loads(orch("gpus", "--json").out)
    assert document["problems"] == []
    rows = [GpuRow.from_json(row) for row in document["gpus"]]
    assert [row.gpu_uuid for row in rows] == [nvml.uuid(0), nvml.uuid(1)]
    assert {"gpu_uuid", "vendor", "model", "node", "utilization_ratio", "job_id", "rank"} <= set(document["gpus"][0])


def test_a_lost_gpu_is_listed_with_what_to_do(orch: Orch, nvml: FakeNvml) -> None:
    outcome = orch("gpus", "--simulate-gpus", "1")
    assert "simulated GPU" in outcome.out
    nvml.state.init_result = 18
    outcome = orch("gpus")
    assert "no GPU found" in outcome.out
    assert "NVIDIA GPUs cannot be read" in outcome.err


def test_one_reading_of_each_gpu_whatever_state_it_is_in(make_reader: MakeReader) -> None:
    fine, lost, hanging = (make_reader(name) for name in ("GPU-a", "GPU-b", "GPU-c"))
    lost.error = GpuLostError("gone")
    hanging.hang()
    rows = read_once([fine, lost, hanging], "n", deadline_seconds=3.0)
    assert [row.health for row in rows] == [Health.OK, Health.LOST, Health.STALE]
    assert rows[0].power_watts == 300.0
    assert rows[1].problem == "gone"
    assert "not answered" in (rows[2].problem or "")
    hanging.release()
    assert hanging.closed.wait(300)


def test_a_simulated_gpu_is_read_twice_for_its_rates() -> None:
    from orchestrator.gpu.drivers.simulated import open_simulated

    (row,) = read_once(open_simulated(1, "n", None), "n")
    assert row.utilization_ratio == 0.0
    assert row.energy_joules is not None
    assert row.energy_joules > 0.0


class FakeSession:
    """A session with a daemon that has one node and one job."""

    endpoint = None

    def __init__(self) -> None:
        self.console = Console({})
        self.view: dict[str, Any] | None = None
        self.findings: tuple[FindingView, ...] = ()

    def client(self) -> FakeSession:
        return self

    def gpus(self) -> Any:
        return Client(Endpoint(socket_path="/nowhere"), environ={}).gpus()

    def jobs(self, *, states: tuple[str, ...]) -> Any:
        assert "RUNNING" in states
        return type("Jobs", (), {"jobs": (self.job("digits"),)})

    def job(self, ref: str) -> JobView:
        assert ref == "digits"
        return JobView(
            id="digits-k3f9q2",
            name="digits",
            user="u",
            uid=1,
            queue="default",
            priority=50,
            state="RUNNING",
            reason="",
            submitted_at=0.0,
            gpus=(RankView(rank=1, node="node1", gpu_uuids=("GPU-a",)),),
            balance=self.view,
            findings=self.findings,
        )


def test_the_daemons_rows_are_taken_where_it_serves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    row = gpu_row(gpu_info(), "node7", full_sample())
    monkeypatch.setattr("orchestrator.api.transport.wire.call", lambda *_, **__: {"gpus": [row.to_json()]})
    seen = gpu_rows.gpu_summary(FakeSession(), lambda: pytest.fail("not read here"))  # type: ignore[arg-type]  # a fake
    assert (seen.rows, seen.daemon) == ((row,), True)
    assert seen.jobs[0].id == "digits-k3f9q2"


def test_the_gpus_of_one_job(monkeypatch: pytest.MonkeyPatch, orch: Orch) -> None:
    mine = replace(gpu_row(gpu_info(), "node1", full_sample()), job_id="digits-k3f9q2", rank=1)
    rows = [mine, replace(mine, job_id="other-aaaaaa", node="node2"), replace(mine, job_id=None, node="node3")]
    monkeypatch.setattr(
        "orchestrator.api.transport.wire.call", lambda *_, **__: {"gpus": [row.to_json() for row in rows]}
    )
    monkeypatch.setattr("orchestrator.cli.commands.gpu.Session", FakeSession)
    shown = orch("gpus", "--job", "digits")
    assert shown.code == 0, shown.err
    assert [name for name in ("node1", "node2", "node3") if name in shown.out] == ["node1"]
    rows.clear()
    assert "digits holds no GPU now; `orch report digits`" in orch("gpus", "--job", "digits").out
    done = orch("gpus", "--job", "digits", "--simulate-gpus", "2")
    assert done.code == 2
    assert "leave out --job or --simulate-gpus" in done.err


def test_what_is_wrong_with_a_gpu_is_in_its_state_column() -> None:
    rows = [
        gpu_row(gpu_info("GPU-a", 0), "n", None, health=Health.LOST),
        gpu_row(
            gpu_info("GPU-b", 1, partitioned=True),
            "n",
            full_sample().__class__(gpu_uuid="GPU-b", timestamp=1.0, monotonic=1.0),
        ),
        gpu_row(gpu_info("GPU-c", 2), "n", full_sample()),
    ]
    lines = render_table(Console({"COLUMNS": "200"}), COLUMNS, rows)
    assert "lost" in lines[1]
    assert "partitioned" in lines[2]
    assert Throttle.THERMAL in lines[3]


def test_a_jobs_balance_in_one_line() -> None:
    loads = {
        "g0": GpuLoad(utilization=1.0, memory=1e9, power=600.0),
        "g1": GpuLoad(utilization=1.0, memory=1e9, power=300.0),
        "g2": None,
    }
    text, band = balance_line(balance(loads).to_json())
    assert text == "poor: utilization CV 0%, power CV 33% (min/median 0.67), 1 of 3 GPUs silent"
    assert band == "poor"
    assert balance_line(None) == ("", "")
    assert balance_line({"gpus": 1, "silent": [], "band": None, "quantities": {}}) == ("", "")


def test_gpus_prints_the_jobs_balance_and_its_findings(orch: Orch, monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession()
    session.view = {
        "gpus": 2,
        "silent": [],
        "band": "poor",
        "quantities": {"power": {"cv": 0.33}},
    }
    session.findings = (FindingView(kind="rank_slow", rank=1, sentence="rank 1 is slow", advice="look at it"),)
    monkeypatch.setattr("orchestrator.api.transport.wire.call", lambda *_, **__: {"gpus": []})
    monkeypatch.setattr("orchestrator.cli.commands.gpu.Session", lambda: session)
    out = orch("gpus").out
    assert "digits-k3f9q2: balance poor: power CV 33%" in out
    assert "rank 1 is slow; look at it" in out


# ---------------------------------------------------------------------------------------------------------------- record


def test_record_runs_a_command_and_ends_with_its_code(orch: Orch, nvml: FakeNvml, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = (
        f"import pathlib, time; out = pathlib.Path({str(out)!r})\n"
        "while sum(len(path.read_text().splitlines()) for path in out.glob('*.csv')) <= 16: time.sleep(0.01)\n"
        "raise SystemExit(3)"
    )
    outcome = orch("record", "--rate", "100", "--csv", "-o", str(out), "--", sys.executable, "-c", code)
    assert outcome.code == 3
    (path,) = out.iterdir()
    rows = list(csv.reader(path.read_text().splitlines()))
    assert len(rows) > 15
    assert "requested 100 Hz" in outcome.err
    assert str(path) in outcome.err
    assert outcome.out == ""


def test_record_for_a_span_of_time_with_a_report_and_json(orch: Orch, nvml: FakeNvml, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = orch(
        "record", "--name", "lenet5", "--rate", "50", "--duration", "1s", "-o", str(out), "--report", "--json"
    )
    assert outcome.code == 0
    document = json.loads(outcome.out)
    single, multi = (Path(name) for name in document["files"])
    assert multi.name == single.stem + "_multi_gpu.json"
    assert document["gpus"][0]["samples"] >= 5  # of 50; a crowded machine misses some
    assert document["problem"] is None
    summary = (out / f"{single.stem}_summary.txt").read_text()
    assert summary.startswith("GPU Performance Summary\n")
    for line in (
        "Power (W): average 300.0, max 300.0, min 300.0",
        "Balance: CV = ",
        "requested 50 Hz",
    ):
        assert line in summary
    assert "GPU 1: " in summary
    assert (out / f"{single.stem}_plot.png").read_bytes().startswith(b"\x89PNG")
    assert len(read_recording(multi).by_gpu) == 2


def test_record_compares_with_an_earlier_recording(orch: Orch, nvml: FakeNvml, tmp_path: Path) -> None:
    first = json.loads(orch("record", "--duration", "1s", "--rate", "50", "-o", str(tmp_path / "a"), "--json").out)[
        "files"
    ][1]
    for gpu in nvml:
        gpu.power_mw = 600_000
    outcome = orch("record", "--duration", "1s", "--rate", "50", "-o", str(tmp_path / "b"), "--compare-with", first)
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("power (W)")]
    assert line.split()[2:6] == ["600", "1200", "+100.00", "%"]


def test_a_recorded_command_tells_its_epoch(orch: Orch, nvml: FakeNvml, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = (
        "import os, json, time\npath = os.environ['ORCH_TRAINING_METADATA']\n"
        "open(path + '.new', 'w').write(json.dumps({'epoch': 4, 'phase': 'training'}))\nos.replace(path + '.new', path)\n"
        f"import pathlib; out = pathlib.Path({str(out)!r})\n"
        "while not any('\"epoch\": 4' in path.read_text() for path in out.glob('*.json')): time.sleep(0.01)"
    )
    assert orch("record", "--rate", "50", "-o", str(out), "--", sys.executable, "-c", code).code == 0
    rows = json.loads(min(out.iterdir(), key=lambda path: len(path.name)).read_bytes())
    assert rows[-1]["training_metadata"] == {"epoch": 4, "phase": "training"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "5000"), "0.01 to 1000"),
        (("--columns", "colour", "--csv"), "unknown column colour"),
        (("--duration", "soon"), "not a duration"),
        (("--compare-with", "/nowhere.json"), "cannot compare"),
        (("--", "no-such-command-here"), "no such command"),
        (("--job", "x", "--", "true"), "exclude each other"),
    ],
)
def test_what_cannot_be_recorded_is_said_before_anything_starts(
    orch: Orch, nvml: FakeNvml, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    outcome = orch("record", "-o", str(tmp_path / "out"), *arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert not list((tmp_path / "out").glob("*"))


def test_a_machine_without_gpus_is_told_the_way_out(orch: Orch, nvml: FakeNvml, tmp_path: Path) -> None:
    nvml.state.init_result = 9
    outcome = orch("record", "--duration", "1s", "-o", str(tmp_path / "out"))
    assert outcome.code == 2
    assert "--simulate-gpus" in outcome.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_recording_in_order(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    code = (
        "import sys; from orchestrator.cli.app import LazyCommands\n"
        "command = LazyCommands()['record']\n"
        "sys.exit(command.main(sys.argv[1:], standalone_mode=False))"
    )
    fake = FakeNvml.create(tmp_path, gpus=2)
    arguments = ["--rate", "100", "-o", str(out)]
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **fake.environment()},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for(lambda: list(out.glob("gpu_stats_*.json")), "the files")
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert "requested 100 Hz" in err
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in out.glob("gpu_stats_*.json"))
    for path in out.iterdir():
        json.loads(path.read_bytes())


def test_sigterm_is_passed_on_to_the_command(orch: Orch, nvml: FakeNvml, tmp_path: Path) -> None:
    up = tmp_path / "up"

    def stop() -> None:
        wait_for(up.exists, "the command", 60)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    command = f"import pathlib, time; pathlib.Path({str(up)!r}).touch(); time.sleep(600)"
    outcome = orch("record", "-o", str(tmp_path / "out"), "--", sys.executable, "-c", command)
    stopper.join()
    assert outcome.code == 128 + signal.SIGTERM


def test_a_command_that_outlives_its_time_is_ended(orch: Orch, nvml: FakeNvml, tmp_path: Path) -> None:
    arguments = (
        "--duration",
        "0.5s",
        "-o",
        str(tmp_path / "out"),
        "--",
        sys.executable,
        "-c",
        "import time; time.sleep(60)",
    )
    assert orch("record", *arguments).code == 128 + signal.SIGTERM


@pytest.fixture
def rank_tree() -> Iterator[subprocess.Popen[bytes]]:
    code = (
        "import os, subprocess, sys, time\n"
        "for rank in range(3):\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], env={**os.environ, 'LOCAL_RANK': str(rank)})\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_ranks_are_spread_over_simulated_gpus_by_their_local_rank(rank_tree: subprocess.Popen[bytes]) -> None:
    def spread() -> Any:
        found = recording.ranks_below(rank_tree.pid, 2)
        return found if sum(len(pids) for pids in found.values()) == 3 else None

    found = wait_for(spread, "three ranks")
    assert {index: len(pids) for index, pids in found.items()} == {0: 2, 1: 1}
    assert rank_tree.pid not in {pid for pids in found.values() for pid in pids}


class OneJob:
    """A session with a daemon of one job, on GPUs that the test names; the job ends once ``over`` returns true."""

    def __init__(self, *ranks: RankView, over: Callable[[], bool] = lambda: False) -> None:
        self.console = Console({})
        self.over = over
        self.ranks = ranks

    def client(self) -> OneJob:
        return self

    def job(self, ref: str) -> JobView:
        state = "SUCCEEDED" if self.over() else "RUNNING"
        progress = ProgressView(epoch=2, step=70, phase="training")
        base = {
            "id": ref,
            "name": "d",
            "user": "u",
            "uid": 1,
            "queue": "q",
            "priority": 1,
            "reason": "",
            "submitted_at": 0.0,
        }
        return JobView(**base, state=state, gpus=self.ranks, progress=progress)  # type: ignore[arg-type]  # test's shorthand


def entries(out: Path) -> list[dict[str, Any]]:
    """Return the entries that have been recorded so far."""
    return [entry for path in out.glob("*.json") for entry in json.loads(path.read_bytes())]


def record_job(session: OneJob, out: Path, **changes: Any) -> int:
    request = recording.RecordRequest(job="digits-k3f9q2", rate=50.0, output=out, columns="power_w", **changes)
    return recording.run_recording(session, request, poll_seconds=0.05)  # type: ignore[arg-type]  # a fake


def test_a_jobs_gpus_are_recorded_until_it_ends(nvml: FakeNvml, tmp_path: Path) -> None:
    out = tmp_path / "out"
    session = OneJob(
        RankView(rank=0, node="n", gpu_uuids=(nvml.uuid(1),)),
        RankView(rank=1, node="m", gpu_uuids=("GPU-far",)),
        over=lambda: any("training_metadata" in entry for entry in entries(out)),
    )
    assert record_job(session, out) == 0
    assert len(list(out.iterdir())) == 1
    found = entries(out)
    assert {entry["gpu_uuid"] for entry in found} == {nvml.uuid(1)}, "what is on this machine"
    assert found[-1]["training_metadata"] == {"epoch": 2, "batch": 70, "phase": "training"}


def test_a_job_on_simulated_gpus_is_recorded_with_its_processes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    session = OneJob(
        RankView(rank=0, node="n", gpu_uuids=("simulated-abc-1",), pid=os.getpid()),
        over=lambda: any(entry.get("memory_used", 0) > 10 for entry in entries(out)),  # this process runs on it
    )
    assert record_job(session, out) == 0
    assert len(list(out.iterdir())) == 1
    assert {entry["gpu_uuid"] for entry in entries(out)} == {"simulated-abc-1"}


def test_a_job_that_is_not_on_this_machine(nvml: FakeNvml, tmp_path: Path) -> None:
    session = OneJob(RankView(rank=0, node="far", gpu_uuids=("GPU-far",)))
    with pytest.raises(NotFoundError, match="on this machine"):
        record_job(session, tmp_path / "out")
