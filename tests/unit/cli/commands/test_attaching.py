"""`orch attach` and `orch run -i` without a terminal: their requests, their output, and the exit codes."""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.api.client import Client
from orchestrator.api.errors import RefusedError
from orchestrator.api.server.testing import FAIL
from orchestrator.cli.commands import sessions as attaching
from orchestrator.cli.session import Session
from orchestrator.runtime.ranks.session_messages import AttachRequest
from tests.support.stack import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from orchestrator.api.server.testing import ServedFake
    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Yield the write end of a pipe that replaces this process's standard input."""
    reader, writer = os.pipe()
    before = os.dup(0)
    os.dup2(reader, 0)
    yield writer
    os.dup2(before, 0)
    for descriptor in (reader, writer, before):
        os.close(descriptor)


def sessions_of(served: ServedFake) -> Any:
    return served.do(lambda service: [call[1] for call in service.calls if call[0] == "session"])


def test_the_exit_code_is_the_rank_s(orch: Orch, served: ServedFake, typed: int) -> None:
    served.do(lambda service: service.add("digits", state="RUNNING", num_workers=2, uid=os.getuid()))
    os.write(typed, FAIL)
    assert orch("attach", "digits", "--rank", "1").code == 3
    ((rank, request, _),) = sessions_of(served)
    assert (rank, request) == (1, AttachRequest(terminal=None, secrets=True))


@pytest.mark.parametrize("state", ["PENDING", "SUCCEEDED"])
def test_only_a_running_job_is_attached_to(orch: Orch, served: ServedFake, typed: int, state: str) -> None:
    served.do(lambda service: service.add("digits", state=state, uid=os.getuid()))
    done = orch("attach", "digits")
    assert (done.code, "does not run" in done.err) == (5, True)
    assert orch("attach", "nothing").code == 3


@pytest.mark.parametrize(("end", "code"), [({"state": "SUCCEEDED"}, 0), ({"state": "FAILED", "exit_code": 3}, 3)])
def test_a_rank_whose_end_the_job_does_not_show_yet_is_waited_for(
    orch: Orch, served: ServedFake, typed: int, monkeypatch: pytest.MonkeyPatch, end: dict[str, Any], code: int
) -> None:
    class EndsLate(Client):
        """Client that records the job's end only at the second wait, after the session has ended."""

        looks = 0

        def wait_change(self, *args: Any, **keys: Any) -> int:
            EndsLate.looks += 1
            if EndsLate.looks == 2:
                served.do(lambda service: [service.set(job_id, **end) for job_id in service._jobs])
            return super().wait_change(*args, **keys)

    def refused(*_: Any, **__: Any) -> Any:
        raise RefusedError("the rank has ended")

    monkeypatch.setattr(attaching, "carry", refused)
    monkeypatch.setattr(Session, "client", lambda self: EndsLate(self.endpoint, environ=self.environ))
    served.do(lambda service: service.add("digits", state="RUNNING", uid=os.getuid()))
    done = orch("attach", "digits")
    assert (done.code, f" is {end['state']}" in done.err) == (code, True), done.err
    assert EndsLate.looks >= 2


def test_an_interactive_job_is_submitted_waited_for_and_attached_to(
    orch: Orch, served: ServedFake, typed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")

    def starts() -> None:
        wait_until("it is submitted", lambda: served.do(lambda service: service.requests))
        served.do(lambda service: [service.set(job_id, state="RUNNING") for job_id in service._jobs])
        os.write(typed, FAIL)

    starting = threading.Thread(target=starts)
    starting.start()
    done = orch("run", "-i", "--gpu", "2", "--idle-limit", "4h", "--", "bash", "-l")
    starting.join()
    assert done.code == 3, done.err
    (request,) = served.do(lambda service: service.requests)
    job = json.loads(request.yaml)
    assert job["interactive"] == {"idle_limit": "4h"}
    assert job["env"] == {"TERM": "xterm-256color"}
    assert (job["preemptible"], job["report"]) == (False, False)
    assert set(job["retry"]["max_restarts"].values()) == {0}
    assert "~. detaches" in done.err


@pytest.mark.parametrize(("end", "code"), [({"state": "SUCCEEDED"}, 0), ({"state": "FAILED", "exit_code": 3}, 3)])
@pytest.mark.parametrize("seen_running", [True, False])
def test_a_command_that_ends_before_the_terminal_is_attached_is_shown_all_the_same(
    orch: Orch, served: ServedFake, monkeypatch: pytest.MonkeyPatch, end: dict[str, Any], code: int, seen_running: bool
) -> None:
    def ends(service: Any) -> None:
        for job_id in service._jobs:
            service.write(job_id, "hello")
            service.set(job_id, **end)

    class EndsFirst(Client):
        """Client that ends the rank between its request for the job and its request for a session."""

        def session(self, *_: Any, **__: Any) -> Any:
            served.do(ends)
            raise RefusedError("the rank does not run")

    monkeypatch.setattr(Session, "client", lambda self: EndsFirst(self.endpoint, environ=self.environ))

    def runs() -> None:
        wait_until("it is submitted", lambda: served.do(lambda service: service.requests))
        served.do(
            lambda service: [service.set(i, state="RUNNING") for i in service._jobs] if seen_running else ends(service)
        )

    running = threading.Thread(target=runs)
    running.start()
    done = orch("run", "-i", "--gpu", "0", "--", "echo", "hello")
    running.join()
    assert (done.code, done.out) == (code, "hello\n"), done.err
    assert f" {end['state']}" in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-i", "--json"), "--interactive shows the command itself"),
        (("-i", "--follow"), "--interactive shows the command itself"),
        (("--idle-limit", "1h"), "add --interactive"),
    ],
)
def test_options_that_do_not_go_together(orch: Orch, served: ServedFake, options: tuple[str, ...], said: str) -> None:
    done = orch("run", *options, "--", "bash")
    assert (done.code, said in done.err) == (2, True), done.err
    assert served.do(lambda service: service.requests) == []
