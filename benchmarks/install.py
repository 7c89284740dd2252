"""Measures the time and the size of each installation: the plain wheel, ``[train]``, ``[daemon]`` and ``[all]``, each in a fresh environment.

Packages come from the index that pip is configured for, without its cache; bytecode is compiled, as pip does. ``ours`` is the plain
wheel, in seconds; ``size`` is what the environment occupies beyond an empty one. torch is the build that constraints.txt names.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import parser, report, result, summary

ROOT = Path(__file__).parents[1]
PARTS = {"client": "", "train": "[train]", "daemon": "[daemon]", "all": "[all]"}


def main() -> None:
    """Measure and report."""
    options = parser(__doc__ or "", pairs=1)
    arguments = options.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="orch-bench-install-"))
    try:
        wheel = _wheel(directory)
        seconds: dict[str, list[float]] = {name: [] for name in PARTS}
        sizes: dict[str, list[float]] = {name: [] for name in PARTS}
        for _ in range(arguments.pairs):
            for name, extra in PARTS.items():
                took, size = _install(directory / name, wheel, extra)
                seconds[name].append(took)
                sizes[name].append(size)
    finally:
        shutil.rmtree(directory)
    found = result(
        "install",
        "s",
        "lower",
        seconds["client"],
        {},
        train=summary(seconds["train"]),
        daemon=summary(seconds["daemon"]),
        all=summary(seconds["all"]),
        size={name: summary(values) for name, values in sizes.items()},
    )
    report(found, arguments.json)


def _wheel(directory: Path) -> Path:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(directory), str(ROOT)]
    subprocess.run(build, check=True, stdout=sys.stderr)
    (wheel,) = directory.glob("*.whl")
    return wheel


def _install(environment: Path, wheel: Path, extra: str) -> tuple[float, float]:
    """Install the wheel in a fresh environment; return the seconds, and the bytes by which it grew."""
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    empty = _size(environment)
    wanted = f"orchd{extra} @ {wheel.as_uri()}"
    line = [str(environment / "bin" / "pip"), "install", "--quiet", "--no-cache-dir", "-c", "constraints.txt", wanted]
    began = time.monotonic()
    subprocess.run(line, cwd=ROOT, check=True, stdout=sys.stderr)
    took = time.monotonic() - began
    grown = _size(environment) - empty
    shutil.rmtree(environment)
    return took, grown


def _size(directory: Path) -> float:
    return float(sum(512 * path.lstat().st_blocks for path in directory.rglob("*")))


if __name__ == "__main__":
    main()
