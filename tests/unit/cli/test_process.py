"""`orch` as a whole process: the modules that it loads, its output, and its exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from orchestrator.api.server.testing import ServedFake

ORCH = [sys.executable, "-m", "orchestrator.cli.main"]
HEAVY = {
    "fastapi",
    "pydantic",
    "rich",
    "ray",
    "torch",
    "yaml",
    "numpy",
    "uvicorn",
    "starlette",
    "structlog",
    "asyncio",
}


@pytest.fixture(autouse=True)
def buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffer output, as for users: unbuffered, Python silently loses the rest of a write that a closed pipe cut."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


def orch(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ORCH, *arguments], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False, **options
    )  # type: ignore[call-overload]


def imported(*arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *ORCH[1:], *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {match[1] for match in re.finditer(r"^import time:.*\|\s+([\w.]+)$", done.stderr, re.MULTILINE)}


def test_submit_loads_little(served: ServedFake, job_file: Path) -> None:
    loaded = imported("submit", str(job_file))
    assert "orchestrator.api.transport.wire" in loaded, "the list was read right"
    assert loaded & (HEAVY | {"orchestrator.api.views"}) == set()


def test_status_loads_little(served: ServedFake) -> None:
    served.do(lambda service: service.add())
    loaded = imported("status")
    assert "orchestrator.cli.render.jobs" in loaded
    assert loaded & HEAVY == set()


@pytest.mark.parametrize("line", [("nodes",), ("logs", "digits")])
def test_no_command_loads_what_only_the_daemon_needs(served: ServedFake, line: tuple[str, ...]) -> None:
    served.do(lambda service: service.add(state="FAILED"))
    assert imported(*line) & HEAVY == set()


@pytest.mark.parametrize(
    ("line", "commands"),
    [
        (("help",), {"files", "shared"}),
        (("--help",), set()),
        (("help", "logs"), {"files", "logs", "selecting", "shared"}),
    ],
)
def test_help_loads_no_other_command_and_not_the_model(line: tuple[str, ...], commands: set[str]) -> None:
    # `imported` does not suffice: its list of import times lacks modules that are loaded by a command's name.
    code = "import sys; from orchestrator.cli.main import run; run(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    prefix = "orchestrator.cli.commands."
    assert {name.removeprefix(prefix) for name in loaded if name.startswith(prefix)} == commands
    assert loaded & (HEAVY | {"orchestrator.spec.job", "orchestrator.spec.model"}) == set()


@pytest.fixture
def ctrl_c_is_heard() -> Iterator[None]:
    """Restore SIGINT: tests in the background of a shell script ignore it, as do the processes that they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_ctrl_c(served: ServedFake) -> None:
    served.do(lambda service: service.add())
    process = subprocess.Popen([*ORCH, "status", "--watch"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("-- ")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, err) == (130, "")


@pytest.mark.parametrize("line", [("logs", "digits"), ("status",), ("status", "--state", "all", "--json")])
def test_a_reader_that_leaves_is_no_error(served: ServedFake, line: tuple[str, ...]) -> None:
    def fill(service: object) -> None:
        job = service.add(state="RUNNING", reason="r" * 200)  # type: ignore[attr-defined]
        for number in range(300):
            key = f"digits-{number:06}"
            service._jobs[key] = dataclasses.replace(job, id=key)  # type: ignore[attr-defined]
        service.write(key, *["x" * 100] * 1000)  # type: ignore[attr-defined]

    served.do(fill)
    # Smaller than the output of each command: a larger pipe would take all of it, although nothing reads it.
    pipe = {"bufsize": 0, "pipesize": 4096}
    process = subprocess.Popen([*ORCH, *line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **pipe)  # type: ignore[call-overload]
    assert process.stdout is not None
    assert process.stderr is not None
    begun = process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    assert begun, err
    process.stderr.close()
    assert (process.wait(timeout=PATIENCE_SECONDS), err) == (141, b"")


@pytest.mark.parametrize("line", [("status",), ("nodes",)])
def test_output_that_cannot_be_written_is_told(served: ServedFake, line: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*ORCH, *line], stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_SECONDS, check=False
        )
    assert done.returncode == 5
    assert "could not be written: No space left" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("line", [("status",), ("nodes",)])
def test_streams_that_are_closed_are_no_error(served: ServedFake, line: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&- 2>&-', "sh", *ORCH, *line], timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0


def test_a_terminal_without_utf8(served: ServedFake) -> None:
    from orchestrator.api.views import ProgressView

    served.do(lambda service: service.add(state="RUNNING", reason="größer", progress=ProgressView(fraction=0.5)))
    environ = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = orch("status", env=environ)
    assert done.returncode == 0
    assert "#####-----  50%" in done.stdout
    assert "gr??er" in done.stdout


def test_the_console_script_is_installed() -> None:
    done = subprocess.run(
        [os.path.join(os.path.dirname(sys.executable), "orch"), "--version"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.startswith("orch ")


def test_an_error_as_a_problem_document(home: Path) -> None:
    done = orch("status", "--json")
    assert done.returncode == 4
    assert json.loads(done.stderr)["code"] == "daemon_unreachable"
    assert json.loads(orch("nodes", "--json").stderr)["code"] == "daemon_unreachable"
