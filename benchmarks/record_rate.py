"""Measures how exactly a recorder keeps its rate with eight GPUs: rate, jitter, processor time, bytes an hour; and at 1 kHz.

`orch record` runs as a process of its own on the fake driver library, whose power sensor has a new value every 50 ms.
The peer is the loop that people write: pynvml for power and temperature of each GPU, a CSV row, `time.sleep(0.01)`.
The library's calls take as long as those of an H100's driver; with --real it is the machine's own. With `--train` a training loop runs beside it, with and
without the recorder, and its step times are compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import cpu_seconds, interleave, machine, parser, report, result, summary, wait_for
from tests.support.fake_nvml import CALL_US, FIELD_US, LATENCY_FROM, UINT, FakeNvml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

GPUS = 8
SENSOR_US = 50_000
ROOT = Path(__file__).parents[1]
PEER = ROOT / "benchmarks" / "peers" / "pynvml_loop.py"
RECORD = [sys.executable, "-m", "orchestrator.cli.main", "record"]
TRAINING = ROOT / "benchmarks" / "workloads" / "cpu_steps.py"


def main() -> None:
    """Measure and report."""
    options = parser(__doc__ or "", pairs=3)
    options.add_argument("--seconds", type=float, default=4.0, help="length of each recording")
    options.add_argument(
        "--train",
        type=int,
        default=0,
        metavar="STEPS",
        help="steps of each block of a training run beside the recorder",
    )
    options.add_argument("--train-blocks", type=int, default=20, help="blocks with the recorder, and as many without")
    options.add_argument("--real", action="store_true", help="record the machine's own GPUs, not the test driver's")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="orch-bench-") as directory:
        if arguments.real:
            report(_measure(machines_own(), Path(directory), arguments), arguments.json)
            return
        fake = FakeNvml.create(Path(directory), gpus=GPUS)
        for gpu in fake:
            gpu.take_time()
            gpu.field(186, 300_000, kind=UINT, period_us=SENSOR_US, wobble=1000)
        driver = Driver(fake.environment(), GPUS, LATENCY_US)
        report(_measure(driver, Path(directory), arguments), arguments.json)


LATENCY_US = {"from": LATENCY_FROM, "calls": dict(CALL_US), "fields": {str(k): v for k, v in FIELD_US.items()}}


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver library that both contenders read."""

    environment: Mapping[str, str]
    gpus: int
    latency_us: Mapping[str, Any]


def machines_own() -> Driver:
    """Return the driver of this machine, with all its NVIDIA GPUs."""
    return Driver({}, len(machine().get("gpus", ())), {"from": "the machine's own driver"})


def _measure(driver: Driver, directory: Path, arguments: Any) -> dict[str, Any]:
    details: dict[str, list[dict[str, Any]]] = {"ours": [], "pynvml_loop": []}

    def ours() -> float:
        details["ours"].append(_record(driver, directory, 100.0, arguments.seconds))
        return float(details["ours"][-1]["rate_hz"])

    def peer() -> float:
        details["pynvml_loop"].append(_peer(driver, directory, arguments.seconds))
        return float(details["pynvml_loop"][-1]["rate_hz"])

    found = interleave({"ours": ours, "pynvml_loop": peer}, arguments.pairs)
    fast = _record(driver, directory, 1000.0, arguments.seconds)
    mine = details["ours"][-arguments.pairs :]
    more = (
        {"training": _training(driver, directory, arguments.train, arguments.train_blocks)} if arguments.train else {}
    )
    return result(
        "record_rate" if driver.environment else "record_rate_gpu",
        "Hz",
        "higher",
        found.values["ours"],
        {"pynvml_loop": found.values["pynvml_loop"]},
        jitter_p99_seconds=summary([one["jitter_p99"] for one in mine]),
        cpu_percent_per_gpu=summary([one["cpu_percent_per_gpu"] for one in mine]),
        peer_cpu_percent_per_gpu=summary(
            [one["cpu_percent_per_gpu"] for one in details["pynvml_loop"][-arguments.pairs :]]
        ),
        missed_ticks=[one["missed"] for one in mine],
        distinct_values_hz=summary([one["distinct_hz"] for one in mine]),
        csv_mb_per_hour=summary([one["mb_per_hour"] for one in mine]),
        at_1_khz=fast,
        driver_latency_us=dict(driver.latency_us),
        **more,
    )


