"""Injects faults that need processes, one at a time, into real jobs under a real daemon; reports the finding, its rank and its delay.

Each job has two ranks on simulated GPUs, or on none, and steps of 0.2 s; rank 1 gets the fault. ``python -m benchmarks.insight.live
--write`` stores the result beside the other ones and writes the table into docs/diagnosis.md. It takes some fifteen minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import contenders
from orchestrator.api.errors import OrchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ROOT: Final = Path(__file__).parents[2]
DOCUMENT: Final = ROOT / "docs" / "diagnosis.md"
MARKS: Final = re.compile(r"(<!-- live:begin -->\n)(.*?)(<!-- live:end -->)", re.DOTALL)
LIMIT_SECONDS: Final = 240.0
LATEST_STEP_SECONDS: Final = 300.0
AT_STEP: Final = 30
DISK_MEBIBYTES: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault and the finding that must name it. ``ended``: the job fails instead, with this failure's code.

    ``by_step``: it begins with a step, else with the job. ``act`` is called on the running job, with its
    ranks' process ids and the job's directory.
    """

    name: str
    kind: str
    rank: int | None
    gpu: int = 1
    ended: str = ""
    by_step: bool = True
    reports: bool = True
    spec: Mapping[str, Any] = field(default_factory=dict)
    act: Callable[[list[int], Path], None] | None = None


def _stop(pids: list[int], _directory: Path) -> None:
    os.kill(pids[1], signal.SIGSTOP)


def _fill(_pids: list[int], directory: Path) -> None:
    with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))


FAULTS: Final = (
    Fault(name="stopped", kind="rank_stopped", rank=1, act=_stop),
    Fault(name="deadlock", kind="no_step", rank=1),
    Fault(name="asleep", kind="no_step", rank=1),
    Fault(name="other group", kind="no_step", rank=1),
    Fault(name="slow rank", kind="rank_slow", rank=1),
    Fault(name="slow rank, no reports", kind="rank_awaited", rank=1, gpu=0, reports=False),
    Fault(name="slow rank, asleep", kind="rank_awaited", rank=1, gpu=0),
    Fault(name="starved loader", kind="input_starved", rank=None),
    Fault(name="full disk", kind="storage_full", rank=None, act=_fill),
    Fault(name="world size", kind="wrong_world_size", rank=None, by_step=False),
    Fault(name="never enters", kind="rendezvous_incomplete", rank=1, by_step=False),
    Fault(name="port in use", kind="", rank=None, ended="port_in_use", by_step=False),
    Fault(name="memory", kind="host_memory_growing", rank=1, spec={"memory": "2GB"}),
    Fault(name="nan", kind="loss_not_finite", rank=None),
)


def measure(orch: contenders.Orch, fault: Fault) -> dict[str, Any]:
    """Inject one fault; return the first finding, and the seconds from the fault's begin to it."""
    with _directory(orch.home, fault) as directory, _argument(fault, directory) as argument:
        reply = orch.client.submit_text(_job(fault, directory, argument), cwd=str(contenders.WORKLOAD.parent))
        job_id = str(reply.job_id)
        try:
            begun = _begin(orch, job_id, fault, directory)
            if fault.ended:
                return _ended(orch, job_id, fault, begun)
            return _found(orch, job_id, fault, begun)
        finally:
            for pid in _pids(orch, job_id):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
            with contextlib.suppress(OrchError):  # it has ended
                orch.client.cancel(job_id)
            orch.client.wait(job_id, timeout_seconds=LIMIT_SECONDS)


def _job(fault: Fault, directory: Path, argument: str) -> str:
    each = {"gpu": fault.gpu, "cpu": 0.5, **fault.spec}
    spec = {
        "version": 1,
        "name": "insight",
        "entrypoint": f"python faulty.py {fault.name.replace(' ', '_')} {AT_STEP} {argument}".strip(),
        "resources": {"num_workers": 2, "resources_per_worker": each},
        "health": {"on_hang": "notify"},
        "checkpoint": {"storage_path": str(directory), "keep": 2},
    }
    return json.dumps(spec)


@contextlib.contextmanager
def _directory(home: Path, fault: Fault) -> Iterator[Path]:
    """Yield the directory in which the job saves: a small file system of its own where the fault fills it."""
    where = home / f"saves-{fault.name.replace(' ', '-').replace(',', '')}"
    where.mkdir(mode=0o700)
    small = fault.act is _fill
    if small:
        options = f"size={DISK_MEBIBYTES}m,mode=0700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)], check=True, capture_output=True)
    try:
        yield where
    finally:
        if small:
            subprocess.run(["umount", "-l", str(where)], check=False, capture_output=True)
        shutil.rmtree(where, ignore_errors=True)


@contextlib.contextmanager
def _argument(fault: Fault, directory: Path) -> Iterator[str]:
    """Yield the workload's third argument: a port that is in use, or the directory."""
    if not fault.ended:
        yield str(directory)
        return
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield str(taken.getsockname()[1])


def _pids(orch: contenders.Orch, job_id: str) -> list[int]:
    return [rank.pid for rank in orch.client.job(job_id).gpus if rank.pid is not None]


