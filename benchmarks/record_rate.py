"""How exactly a recorder keeps its pace with eight GPUs: rate, jitter, processor time, bytes an hour; and what 1 kHz gives.

`orch record` runs as a process of its own on the fake driver library, whose power sensor has something new every 50 ms.
The peer is the loop that people write: pynvml for power and temperature of each GPU, a CSV row, `time.sleep(0.01)`.
Latencies of the driver are assumed, not captured from hardware. With `--train` a training loop runs beside it, with and
without the recorder, and its step times are compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import interleave, parser, ratio, report, result, summary
from tests.support.fake_nvml import ASSUMED_LATENCY_US, UINT, FakeNvml

GPUS = 8
SENSOR_US = 50_000
ROOT = Path(__file__).parents[1]
PEER = ROOT / "benchmarks" / "peers" / "pynvml_loop.py"
TRAINING = ROOT / "benchmarks" / "workloads" / "cpu_steps.py"


def main() -> None:
    """Measure and report."""
    options = parser(__doc__ or "", pairs=3)
    options.add_argument("--seconds", type=float, default=4.0, help="length of each recording")
    options.add_argument(
        "--train", type=int, default=0, metavar="STEPS", help="steps of a training run beside the recorder"
    )
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="orch-bench-") as directory:
        fake = FakeNvml.create(Path(directory), gpus=GPUS)
        for gpu in fake:
            gpu.latency(
                {
                    call: ASSUMED_LATENCY_US[call]
                    for call in ("utilization", "memory", "temperature", "energy", "fields")
                }
            )
            gpu.field(186, 300_000, kind=UINT, period_us=SENSOR_US, wobble=1000)
        report(_measure(fake, Path(directory), arguments), arguments.json)


def _measure(fake: FakeNvml, directory: Path, arguments: Any) -> dict[str, Any]:
    details: dict[str, list[dict[str, Any]]] = {"ours": [], "pynvml_loop": []}

    def ours() -> float:
        details["ours"].append(_record(fake, directory, 100.0, arguments.seconds))
        return float(details["ours"][-1]["rate_hz"])

    def peer() -> float:
        details["pynvml_loop"].append(_peer(fake, directory, arguments.seconds))
        return float(details["pynvml_loop"][-1]["rate_hz"])

    found = interleave({"ours": ours, "pynvml_loop": peer}, arguments.pairs)
    fast = _record(fake, directory, 1000.0, arguments.seconds)
    mine = details["ours"][-arguments.pairs :]
    more = {"training": _training(fake, directory, arguments.train)} if arguments.train else {}
    return result(
        "record_rate",
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
        driver_latency_us={"assumed": True, **ASSUMED_LATENCY_US},
        **more,
    )


def _record(fake: FakeNvml, directory: Path, rate: float, seconds: float) -> dict[str, Any]:
    """One recording by `orch record`; processor time leaves out the start of the process."""
    command = [
        "record",
        "--csv",
        "--json",
        "--rate",
        f"{rate:g}",
        "--duration",
        f"{seconds:g}s",
        "-o",
        str(directory / "out"),
    ]
    code = "import sys; from orchestrator.cli.commands.gpu import record; from orchestrator.cli.registry import LazyCommands, Entry;"
    code += "sys.exit(LazyCommands((Entry('record', 'gpu', 'x'),))['record'].main(sys.argv[2:], standalone_mode=False))"
    environ = {**os.environ, **fake.environment(), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code, *command], env=environ, stdout=subprocess.PIPE, text=True)
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
        "cpu_percent_per_gpu": 100.0 * busy / GPUS,
        "mb_per_hour": size / seconds * 3600 / 1e6,
    }


def _peer(fake: FakeNvml, directory: Path, seconds: float) -> dict[str, Any]:
    path = directory / "peer.csv"
    environ = {**os.environ, **fake.environment()}
    process = subprocess.Popen([sys.executable, str(PEER), str(path), f"{seconds:g}"], env=environ)
    busy = _steady_cpu(process.pid, seconds)
    process.wait()
    rows = len(path.read_text().splitlines()) - 1
    return {"rate_hz": rows / seconds, "cpu_percent_per_gpu": 100.0 * busy / GPUS}


def _steady_cpu(pid: int, seconds: float) -> float:
    """Share of a core over the middle of a recording."""
    process = psutil.Process(pid)
    time.sleep(min(1.5, 0.3 * seconds))
    before, started = process.cpu_times(), time.perf_counter()
    time.sleep(0.5 * seconds)
    after = process.cpu_times()
    spent = (after.user + after.system) - (before.user + before.system)
    return float(spent / (time.perf_counter() - started))


def _training(fake: FakeNvml, directory: Path, steps: int) -> dict[str, Any]:
    """Step times of a training loop alone and beside a recorder at 100 Hz."""
    environ = {**os.environ, **fake.environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def alone() -> float:
        done = subprocess.run(
            [sys.executable, str(TRAINING), str(steps)], env=environ, capture_output=True, text=True, check=True
        )
        return float(done.stdout)

    def recorded() -> float:
        code = "import sys; from orchestrator.cli.registry import LazyCommands, Entry;"
        code += (
            "sys.exit(LazyCommands((Entry('record', 'gpu', 'x'),))['record'].main(sys.argv[1:], standalone_mode=False))"
        )
        command = [
            "--csv",
            "--rate",
            "100",
            "-o",
            str(directory / "train"),
            "--",
            sys.executable,
            str(TRAINING),
            str(steps),
        ]
        done = subprocess.run(
            [sys.executable, "-c", code, *command], env=environ, capture_output=True, text=True, check=True
        )
        for path in (directory / "train").iterdir():
            path.unlink()
        return float(done.stdout)

    found = interleave({"recorded": recorded, "alone": alone}, 10)
    return {
        "step_seconds_recorded": summary(found.values["recorded"]),
        "step_seconds_alone": summary(found.values["alone"]),
        "ratio": ratio(found.values["recorded"], found.values["alone"]),
    }


if __name__ == "__main__":
    main()
