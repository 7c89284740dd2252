"""Describes a benchmark's environment, as far as its figures depend on it: machine, GPUs and their links, versions, settings, load."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchestrator.gpu.sample import Detail, GpuReadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.gpu.sample import GpuReader

_PREFIXES: Final = ("NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_", "MKL_", "CUDA_", "HIP_", "ROCR_")
_TOPOLOGY_SECONDS: Final = 15.0
_MOST_TOPOLOGY: Final = 20_000
_TERMINAL_CODES: Final = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines its header, for a pipe as well


def describe_environment(
    torch_sees: Mapping[str, Any], readers: Sequence[GpuReader], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the environment as plain values. ``torch_sees`` is a rank's description of itself."""
    return {
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads_per_rank": torch_sees["threads"],
        "load_average": list(os.getloadavg()),
        "system": f"{platform.system()} {platform.release()}",
        "versions": torch_sees["versions"],
        "gpus": [_gpu(reader) for reader in readers],
        "topology": topology() if readers else None,
        "settings": {name: value for name, value in sorted(environ.items()) if name.startswith(_PREFIXES)},
    }


def _gpu(reader: GpuReader) -> dict[str, Any]:
    info = reader.info
    found: dict[str, Any] = {"model": info.model, "uuid": info.uuid, "driver": info.driver_version}
    try:
        sample = reader.read(Detail.FULL)
    except GpuReadError as error:
        return {**found, "problem": str(error)}
    return {**found, "clocks_hertz": dict(sample.clocks), "power_limit_watts": sample.power_limit_watts}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def topology() -> str | None:
    """Return the links between GPUs as the vendor's tool prints them; None where it is not installed or fails."""
    for tool, arguments in (("nvidia-smi", ["topo", "-m"]), ("rocm-smi", ["--showtopo"])):
        if shutil.which(tool) is None:
            continue
        try:
            ended = subprocess.run(
                [tool, *arguments], capture_output=True, text=True, timeout=_TOPOLOGY_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if ended.returncode == 0:
            return _TERMINAL_CODES.sub("", ended.stdout)[:_MOST_TOPOLOGY]
    return None
