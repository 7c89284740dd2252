"""Evidence of a failure about a test's daemons: the ends of their logs, and their processes' activity."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.support.stack import Stack

SHOWN_CHARACTERS = 6000
MAX_PROCESSES = 12
SPY_SECONDS = 15.0


def sections(stack: Stack) -> Iterator[tuple[str, str]]:
    """Yield a title and a text for each piece of evidence that exists."""
    for log in (stack.settings.paths.daemon_log, stack.serve_log_path):
        if log.exists():
            yield f"end of {log}", log.read_text(errors="replace")[-SHOWN_CHARACTERS:]
    yield f"processes of {stack.home}", "\n".join(map(describe, stack.processes())) or "none"
    for process in python_processes(stack)[:MAX_PROCESSES]:
        yield f"stacks of {describe(process)}", stacks(process.pid)


def describe(process: psutil.Process) -> str:
    """Return the process's id, its state, and the beginning of its command line."""
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} ({process.status()}) {' '.join(process.cmdline())[:120]}"
    return f"{process.pid} (has ended)"


def python_processes(stack: Stack) -> list[psutil.Process]:
    """Return orch's processes that run Python, daemons first; without the ranks'."""
    found = []
    for process in stack.processes():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if "orchestrator.cli.main" in line or process.name() == "orch-forkserver" or line.startswith("ray::"):
                found.append((" serve" not in f" {line}", process.pid, process))
    return [process for *_, process in sorted(found, key=lambda one: one[:2])]


def stacks(pid: int) -> str:
    """Return the stacks of the process's threads, by py-spy; where that fails, the reason; and the kernel's state."""
    command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SPY_SECONDS, check=False)
        output = done.stdout or done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        output = str(error)
    with contextlib.suppress(OSError):
        output += "\nkernel: " + Path(f"/proc/{pid}/wchan").read_text()
    return output
