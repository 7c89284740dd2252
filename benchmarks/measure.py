"""Common method of every benchmark: interleaved rounds, medians, 95 % bootstrap intervals, one form of result.

A round runs every arm once; the order is reversed in every other round (A B, B A, ...), so that a machine that warms
up or slows down favours no contender. A target is met when the worse end of the interval meets it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

RESAMPLES = 10_000
_SEED = 20_261_121


@dataclass(slots=True)
class Arms:
    """The values that each arm gave, in the order of the rounds."""

    values: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)


def interleave(arms: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: int = 1) -> Arms:
    """Run every arm ``warm_up`` + ``rounds`` times; the warm-ups are dropped. A failing run is recorded separately."""
    result = Arms({name: [] for name in arms}, {name: [] for name in arms})
    names = list(arms)
    for number in range(-warm_up, rounds):
        for name in names if number % 2 == 0 else reversed(names):
            try:
                value = arms[name]()
            except Exception as error:
                result.failures[name].append(f"{type(error).__name__}: {error}")
                print(f"round {number}: {name} failed: {error}", file=sys.stderr)
                continue
            if number >= 0:
                result.values[name].append(value)
            print(f"round {number}: {name} {value:.4f}", file=sys.stderr)
    return result


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return the median with its 95 % bootstrap interval, the 99th percentile, and the count."""
    data = np.asarray(values, dtype=float)
    medians = np.median(_resampled(data), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return {
        "median": float(np.median(data)),
        "low": float(low),
        "high": float(high),
        "p99": float(np.percentile(data, 99)),
        "n": len(values),
    }


def ratio(ours: Sequence[float], peer: Sequence[float]) -> dict[str, float]:
    """Return the ratio of medians, ours to the peer's, with its 95 % bootstrap interval."""
    mine, theirs = np.asarray(ours, dtype=float), np.asarray(peer, dtype=float)
    resampled = np.median(_resampled(mine), axis=1) / np.median(_resampled(theirs, 1), axis=1)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return {"median": float(np.median(mine) / np.median(theirs)), "low": float(low), "high": float(high)}


def _resampled(data: np.ndarray[Any, np.dtype[np.float64]], stream: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
    generator = np.random.default_rng(_SEED + stream)
    return generator.choice(data, size=(RESAMPLES, len(data)), replace=True)


def result(
    measure: str, unit: str, better: str, ours: Sequence[float], peers: Mapping[str, Sequence[float]], **more: Any
) -> dict[str, Any]:
    """Return a result in the common form."""
    usable = {name: values for name, values in peers.items() if values}
    return {
        "measure": measure,
        "unit": unit,
        "better": better,
        "ours": summary(ours),
        "peers": {name: summary(values) for name, values in usable.items()},
        "ratio": {name: ratio(ours, values) for name, values in usable.items()},
        **more,
        "machine": machine(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def machine() -> dict[str, Any]:
    """Return the facts about the machine and its software."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": os.cpu_count(),
        "cpu": model,
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        **{name: _version(name) for name in ("torch", "ray")},
        **_gpus(),
    }


def _gpus() -> dict[str, Any]:
    """Return the machine's NVIDIA GPUs and their driver; nothing where there are none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    found = {
        "gpus": [pynvml.nvmlDeviceGetName(each) for each in handles],
        "driver": pynvml.nvmlSystemGetDriverVersion(),
    }
    pynvml.nvmlShutdown()
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit(checkout: Path | None = None) -> str:
    """Return the commit that was measured; a plus sign means that files had changed since."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")


def parser(description: str, pairs: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share. From here on SIGTERM ends the benchmark as an error does: its jobs end with it."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--pairs", type=int, default=pairs, help=f"rounds of every arm (default {pairs})")
    made.add_argument("--json", type=Path, help="write the result there as well")
    return made


def report(found: Mapping[str, Any], path: Path | None) -> None:
    """Print the result, and write it."""
    text = json.dumps(found, indent=1)
    print(text)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process so far, to the nanosecond: the usual counters tick every 0.01 s."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def percent_of_a_core(pids: Iterable[int], seconds: float) -> dict[int, float]:
    """Watch processes for ``seconds``; return per cent of a core by process. One that ends meanwhile is left out."""

    def used() -> dict[int, float]:
        found = {}
        for pid in watched:
            with contextlib.suppress(OSError):
                found[pid] = cpu_seconds(pid)
        return found

    watched = list(pids)
    before, began = used(), time.monotonic()
    time.sleep(seconds)
    after, took = used(), time.monotonic() - began
    return {pid: 100.0 * (after[pid] - before[pid]) / took for pid in before.keys() & after.keys()}


def wait_for(what: str, condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Poll until the condition is true, and return its value. Raises TimeoutError naming ``what``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.002)
    raise TimeoutError(f"{what}: not within {seconds:g} s")


__all__ = ["Arms", "interleave", "machine", "parser", "ratio", "report", "result", "summary", "wait_for"]
