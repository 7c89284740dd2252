"""Every rule, run by promtool: alerts that fire, alerts that do not, and a healthy day without any alert.

A scenario states the series that Prometheus would have and every alert that must fire at a time; all other alerts must
not fire then, so each scenario also tests every alert it does not name. Annotations are left out here (promtool compares
them word by word); that they only use labels which their alert carries is asserted separately.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dashboards import rules
from orchestrator.core.states import JobState
from orchestrator.gpu.load import GpuLoad, balance, mean_load
from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing: .ci/install-test-tools")

STEP = 15
Series = dict[str, str]
Labels = dict[str, str]


def name(metric: str, **labels: str) -> str:
    return metric + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def flat(value: float, samples: int = 120) -> str:
    return " ".join([f"{value:g}"] * samples) if value < 0 else f"{value:g}x{samples}"


def steps(*parts: tuple[str, int]) -> str:
    """Return the values part by part; `_` for no sample, `stale` for a series that has ended."""
    return " ".join(f"{value}x{count - 1}" if value != "stale" else "stale" for value, count in parts if count)


def healthy(samples: int = 120) -> Series:
    """Return the series of a daemon and an exporter that are up, and nothing else."""
    return {
        name("up", job="orch-daemon", instance="127.0.0.1:9476"): flat(1, samples),
        name("up", job="orch-gpu", instance="n0:9477", node="n0"): flat(1, samples),
        name("orch_disk_free_bytes", job="orch-daemon", instance="d", node="n0", path="/o"): flat(9e11, samples),
        name("orch_disk_size_bytes", job="orch-daemon", instance="d", node="n0", path="/o"): flat(1e12, samples),
        name("orch_store_commit_failures_total", job="orch-daemon", instance="d"): flat(0, samples),
        name("orch_daemon_loop_lag_seconds", job="orch-daemon", instance="d"): flat(0.001, samples),
        name("orch_nodes", job="orch-daemon", instance="d", state="unreachable"): flat(0, samples),
        name("orch_gpus", job="orch-daemon", instance="d", node="n0", state="idle"): flat(1, samples),
    }


def gpu(number: int, utilization: str, power: str, *, alive: str = flat(1), memory: str = flat(4e10)) -> Series:
    who = {"job": "orch-gpu", "instance": f"n0:{9477 + number}", "gpu_uuid": f"g{number}"}
    return {
        name("orch_gpu_info", **who, gpu=str(number), node="n0", model="H100"): alive,
        name("orch_gpu_utilization_ratio", **who): utilization,
        name("orch_gpu_power_watts", **who): power,
        name("orch_gpu_memory_used_bytes", **who): memory,
    }


def holds(job_id: str, numbers: list[int], *, state: str = "RUNNING", samples: int = 120) -> Series:
    who = {"job": "orch-daemon", "instance": "d", "job_id": job_id}
    series = {
        name("orch_job_info", **who, name="digits", user="ada", queue="default"): flat(1, samples),
        name("orch_job_gpus", **who): flat(len(numbers), samples),
        name("orch_job_hang_suspected", **who): flat(0, samples),
    }
    for other in JobState:
        series[name("orch_job_state", **who, state=other)] = flat(float(other == state), samples)
    for rank, number in enumerate(numbers):
        series[name("orch_job_gpu", **who, gpu_uuid=f"g{number}", rank=str(rank))] = flat(1, samples)
    return series


def job(job_id: str, utilization: list[float], power: list[float], *, first: int = 0, state: str = "RUNNING") -> Series:
    """Return the series of a job on GPUs of its own with these constant loads."""
    series = holds(job_id, [first + i for i in range(len(utilization))], state=state)
    for i, (load, watts) in enumerate(zip(utilization, power, strict=True)):
        series |= gpu(first + i, flat(load), flat(watts))
    loads = [GpuLoad(utilization=u, memory=4e10, power=p) for u, p in zip(utilization, power, strict=True)]
    return series | balances(job_id, [loads] * 120)


def balances(job_id: str, moments: Sequence[Sequence[GpuLoad]]) -> Series:
    """Return the series of a job's balance, as the daemon computes it from its GPUs' loads at each moment."""
    rows: dict[tuple[str, str], list[str]] = {}
    for place, loads in enumerate(moments):
        for spread in balance({str(number): load for number, load in enumerate(loads)}).spreads:
            for metric, value in (("cv", spread.cv), ("min_per_median", spread.min_per_median)):
                if value is not None:
                    rows.setdefault((metric, spread.quantity), ["_"] * len(moments))[place] = f"{value:.4f}"
    series: Series = {}
    for (metric, quantity), values in rows.items():
        series |= daemon(f"orch_job_gpu_balance_{metric}", " ".join(values), job_id=job_id, quantity=quantity)
    return series


def daemon(metric: str, values: str, **labels: str) -> Series:
    return {name(metric, job="orch-daemon", instance="d", **labels): values}


def of_gpu(metric: str, values: str, **labels: str) -> Series:
    return {name(metric, job="orch-gpu", instance="n0:9477", **labels): values}


@dataclass(frozen=True)
class Scenario:
    title: str
    series: Series
    fires: dict[str, list[Labels]] = field(default_factory=dict)
    at: str = "20m"
    also_at: dict[str, dict[str, list[Labels]]] = field(default_factory=dict)
    values: dict[str, list[tuple[str, float]]] = field(default_factory=dict)


def imbalance(job_id: str, *quantities: str) -> list[Labels]:
    return [{"job_id": job_id, "quantity": quantity} for quantity in quantities]


G0 = {"gpu_uuid": "g0", "gpu": "0", "node": "n0"}
TWO = job("a", [0.9, 0.9], [500, 500])
FULL = GpuLoad(utilization=1.0, memory=4e10, power=500)
DIPS = [*[1.0] * 20, *[0.1] * 8, *[1.0] * 20, *[0.1] * 40, *[1.0] * 4, *[0.1] * 28]

SCENARIOS = [
    Scenario("healthy and idle", healthy()),
    Scenario("balanced", job("a", [0.9] * 4, [500] * 4)),
    Scenario(
        "one of four idle",
        job("a", [1, 1, 1, 0], [700, 700, 700, 70]),
        {
            "OrchJobImbalance": imbalance("a", "utilization", "power"),
            "OrchGpuStraggler": imbalance("a", "utilization", "power"),
        },
    ),
    Scenario(
        "ranks that wait spin at full utilization: only power shows it",
        job("a", [1, 1, 1, 1], [700, 300, 300, 300]),
        {"OrchJobImbalance": imbalance("a", "power")},
    ),
    Scenario("fair, not poor", job("a", [0.9, 0.7], [500, 400])),
    Scenario("mean near zero is no imbalance", job("a", [0, 0.02], [70, 110])),
    Scenario(
        "all idle, one that only pauses, one that drains, and one with a GPU at work",
        job("a", [0, 0], [70, 70])
        | {
            **holds("b", [10]),
            **gpu(10, steps(("0", 30), ("0.9", 90)), flat(400)),
        }
        | job("c", [0], [70], first=20, state="DRAINING")
        | job("e", [0.01, 0.03], [70, 70], first=30),
        {"OrchJobGpusIdle": [{"job_id": "a"}]},
        also_at={"9m": {}},
    ),
    Scenario("one GPU has no balance", job("a", [0.9], [500])),
    Scenario(
        "64 GPUs dilute the CV: the least share speaks",
        job("a", [1] * 63 + [0], [700] * 63 + [70]),
        {"OrchGpuStraggler": imbalance("a", "utilization", "power")},
    ),
    Scenario("64 balanced GPUs", job("a", [0.95] * 64, [650] * 64)),
    Scenario("a job that recovers is not imbalanced", job("a", [1, 0], [700, 70], state="RECOVERING")),
    Scenario("a job that starts is not imbalanced", job("a", [1, 0], [700, 70], state="STARTING")),
    Scenario("a job without GPUs", holds("a", [])),
    Scenario("memory may differ", TWO | daemon("orch_job_gpu_balance_cv", flat(0.75), job_id="a", quantity="memory")),
    Scenario(
        "short dip of a rank is forgiven, and a short recovery does not silence",
        holds("a", [0, 1])
        | gpu(0, flat(1), flat(500))
        | gpu(1, flat(1), flat(500))
        | balances("a", [(FULL, GpuLoad(utilization=busy, memory=4e10, power=500)) for busy in DIPS]),
        at="8m",
        also_at={
            "21m": {
                "OrchJobImbalance": imbalance("a", "utilization"),
                "OrchGpuStraggler": imbalance("a", "utilization"),
            },
            "23m30s": {
                "OrchJobImbalance": imbalance("a", "utilization"),
                "OrchGpuStraggler": imbalance("a", "utilization"),
            },
        },
    ),
    Scenario(
        "slow rank of two",
        TWO
        | daemon("orch_job_rank_step_seconds", flat(0.1), job_id="a", rank="0")
        | daemon("orch_job_rank_step_seconds", flat(0.17), job_id="a", rank="1"),
        {"OrchRankStraggler": [{"job_id": "a", "rank": "1"}]},
    ),
    Scenario(
        "slow rank of 64",
        job("a", [1] * 64, [300] * 63 + [420])
        | {
            name("orch_job_rank_step_seconds", job="orch-daemon", instance="d", job_id="a", rank=str(i)): flat(
                0.3 if i == 63 else 0.1
            )
            for i in range(64)
        },
        {"OrchRankStraggler": [{"job_id": "a", "rank": "63"}]},
    ),
    Scenario(
        "ranks alike, and a rank alone",
        TWO
        | daemon("orch_job_rank_step_seconds", flat(0.1), job_id="a", rank="0")
        | daemon("orch_job_rank_step_seconds", flat(0.14), job_id="a", rank="1")
        | holds("b", [])
        | daemon("orch_job_rank_step_seconds", flat(9), job_id="b", rank="0"),
    ),
    Scenario(
        "a GPU falls silent",
        holds("a", [0, 1])
        | gpu(1, flat(0.9), flat(500))
        | gpu(
            0,
            steps(("0.9", 20), ("stale", 1)),
            steps(("500", 20), ("stale", 1)),
            alive=steps(("1", 20), ("stale", 1)),
            memory=steps(("4e10", 20), ("stale", 1)),
        ),
        {"OrchGpuSilent": [{"job_id": "a", "rank": "0", **G0}]},
        also_at={"6m": {}},
    ),
    Scenario(
        "a GPU that was never seen",
        holds("a", [0, 1]) | gpu(1, flat(0.9), flat(500)),
        {"OrchGpuSilent": [{"job_id": "a", "rank": "0", "gpu_uuid": "g0"}]},
    ),
    Scenario(
        "a GPU without utilization (MIG) is not silent",
        holds("a", [0])
        | of_gpu("orch_gpu_info", flat(1), gpu_uuid="g0", gpu="0", node="n0", model="MIG 1g.10gb")
        | of_gpu("orch_gpu_memory_used_bytes", flat(4e9), gpu_uuid="g0"),
    ),
    Scenario(
        "a GPU that got another number breaks no join",
        TWO
        | of_gpu("orch_gpu_info", flat(1), gpu_uuid="g9", gpu="7", node="n0", model="H100")
        | {
            name(
                "orch_gpu_info", job="orch-gpu", instance="old:1", gpu_uuid="g9", gpu="6", node="n0", model="H100"
            ): flat(1)
        }
        | of_gpu("orch_gpu_ecc_errors_total", flat(1), gpu_uuid="g0", severity="uncorrected", scope="volatile"),
        {"OrchGpuEccUncorrected": [G0]},
        values={
            "count(gpu_uuid_gpu_node:orch_gpu_info:last1h)": [("{}", 3)],
            "count by (job_id) (gpu:orch_gpu_info:placed)": [('{job_id="a"}', 2), ("{}", 1)],
        },
    ),
    Scenario(
        "a GPU is lost, with its Xid and its job",
        holds("a", [0, 1])
        | gpu(1, flat(0.9), flat(500))
        | gpu(
            0,
            steps(("0.9", 20), ("stale", 1)),
            steps(("500", 20), ("stale", 1)),
            alive=steps(("1", 20), ("stale", 1)),
            memory=steps(("4e10", 20), ("stale", 1)),
        )
        | of_gpu("orch_exporter_up", steps(("1", 20), ("0", 80)), **G0)
        | of_gpu(
            "orch_gpu_xid_last_timestamp_seconds", steps(("_", 18), ("280", 2), ("stale", 1)), gpu_uuid="g0", xid="79"
        ),
        {
            "OrchGpuLost": [G0],
            "OrchGpuSilent": [{"job_id": "a", "rank": "0", **G0}],
            "OrchGpuXid": [{"xid": "79", **G0}],
        },
        at="10m",
        also_at={"20m": {"OrchGpuLost": [G0], "OrchGpuSilent": [{"job_id": "a", "rank": "0", **G0}]}},
    ),
    Scenario(
        "Xids: the program's own are let pass",
        TWO
        | of_gpu("orch_gpu_xid_last_timestamp_seconds", flat(1000), gpu_uuid="g0", xid="31")
        | of_gpu("orch_gpu_xid_last_timestamp_seconds", flat(1000), gpu_uuid="g0", xid="48")
        | of_gpu("orch_gpu_xid_last_timestamp_seconds", flat(20), gpu_uuid="g1", xid="48"),
        {"OrchGpuXid": [{"xid": "48", **G0}]},
    ),
    Scenario(
        "memory errors: corrected and old ones are let pass",
        TWO
        | of_gpu("orch_gpu_ecc_errors_total", flat(1), gpu_uuid="g0", severity="uncorrected", scope="volatile")
        | of_gpu("orch_gpu_ecc_errors_total", flat(7), gpu_uuid="g1", severity="uncorrected", scope="aggregate")
        | of_gpu("orch_gpu_ecc_errors_total", flat(7), gpu_uuid="g1", severity="corrected", scope="volatile"),
        {"OrchGpuEccUncorrected": [G0]},
    ),
    Scenario(
        "row remapping",
        TWO
        | of_gpu("orch_gpu_remapped_rows", flat(1), gpu_uuid="g0", cause="pending")
        | of_gpu("orch_gpu_remapped_rows", flat(0), gpu_uuid="g1", cause="failure")
        | of_gpu("orch_gpu_remapped_rows", flat(3), gpu_uuid="g1", cause="correctable"),
        {"OrchGpuRowRemap": [{"cause": "pending", **G0}]},
    ),
    Scenario(
        "throttling: a power cap is how GPUs work, heat is not",
        TWO
        | of_gpu("orch_gpu_throttle_active", flat(1), gpu_uuid="g0", reason="hardware_thermal")
        | of_gpu("orch_gpu_throttle_active", flat(1), gpu_uuid="g0", reason="power_cap")
        | of_gpu("orch_gpu_throttle_active", steps(("1", 30), ("0", 90)), gpu_uuid="g1", reason="thermal"),
        {"OrchGpuThrottled": [{"reason": "hardware_thermal", **G0}]},
    ),
    Scenario(
        "one exporter of a node",
        TWO
        | {name("up", job="orch-gpu", instance="n1:9477", node="n1"): flat(0)}
        | {name("up", job="orch-gpu", instance="n1:9478", node="n1"): flat(1)},
        {"OrchExporterDown": [{"job": "orch-gpu", "instance": "n1:9477", "node": "n1"}]},
    ),
    Scenario(
        "a whole node",
        TWO
        | {name("up", job="orch-gpu", instance="n1:9477", node="n1"): flat(0)}
        | {name("up", job="orch-gpu", instance="n1:9478", node="n1"): flat(0)}
        | daemon("orch_nodes", flat(1), state="unreachable"),
        {
            "OrchExporterDown": [
                {"job": "orch-gpu", "instance": "n1:9477", "node": "n1"},
                {"job": "orch-gpu", "instance": "n1:9478", "node": "n1"},
            ],
            "OrchNodeDown": [{"node": "n1"}],
            "OrchNodeUnreachable": [{"state": "unreachable"}],
        },
    ),
    Scenario(
        "an exporter that only repeats itself",
        TWO
        | of_gpu("orch_exporter_last_success_timestamp_seconds", flat(300), gpu_uuid="g0")
        | of_gpu("orch_exporter_last_success_timestamp_seconds", "0+15x120", gpu_uuid="g1"),
        {"OrchExporterStale": [G0]},
    ),
    Scenario(
        "a failed job, a cancelled and a good one",
        holds("a", [], state="FAILED") | holds("b", [], state="SUCCEEDED") | holds("c", [], state="CANCELLED"),
        {"OrchJobFailed": [{"job_id": "a", "name": "digits", "user": "ada", "queue": "default"}]},
    ),
    Scenario(
        "restarts: a loop, two, and preemptions",
        holds("a", [])
        | daemon(
            "orch_job_restarts_total",
            steps(("0", 30), ("1", 10), ("2", 10), ("3", 70)),
            job_id="a",
            **{"class": "infra"},
        )
        | holds("b", [])
        | daemon("orch_job_restarts_total", steps(("0", 30), ("1", 10), ("2", 80)), job_id="b", **{"class": "infra"})
        | holds("c", [])
        | daemon("orch_job_restarts_total", "0+1x120", job_id="c", **{"class": "preemption"}),
        {"OrchJobRestartLoop": [{"job_id": "a"}]},
        at="15m",
    ),
    Scenario(
        "a restart every four minutes, and one job seen first after its third",
        holds("a", [], samples=280)
        | daemon("orch_job_restarts_total", "0x15 1x15 2x15 3x200", job_id="a", **{"class": "infra"})
        | holds("b", [], samples=280)
        | daemon("orch_job_restarts_total", flat(3, 280), job_id="b", **{"class": "infra"}),
        {"OrchJobRestartLoop": [{"job_id": "a"}]},
        at="25m",
        also_at={"10m": {}},
    ),
    Scenario(
        "findings carry rank and GPU, and a short one is let pass",
        TWO
        | daemon(
            "orch_finding",
            steps(("_", 20), ("1", 100)),
            kind="gpu_slow",
            job_id="a",
            rank="1",
            gpu_uuid="g1",
            node="n0",
        )
        | daemon(
            "orch_finding", steps(("_", 20), ("1", 100)), kind="loss_flat", job_id="a", rank="", gpu_uuid="", node=""
        )
        | daemon(
            "orch_finding",
            steps(("_", 78), ("1", 1), ("stale", 1)),
            kind="gpu_idle",
            job_id="a",
            rank="0",
            gpu_uuid="g0",
            node="n0",
        ),
        {
            "OrchFinding": [
                {"kind": "gpu_slow", "job_id": "a", "rank": "1", "gpu_uuid": "g1", "node": "n0"},
                {"kind": "loss_flat", "job_id": "a"},
            ]
        },
        also_at={"4m": {}},
    ),
    Scenario(
        "one GPU of eight at 55 %, one that draws 250 W beside 400 W, and power without utilization",
        job("a", [0.9] * 7 + [0.5], [400] * 8)
        | job("b", [0.9] * 8, [400] * 7 + [250], first=10)
        | {key: value for key, value in job("c", [0.9] * 2, [400, 200], first=20).items() if "utilization" not in key},
        {
            "OrchGpuStraggler": [*imbalance("a", "utilization"), *imbalance("b", "power"), *imbalance("c", "power")],
            "OrchJobImbalance": imbalance("c", "power"),
        },
    ),
    Scenario(
        "a silent GPU and a stale exporter of a job that drains or has gone",
        holds("a", [0], state="DRAINING")
        | of_gpu("orch_gpu_info", flat(1), gpu_uuid="g5", gpu="5", node="n0", model="H100")
        | of_gpu("orch_exporter_last_success_timestamp_seconds", flat(300), gpu_uuid="g5"),
    ),
    Scenario(
        "a job that changes its GPU: the old one's exporter goes, the new one's values are fresh",
        {key: value for key, value in holds("a", []).items() if "orch_job_gpu{" not in key}
        | daemon("orch_job_gpu", steps(("1", 40), ("stale", 1)), job_id="a", gpu_uuid="g5", rank="0")
        | daemon("orch_job_gpu", "_x39 1x80", job_id="a", gpu_uuid="g6", rank="0")
        | of_gpu("orch_gpu_info", steps(("1", 40), ("stale", 1)), gpu_uuid="g5", gpu="5", node="n0", model="H100")
        | of_gpu("orch_gpu_info", "_x39 1x80", gpu_uuid="g6", gpu="6", node="n0", model="H100")
        | of_gpu("orch_gpu_utilization_ratio", "_x39 0.9x80", gpu_uuid="g6")
        | of_gpu("orch_exporter_last_success_timestamp_seconds", "0+15x39 stale", gpu_uuid="g5")
        | of_gpu("orch_exporter_last_success_timestamp_seconds", "_x39 585+15x80", gpu_uuid="g6"),
        at="12m",
        also_at={"20m": {}},
    ),
    Scenario(
        "a hang flag that comes and goes",
        holds("a", [])
        | daemon("orch_job_hang_suspected", "_x40 1 0 0 1 0 1 0 0 1 0 0 1 0 1 0 0 1 0 0 1 0 1 0 0 1x40", job_id="a"),
        {"OrchJobHangSuspected": [{"job_id": "a"}]},
        at="14m",
    ),
    Scenario(
        "a hang",
        holds("a", []) | daemon("orch_job_hang_suspected", steps(("0", 40), ("1", 80)), job_id="a") | holds("b", []),
        {"OrchJobHangSuspected": [{"job_id": "a"}]},
    ),
    Scenario(
        "checkpoints: too old, none yet, none meant, just restarted, and young",
        {
            key: value
            for job_id in "abcdef"
            for key, value in holds(job_id, [], state="DRAINING" if job_id == "f" else "RUNNING", samples=240).items()
        }
        | daemon("orch_job_checkpoint_interval_seconds", flat(60, 240), job_id="a")
        | daemon("orch_job_checkpoint_timestamp_seconds", flat(20, 240), job_id="a")
        | daemon("orch_job_checkpoint_interval_seconds", flat(60, 240), job_id="b")
        | daemon("orch_job_event_timestamp_seconds", flat(20, 240), job_id="b", event="start")
        | daemon("orch_job_checkpoint_timestamp_seconds", flat(20, 240), job_id="c")
        | daemon("orch_job_checkpoint_interval_seconds", flat(60, 240), job_id="d")
        | daemon("orch_job_checkpoint_timestamp_seconds", flat(20, 240), job_id="d")
        | daemon("orch_job_event_timestamp_seconds", flat(1000, 240), job_id="d", event="start")
        | daemon("orch_job_checkpoint_interval_seconds", flat(1500, 240), job_id="e")
        | daemon("orch_job_checkpoint_timestamp_seconds", flat(20, 240), job_id="e")
        | daemon("orch_job_checkpoint_interval_seconds", flat(60, 240), job_id="f")
        | daemon("orch_job_checkpoint_timestamp_seconds", flat(20, 240), job_id="f"),
        {"OrchCheckpointTooOld": [{"job_id": "a"}, {"job_id": "b"}, {"job_id": "c"}]},
        at="50m",
        also_at={"32m": {}},
    ),
    Scenario(
        "never saved: for long, for a shorter time, one that means to save, one that waits",
        {
            key: value
            for job_id in "abcd"
            for key, value in holds(job_id, [], state="PENDING" if job_id == "d" else "RUNNING", samples=560).items()
        }
        | daemon("orch_job_event_timestamp_seconds", flat(20, 560), job_id="a", event="start")
        | daemon("orch_job_event_timestamp_seconds", flat(3000, 560), job_id="b", event="start")
        | daemon("orch_job_event_timestamp_seconds", flat(20, 560), job_id="c", event="start")
        | daemon("orch_job_checkpoint_interval_seconds", flat(7000, 560), job_id="c")
        | daemon("orch_job_event_timestamp_seconds", flat(20, 560), job_id="d", event="start"),
        {"OrchJobNeverSaved": [{"job_id": "a"}]},
        at="130m",
        also_at={"118m": {}},
    ),
    Scenario(
        "the daemon does not answer",
        {name("up", job="orch-daemon", instance="127.0.0.1:9476"): flat(0)},
        {"OrchDaemonDown": [{"job": "orch-daemon", "instance": "127.0.0.1:9476"}]},
    ),
    Scenario(
        "the daemon is not even a target",
        {name("up", job="orch-daemon", instance="127.0.0.1:9476"): "_x120"},
        {"OrchDaemonDown": [{"job": "orch-daemon"}]},
    ),
    Scenario(
        "queues: stuck, moving, and a full cluster is none",
        daemon("orch_queue_oldest_pending_seconds", "0+15x400", queue="stuck")
        | daemon("orch_queue_oldest_pending_seconds", "0+15x400", queue="moving")
        | daemon("orch_queue_wait_seconds_count", "0+1x400", queue="moving"),
        {"OrchQueueStuck": [{"queue": "stuck"}]},
        at="80m",
    ),
    Scenario(
        "a job that waits for hours while short ones start is stuck",
        daemon("orch_queue_oldest_pending_seconds", "0+15x1100", queue="starved")
        | daemon("orch_queue_wait_seconds_count", "0+1x1100", queue="starved"),
        {"OrchQueueStuck": [{"queue": "starved"}]},
        at="255m",
        also_at={"230m": {}},
    ),
    Scenario(
        "a queue behind a full cluster waits and is not stuck",
        daemon("orch_queue_oldest_pending_seconds", "0+15x400", queue="default")
        | daemon("orch_gpus", flat(0, 400), node="n0", state="idle")
        | daemon("orch_gpus", flat(8, 400), node="n0", state="busy"),
        at="80m",
    ),
    Scenario(
        "disks: filling, almost full, and a slow one",
        daemon("orch_disk_free_bytes", "2e11-1e9x180", node="n1", path="/fast")
        | daemon("orch_disk_size_bytes", flat(1e12, 200), node="n1", path="/fast")
        | daemon("orch_disk_free_bytes", flat(4e10, 200), node="n2", path="/full")
        | daemon("orch_disk_size_bytes", flat(1e12, 200), node="n2", path="/full")
        | daemon("orch_disk_free_bytes", "2e11-1e5x200", node="n3", path="/slow")
        | daemon("orch_disk_size_bytes", flat(1e12, 200), node="n3", path="/slow"),
        {
            "OrchDiskFilling": [{"job": "orch-daemon", "instance": "d", "node": "n1", "path": "/fast"}],
            "OrchDiskAlmostFull": [{"job": "orch-daemon", "instance": "d", "node": "n2", "path": "/full"}],
        },
        at="35m",
    ),
    Scenario(
        "the store cannot commit",
        daemon("orch_store_commit_failures_total", steps(("0", 60), ("2", 60))),
        {"OrchStoreCommitFailing": [{"job": "orch-daemon", "instance": "d"}]},
        at="16m",
        also_at={"29m": {}},
    ),
    Scenario(
        "the daemon is late",
        daemon("orch_daemon_loop_lag_seconds", steps(("0", 60), ("2", 60))),
        {"OrchDaemonSlow": [{"job": "orch-daemon", "instance": "d"}]},
        at="28m",
        also_at={"16m": {}},
    ),
]


def expectation(alert: rules.Alert, labels: list[Labels]) -> dict[str, Any]:
    own = {"severity": alert.severity, "component": alert.component}
    return {"exp_alerts": [{"exp_labels": {**given, **own}} for given in labels]} if labels else {"exp_alerts": []}


def promtool_test(scenario: Scenario) -> dict[str, Any]:
    checks = {scenario.at: scenario.fires, **scenario.also_at}
    longest = max(map(minutes, checks)) * 4 + 8
    base = {key: value for key, value in healthy(int(longest)).items() if not shadowed(key, scenario.series)}
    return {
        "name": scenario.title,
        "interval": f"{STEP}s",
        "input_series": [{"series": key, "values": value} for key, value in (base | scenario.series).items()],
        "alert_rule_test": [
            {"eval_time": at, "alertname": alert.name, **expectation(alert, fires.get(alert.name, []))}
            for at, fires in checks.items()
            for alert in rules.ALERTS
        ],
        "promql_expr_test": [
            {
                "expr": expr,
                "eval_time": scenario.at,
                "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
            }
            for expr, samples in scenario.values.items()
        ],
    }


def shadowed(key: str, series: Series) -> bool:
    """Whether the scenario brings its own version of a healthy series."""
    if key.startswith("up{"):
        return "orch-daemon" in key and any(other.startswith("up{") and "orch-daemon" in other for other in series)
    return key in series


def minutes(text: str) -> float:
    found = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", text)
    assert found
    return int(found[1] or 0) + int(found[2] or 0) / 60


def run_promtool(folder: Path, tests: list[dict[str, Any]], *, interval: str = f"{STEP}s") -> None:
    document = rules.document()
    for group in document["groups"]:
        group["interval"] = interval
        for rule in group["rules"]:
            rule.pop("annotations", None)
    (folder / "rules.yml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    plan = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": interval,
        "group_eval_order": [group.name for group in rules.GROUPS],
        "tests": tests,
    }
    (folder / "tests.yml").write_text(yaml.safe_dump(plan, sort_keys=False), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", "tests.yml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_in_their_scenarios_and_no_other_does(tmp_path: Path) -> None:
    """One run of promtool for all: it names each scenario that fails."""
    run_promtool(tmp_path, [promtool_test(scenario) for scenario in SCENARIOS])


def test_every_alert_fires_in_a_scenario_and_stays_quiet_beside_a_near_miss() -> None:
    fired = {alert for s in SCENARIOS for fires in (s.fires, *s.also_at.values()) for alert in fires}
    assert fired == {alert.name for alert in rules.ALERTS}


def test_what_alerts_say_uses_labels_that_they_carry() -> None:
    always: dict[str, set[str]] = {}
    for scenario in SCENARIOS:
        for fires in (scenario.fires, *scenario.also_at.values()):
            for alert, occurrences in fires.items():
                for labels in occurrences:
                    always.setdefault(alert, set()).update(labels)
    for alert in rules.ALERTS:
        used = set(re.findall(r"\$labels\.(\w+)", alert.summary + alert.description))
        assert used <= set(alert.labels), alert.name
        assert always[alert.name] <= set(alert.labels), alert.name
        assert used <= always[alert.name] | {"node"}, alert.name


def test_rules_pass_promtools_own_checks(tmp_path: Path) -> None:
    path = tmp_path / "orch.rules.yml"
    path.write_text(yaml.safe_dump(rules.document()), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "check", "rules", "--lint=all", "--lint-fatal", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules.ALERTS) + len(rules.RECORDS)} rules found" in done.stdout


def healthy_day(seed: int, interval: int) -> Series:
    """Return a day of two jobs on 2 and 4 GPUs: noise, checkpoints, evaluations on rank 0, a restart, a hot spell."""
    chance = random.Random(seed)
    samples = 24 * 3600 // interval
    series = healthy(samples) | holds("small", [0, 1], samples=samples) | holds("large", [2, 3, 4, 5], samples=samples)
    loads: dict[int, list[GpuLoad]] = {}
    for number in range(6):
        load, watts, loads[number] = [], [], []
        for i in range(samples):
            second = i * interval
            busy = chance.uniform(0.80, 0.99)
            if second % 1800 < 45:  # a checkpoint: rank 0 writes, the others wait
                busy = 0.3 if number in (0, 2) else 0.0
            elif second % 7200 < 120:  # an evaluation on rank 0 alone
                busy = 0.9 if number in (0, 2) else 0.02
            elif 40000 < second < 40120:  # a restart of everything
                busy = 0.0
            power = 70 + 560 * busy + chance.uniform(-25, 25)
            load.append(f"{busy:.3f}")
            watts.append(f"{power:.0f}")
            loads[number].append(GpuLoad(utilization=busy, memory=4e10, power=power))
        series |= gpu(number, " ".join(load), " ".join(watts), alive=flat(1, samples), memory=flat(4e10, samples))
        series |= of_gpu("orch_exporter_up", flat(1, samples), gpu_uuid=f"g{number}", gpu=str(number), node="n0")
        hot = " ".join("1" if 50000 < i * interval < 50180 else "0" for i in range(samples))
        series |= of_gpu("orch_gpu_throttle_active", hot, gpu_uuid=f"g{number}", reason="thermal")
    for job_id, numbers in (("small", (0, 1)), ("large", (2, 3, 4, 5))):
        minutes = [[mean_load(loads[n][max(0, i - 1) : i + 1]) for n in numbers] for i in range(samples)]
        series |= balances(job_id, [[load for load in minute if load is not None] for minute in minutes])
    for rank in range(4):
        times = " ".join(f"{chance.uniform(0.095, 0.125):.3f}" for _ in range(samples))
        series |= daemon("orch_job_rank_step_seconds", times, job_id="large", rank=str(rank))
    for job_id, every in (("small", 1800), ("large", 600)):
        saved = " ".join(str(i * interval // every * every) for i in range(samples))
        series |= daemon("orch_job_checkpoint_timestamp_seconds", saved, job_id=job_id)
        series |= daemon("orch_job_checkpoint_interval_seconds", flat(every, samples), job_id=job_id)
        restarts = " ".join(str(int(i * interval > 40000)) for i in range(samples))
        series |= daemon("orch_job_restarts_total", restarts, job_id=job_id, **{"class": "infra"})
    free = " ".join(f"{6e11 - 2e6 * i * interval % 3e11:.0f}" for i in range(samples))
    return series | daemon("orch_disk_free_bytes", free, node="n0", path="/o")


@pytest.mark.rare
def test_a_healthy_day_is_silent(tmp_path: Path) -> None:
    interval = 30
    series = healthy_day(20261121, interval)
    test = {
        "name": "a healthy day",
        "interval": f"{interval}s",
        "input_series": [{"series": key, "values": value} for key, value in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count_over_time(ALERTS{alertstate="firing"}[1d])',
                "eval_time": "1439m",
                "exp_samples": [],
            },
            {  # a check of the test: balance was recorded all day, and alerts were evaluated
                "expr": 'count_over_time(orch_job_gpu_balance_cv{job_id="large", quantity="power"}[1d]) > bool 2500',
                "eval_time": "1439m",
                "exp_samples": [
                    {"labels": '{instance="d", job="orch-daemon", job_id="large", quantity="power"}', "value": 1}
                ],
            },
            {
                "expr": 'count(count_over_time(ALERTS{alertstate="pending", alertname="OrchGpuStraggler"}[1d])) > bool 0',
                "eval_time": "1439m",
                "exp_samples": [{"labels": "{}", "value": 1}],
            },
        ],
    }
    run_promtool(tmp_path, [test], interval=f"{interval}s")
