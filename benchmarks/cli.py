"""Measures commands as whole processes, as a person waits for them: every reading one, ``orch submit``, ``orch up``.

``ours`` is ``orch status`` with ten jobs in the list. ``submit`` and ``up`` (seconds until the daemon is ready, from nothing) are reported
beside it, and ``reading`` has for each reading command seconds by the clock and of processor time (``cpu``), the daemon's not
included. ``python -c pass`` is there to show what an interpreter alone costs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import contenders
from benchmarks.measure import interleave, parser, report, result, summary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

JOB = """version: 1
name: nothing
entrypoint: python nothing.py
outputs: [out.txt]
resources: {num_workers: 1, resources_per_worker: {gpu: 0, cpu: 0.1}}
"""

READING = (
    *("status nothing", "show nothing", "diff nothing nothing", "logs nothing", "events nothing", "explain nothing"),
    *("queue", "checkpoints nothing", "matrix", "usage", "nodes", "gpus", "ui --print", "login"),
    *("estimate nothing", "get nothing", "status --json", "schema", "help", "submit --help", "--version"),
)
LONGEST_SECONDS = 0.15
"""Longest time of a reading command, from the key to the prompt, on an otherwise idle machine."""


class Measured:
    """Runs commands, and keeps their processor time by name."""

    def __init__(self, environ: Mapping[str, str], directory: Path) -> None:
        self._environ, self._directory = environ, directory
        self.cpu: dict[str, list[float]] = {}

    def run(self, name: str, *command: str) -> float:
        """Return the seconds that the command took."""
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            env=dict(self._environ),
            cwd=self._directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        stderr = process.stderr.read()
        _, status, use = os.wait4(process.pid, 0)
        took = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode}: {stderr.strip()[-200:]}")
        self.cpu.setdefault(name, []).append(use.ru_utime + use.ru_stime)
        return took


def main() -> None:
    """Measure and report."""
    options = parser(__doc__ or "", pairs=30)
    options.add_argument("--ups", type=int, default=5, help="how often the daemon is started from nothing")
    arguments = options.parse_args()
    orch = contenders.Orch()
    directory = Path(tempfile.mkdtemp(prefix="orch-bench-"))
    (directory / "job.yaml").write_text(JOB)
    (directory / "nothing.py").write_text("print('nothing')\nopen('out.txt', 'w').close()\n")
    measured = Measured(orch.environ, directory)
    binary = str(contenders.BIN / "orch")
    try:
        orch.up()
        for _ in range(10):
            measured.run("first", binary, "submit", "job.yaml", "--wait")
        found = interleave(_arms(measured, binary), arguments.pairs)
    finally:
        orch.close()
    ups = [_up() for _ in range(arguments.ups)]
    values = found.values
    reading = {line: (summary(values[line]), summary(measured.cpu[line])) for line in READING if values[line]}
    for line, (clock, cpu) in sorted(reading.items(), key=lambda pair: -pair[1][0]["median"]):
        mark = "  over the limit" if clock["median"] > LONGEST_SECONDS else ""
        print(f"orch {line}: {clock['median']:.3f} s, {cpu['median']:.3f} s of processor time{mark}", file=sys.stderr)
    reading_summary = {line: {**clock, "cpu": cpu} for line, (clock, cpu) in reading.items()}
    more = {"submit": summary(values["submit"]), "reading": reading_summary, **({"up": summary(ups)} if ups else {})}
    report(
        result("cli", "s", "lower", values["status"], {"python -c pass": values["python -c pass"]}, **more),
        arguments.json,
    )


def _arms(measured: Measured, binary: str) -> dict[str, Callable[[], float]]:
    def submit() -> float:
        seconds = measured.run("submit", binary, "submit", "job.yaml")
        measured.run("wait", binary, "wait", "nothing")
        return seconds

    def reading(line: str) -> Callable[[], float]:
        return lambda: measured.run(line, binary, *line.split())

    return {
        "status": reading("status"),
        "submit": submit,
        "python -c pass": lambda: measured.run("python", sys.executable, "-c", "pass"),
        **{line: reading(line) for line in READING},
    }


def _up() -> float:
    orch = contenders.Orch()
    try:
        return orch.up()
    finally:
        orch.close()


if __name__ == "__main__":
    main()
