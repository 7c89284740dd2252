"""Commands that keep running: follow, wait, watch; across restarts, and their output meanwhile."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from orchestrator.cli.commands.logs import LogOptions, show_logs
from orchestrator.cli.console import Console
from orchestrator.cli.session import Session
from tests.support.stack import PATIENCE_SECONDS
from tests.unit.cli.render.test_table import Terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from orchestrator.api.server.testing import ServedFake
    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]
    Script = Callable[..., AbstractContextManager[None]]


class Play:
    """Runs steps in another thread, each once a command is waiting."""

    def __init__(self, served: ServedFake, steps: tuple[Callable[[], object], ...]) -> None:
        self._served, self._steps = served, steps
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        for step in self._steps:
            deadline = time.monotonic() + 300
            while not self._served.do(lambda service: service._waiters):
                assert time.monotonic() < deadline
                time.sleep(0.005)
            step()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join(timeout=PATIENCE_SECONDS)
        assert not self._thread.is_alive()


def change(served: ServedFake, **fields: object) -> Callable[[], object]:
    def step() -> None:
        served.do(lambda service: service.set(list(service._jobs)[-1], **fields))

    return step


def write(served: ServedFake, *texts: str) -> Callable[[], object]:
    return lambda: served.do(lambda service: service.write(list(service._jobs)[-1], *texts))


def restart(served: ServedFake, *meanwhile: Callable[[], object]) -> Callable[[], object]:
    def step() -> None:
        served.stop()
        for act in meanwhile:
            act()
        served.start()

    return step


@pytest.fixture
def job_id(served: ServedFake) -> str:
    return str(served.do(lambda service: service.add().id))


def test_wait_tells_the_way_and_the_end(orch: Orch, served: ServedFake, job_id: str) -> None:
    steps = (
        change(served, state="RUNNING", reason="every rank is up"),
        change(served, state="SUCCEEDED", reason="done"),
    )
    with Play(served, steps):
        done = orch("wait", job_id)
    assert (done.code, done.out) == (0, "")
    assert done.err.splitlines() == [
        f"{job_id} PENDING: waits for its turn",
        f"{job_id} RUNNING: every rank is up",
        f"{job_id} SUCCEEDED: done",
    ]


def test_wait_survives_a_restart_of_the_daemon(orch: Orch, served: ServedFake, job_id: str) -> None:
    with Play(served, (restart(served, change(served, state="FAILED", reason="raised")),)):
        done = orch("wait", job_id, "--json")
    assert done.code == 1
    assert done.json["state"] == "FAILED"
    assert "waiting for it to come back" in done.err


def test_submit_and_wait(orch: Orch, served: ServedFake, job_file: Path) -> None:
    with Play(served, (change(served, state="FAILED", reason="raised"),)):
        done = orch("submit", str(job_file), "--wait", "--json")
    assert done.code == 1
    assert done.json["name"] == "digits"


def test_submit_and_follow(orch: Orch, served: ServedFake, job_file: Path) -> None:
    steps = (
        write(served, "step 1"),
        restart(served, write(served, "step 2")),
        change(served, state="SUCCEEDED", reason="done"),
    )
    with Play(served, steps):
        done = orch("submit", str(job_file), "--follow")
    assert (done.code, done.out) == (0, "step 1\nstep 2\n")
    assert "submitted digits-" in done.err
    assert "SUCCEEDED: done" in done.err


def test_logs_follow(orch: Orch, served: ServedFake, job_id: str) -> None:
    write(served, "old", "older")()
    with Play(served, (write(served, "step 1", "noise"), change(served, state="FAILED"))):
        done = orch("logs", job_id, "-f", "--tail", "1", "--grep", "old|step")
    assert (done.code, done.out) == (0, "older\nstep 1\n")


def test_events_follow(orch: Orch, served: ServedFake, job_id: str) -> None:
    with Play(served, (change(served, state="RUNNING", reason="up"), change(served, state="SUCCEEDED", reason="done"))):
        done = orch("events", job_id, "-f", "--json")
    assert [json.loads(line)["sequence"] for line in done.out.splitlines()] == [1, 2, 3]
    assert orch("events", job_id, "-f", "--since", "2999-01-01T00:00").out == ""
    plain = orch("events", job_id, "--follow").out.splitlines()
    assert plain[-1].endswith("job_changed  done")


def test_watching_a_job_ends_with_it(orch: Orch, served: ServedFake, job_id: str) -> None:
    with Play(served, (change(served, state="RUNNING"), change(served, state="SUCCEEDED"))):
        done = orch("status", job_id, "--watch", "--json")
    assert [json.loads(line)["state"] for line in done.out.splitlines()] == ["PENDING", "RUNNING", "SUCCEEDED"]


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1)])
def test_a_submission_can_be_watched_to_its_end(
    orch: Orch, served: ServedFake, job_file: Path, state: str, code: int
) -> None:
    with Play(served, (change(served, state="RUNNING"), change(served, state=state))):
        done = orch("submit", str(job_file), "--watch")
    assert done.code == code
    assert "RUNNING" in done.out
    assert state in done.out
    assert "the job keeps running" in done.err


def test_watching_without_a_terminal_prints_each_change(orch: Orch, served: ServedFake, job_id: str) -> None:
    with Play(served, (change(served, state="SUCCEEDED", reason="done"),)):
        done = orch("status", job_id, "--watch")
    assert done.out.count("-- ") == 2
    assert "\x1b" not in done.out


def test_ctrl_c_ends_quietly(orch: Orch, served: ServedFake, job_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> Iterator[object]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("orchestrator.api.transport.following.watch", interrupted)
    for line in (("status", "--watch"), ("wait", job_id)):
        assert orch(*line) == (130, "", "")


# -- views that are redrawn in place


@pytest.mark.parametrize(
    ("terminal", "raw", "shown"),
    [
        (True, False, "green ^[[2J<202E>x"),
        (True, True, "\x1b[32mgreen\x1b[0m \x1b[2J\u202ex"),
        (False, False, "\x1b[32mgreen\x1b[0m \x1b[2J\u202ex"),
    ],
)
def test_what_ranks_print_does_not_steer_a_terminal(
    served: ServedFake, job_id: str, home: Path, terminal: bool, raw: bool, shown: str
) -> None:
    served.do(lambda service: service.write(job_id, "\x1b[32mgreen\x1b[0m \x1b[2J\u202ex"))
    stream = Terminal(terminal=terminal)
    session = Session(environ={**os.environ, "ORCH_HOME": str(home)})
    session.console = Console({}, out=stream, err=stream)
    show_logs(session, job_id, LogOptions(raw=raw), follow=False)
    assert stream.text() == f"{shown}\n"