def _until(what: str, condition: Callable[[], bool]) -> None:
    """Wait for a condition; check it only twice a second, because the daemon has other work."""
    deadline = time.monotonic() + LATEST_STEP_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {LATEST_STEP_SECONDS:g} s: {what}")
        time.sleep(0.5)


def _begin(orch: contenders.Orch, job_id: str, fault: Fault, directory: Path) -> float:
    """Wait until the fault begins; return the wall time of that."""

    def running() -> bool:
        return orch.client.job(job_id).started_at is not None

    _until("it runs", running)
    if not fault.by_step or not fault.reports:
        return time.time()

    def at_fault() -> bool:
        progress = orch.client.job(job_id).progress
        return progress is not None and (progress.step or 0) >= AT_STEP - 2

    _until("the step of the fault", at_fault)
    if fault.act is not None:
        fault.act(_pids(orch, job_id), directory)
    return time.time()


def _found(orch: contenders.Orch, job_id: str, fault: Fault, begun: float) -> dict[str, Any]:
    def opened() -> list[Any]:
        return [event for event in orch.client.events(job_id) if event.kind == "finding_opened"]

    deadline = time.monotonic() + LIMIT_SECONDS
    while not (events := opened()) and time.monotonic() < deadline:
        time.sleep(0.5)
    if not events:
        return _row(fault, None, None, None, "; ".join(event.summary for event in orch.client.events(job_id)[-3:]), "")
    fact = events[0].body["finding"]
    view = next((one for one in orch.client.job(job_id).findings if one.kind == fact["kind"]), None)
    sentence, advice = (view.sentence, view.advice) if view is not None else (events[0].summary, "")
    return _row(fault, fact["kind"], fact.get("rank"), events[0].at - begun, sentence, advice)


def _ended(orch: contenders.Orch, job_id: str, fault: Fault, begun: float) -> dict[str, Any]:
    job = orch.client.wait(job_id, timeout_seconds=LIMIT_SECONDS)
    failure, code = job.failure, ""
    if failure is not None:
        fact = failure.fact or {}
        code = fault.ended if fault.ended in json.dumps(fact) else failure.code
    took = (job.ended_at or time.time()) - begun
    row = _row(fault, code or None, None, took, failure.sentence if failure else "", "")
    return {**row, "restarts": job.restarts}


def _row(
    fault: Fault, kind: str | None, rank: int | None, seconds: float | None, sentence: str, advice: str
) -> dict[str, Any]:
    wanted = fault.ended or fault.kind
    return {
        "fault": fault.name,
        "wanted": [wanted, fault.rank],
        "found": [kind, rank],
        "right": (kind, rank) == (wanted, fault.rank),
        "seconds": None if seconds is None else round(seconds, 1),
        "sentence": sentence,
        "advice": advice,
    }


def section(result: Mapping[str, Any]) -> str:
    """Return the text that docs/diagnosis.md shows."""
    rows = ["| fault | found | right | seconds | in its words |", "|---|---|---|---|---|"]
    for one in result["faults"]:
        kind, rank = one["found"]
        found = "nothing" if kind is None else f"`{kind}`" + ("" if rank is None else f" of rank {rank}")
        took = "–" if one["seconds"] is None else f"{one['seconds']:.0f}"
        sentence = one["sentence"].replace("|", "/")
        rows.append(f"| {one['fault']} | {found} | {'yes' if one['right'] else 'no'} | {took} | {sentence} |")
    right = sum(one["right"] for one in result["faults"])
    loads = [f"{load:.0f}" for load in sorted(one.get("load", result["load"]) for one in result["faults"])]
    load = loads[0] if loads[0] == loads[-1] else f"{loads[0]} to {loads[-1]}"
    machine = f"The machine's load was {load} on {result['processors']} processors."
    return f"{right} of {len(result['faults'])} were named rightly. {machine}\n\n" + "\n".join(rows) + "\n"


def _with_others(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, and those of the same day's result for faults that were not measured now."""
    measured = {one["fault"]: one for one in rows}
    before = json.loads(path.read_text(encoding="utf-8"))["faults"] if path.exists() else []
    known = {one["fault"]: one for one in before} | measured
    return [known[fault.name] for fault in FAULTS if fault.name in known]


def main() -> None:
    """Measure, and print or store."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="store the result and update docs/diagnosis.md")
    parser.add_argument("--only", nargs="*", default=[], help="names of faults")
    options = parser.parse_args()
    orch, rows = contenders.Orch(), []
    try:
        orch.up(simulate_gpus=2)
        for fault in FAULTS:
            if not options.only or fault.name in options.only:
                row = {**measure(orch, fault), "load": round(os.getloadavg()[1], 1)}
                texts = {key: row[key].replace(str(orch.home), "$ORCH_HOME") for key in ("sentence", "advice")}
                rows.append(row | texts)
                print(json.dumps(rows[-1]), flush=True)
    finally:
        orch.close()
    result = {"measure": "insight_live", "faults": rows, "load": os.getloadavg()[1], "processors": os.cpu_count()}
    if options.write:
        today = dt.datetime.now(tz=dt.UTC).date()
        path = ROOT / "benchmarks" / "results" / f"{today}-insight_live.json"
        result["faults"] = _with_others(path, rows)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        text = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(MARKS.sub(lambda m: m[1] + section(result) + m[3], text), encoding="utf-8")
    print(section(result))


if __name__ == "__main__":
    main()