def _record(driver: Driver, directory: Path, rate: float, seconds: float) -> dict[str, Any]:
    """Make one recording with `orch record`; processor time leaves out the start of the process."""
    command = [
        "--csv",
        "--json",
        "--rate",
        f"{rate:g}",
        "--duration",
        f"{seconds:g}s",
        "-o",
        str(directory / "out"),
    ]
    environ = {**os.environ, **driver.environment, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*RECORD, *command], env=environ, stdout=subprocess.PIPE, text=True)
    busy = _steady_cpu(process.pid, seconds)
    out, _ = process.communicate()
    found = json.loads(out)
    size = Path(found["files"][0]).stat().st_size
    rates = [gpu["achieved_rate_hz"] for gpu in found["gpus"]]
    Path(found["files"][0]).unlink()
    return {
        "rate_hz": min(rates),
        "jitter_p99": found["jitter_seconds"]["p99"],
        "jitter_max": found["jitter_seconds"]["max"],
        "missed": found["missed_ticks"],
        "distinct_hz": min(gpu["distinct_value_rate_hz"] for gpu in found["gpus"]),
        "cpu_percent_per_gpu": 100.0 * busy / driver.gpus,
        "mb_per_hour": size / seconds * 3600 / 1e6,
    }


def _peer(driver: Driver, directory: Path, seconds: float) -> dict[str, Any]:
    path = directory / "peer.csv"
    environ = {**os.environ, **driver.environment}
    process = subprocess.Popen([sys.executable, str(PEER), str(path), f"{seconds:g}"], env=environ)
    busy = _steady_cpu(process.pid, seconds)
    process.wait()
    rows = len(path.read_text().splitlines()) - 1
    return {"rate_hz": rows / seconds, "cpu_percent_per_gpu": 100.0 * busy / driver.gpus}


def _steady_cpu(pid: int, seconds: float) -> float:
    """Return the share of a core over the middle of a recording."""
    time.sleep(min(1.5, 0.3 * seconds))
    before, started = cpu_seconds(pid), time.perf_counter()
    time.sleep(0.5 * seconds)
    return (cpu_seconds(pid) - before) / (time.perf_counter() - started)


def _training(driver: Driver, directory: Path, steps: int, rounds: int) -> dict[str, Any]:
    """Return step times of one training loop, with a recorder at 100 Hz beside it and with that recorder stopped.

    Both use the same two processes: two starts of one program differ by far more than a recorder changes.
    """
    environ = {**os.environ, **driver.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with _running([sys.executable, str(TRAINING)], environ) as training:
        assert training.stdin is not None
        assert training.stdout is not None
        training.stdout.readline()
        output = directory / "train"
        recording = [*RECORD, "--csv", "--rate", "100", "-o", str(output)]
        with _running(recording, environ) as recorder:
            wait_for("the recording", lambda: any(path.stat().st_size > 10_000 for path in output.glob("*.csv")), 60)

            def block(number: signal.Signals) -> float:
                recorder.send_signal(number)
                assert training.stdin is not None
                assert training.stdout is not None
                training.stdin.write(f"{steps}\n")
                training.stdin.flush()
                return float(training.stdout.readline())

            try:
                found = interleave(
                    {"recorded": lambda: block(signal.SIGCONT), "alone": lambda: block(signal.SIGSTOP)}, rounds
                )
            finally:
                recorder.send_signal(signal.SIGCONT)
    recorded, alone = found.values["recorded"], found.values["alone"]
    return {
        "step_seconds_recorded": summary(recorded),
        "step_seconds_alone": summary(alone),
        "ratio_of_neighbours": summary([one / other for one, other in zip(recorded, alone, strict=True)]),
    }


@contextlib.contextmanager
def _running(command: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process; terminate it when the context ends."""
    process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)


if __name__ == "__main__":
    main()
