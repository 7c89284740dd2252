"""The command line as whole processes, as a person waits for them: ``orch status``, ``orch submit``, ``orch up``.

``ours`` is ``orch status`` with ten jobs in the list; ``submit`` and ``up`` (seconds until the daemon is ready, from nothing) stand
beside it. ``python -c pass`` is there to show what an interpreter alone costs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import contenders
from benchmarks.measure import interleave, parser, report, result, summary

JOB = """version: 1
name: nothing
entrypoint: python nothing.py
resources: {num_workers: 1, resources_per_worker: {gpu: 0, cpu: 0.1}}
"""


def main() -> None:
    """Measure and report."""
    options = parser(__doc__ or "", pairs=30)
    options.add_argument("--ups", type=int, default=5, help="how often the daemon is started from nothing")
    arguments = options.parse_args()
    orch = contenders.Orch()
    directory = Path(tempfile.mkdtemp(prefix="orch-bench-"))
    (directory / "job.yaml").write_text(JOB)
    (directory / "nothing.py").write_text("")

    def run(*command: str) -> float:
        began = time.monotonic()
        subprocess.run(command, env=orch.environ, cwd=directory, check=True, capture_output=True)
        return time.monotonic() - began

    binary = str(contenders.BIN / "orch")
    try:
        orch.up()
        for _ in range(10):
            run(binary, "submit", "job.yaml", "--wait")

        def submit() -> float:
            seconds = run(binary, "submit", "job.yaml")
            run(binary, "wait", "nothing")
            return seconds

        arms = {
            "status": lambda: run(binary, "status"),
            "submit": submit,
            "python -c pass": lambda: run(sys.executable, "-c", "pass"),
        }
        found = interleave(arms, arguments.pairs)
    finally:
        orch.close()
    ups = [_up() for _ in range(arguments.ups)]
    values = found.values
    more = {"submit": summary(values["submit"]), "up": summary(ups)}
    report(
        result("cli", "s", "lower", values["status"], {"python -c pass": values["python -c pass"]}, **more),
        arguments.json,
    )


def _up() -> float:
    orch = contenders.Orch()
    try:
        return orch.up()
    finally:
        orch.close()


if __name__ == "__main__":
    main()
