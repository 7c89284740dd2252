"""`up`, `down`, `serve`, `doctor`, `demo`: what reaches the daemon's code, and what comes back."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api.errors import RefusedError
from orchestrator.api.launch import DemoOptions, Finding, Level, ServeOptions, UpReply, serve_arguments
from orchestrator.cli.commands import machine
from tests.unit.cli.test_submit import module

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.api.testing import ServedFake
    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]

EVERY_OPTION = ServeOptions(
    simulate_gpus=4,
    ray_address="127.0.0.1:6379",
    with_prometheus=True,
    group="ml",
    listen="127.0.0.1:8265",
    read_listen="127.0.0.1:0",
    token_file="/run/token",
)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The daemon's functions, taking note of what they are given."""
    seen: dict[str, Any] = {}

    def up(settings: object, options: ServeOptions) -> UpReply:
        seen["up"] = options
        started = options.simulate_gpus != 99
        return UpReply(pid=42, started=started, seconds=1.5, address="/s", read_address="127.0.0.1:9476", log_file="/l")

    def serve(settings: object, options: ServeOptions) -> int:
        seen["serve"] = options
        return 0

    def examine(settings: object) -> list[Finding]:
        return seen.get("findings", [Finding(level=Level.OK, what="Python 3.11")])

    def run_demo(options: DemoOptions) -> int:
        seen["demo"] = options
        return 1

    for name, function in (("up", up), ("serve", serve), ("doctor.examine", examine), ("demo.run_demo", run_demo)):
        place, _, attribute = name.partition(".")
        monkeypatch.setitem(sys.modules, f"orchestrator.daemon.{place}", module(**{attribute or place: function}))
    return seen


def test_up(orch: Orch, daemon: dict[str, Any], home: object) -> None:
    done = orch("up")
    assert (done.code, done.out) == (0, "the daemon is ready (process 42, 1.5s)\n")
    assert done.err == "metrics: http://127.0.0.1:9476/metrics\n"
    assert daemon["up"] == ServeOptions()
    assert orch("up", "-q").err == ""
    assert orch("up", "--simulate-gpus", "99").out == "the daemon runs already (process 42)\n"
    assert orch("up", "--json").json == {
        "pid": 42, "started": True, "seconds": 1.5, "address": "/s", "read_address": "127.0.0.1:9476",
        "prometheus_url": "", "alertmanager_url": "", "log_file": "/l",
    }  # fmt: skip


def test_serve_takes_what_up_takes(orch: Orch, daemon: dict[str, Any], home: object) -> None:
    line = serve_arguments(EVERY_OPTION)
    assert orch("serve", *line).code == 0
    assert orch("up", *line).code == 0
    assert daemon["serve"] == daemon["up"] == EVERY_OPTION


texts = st.text(alphabet=st.characters(exclude_categories=("Cs", "Cc")), max_size=10)


@given(
    st.builds(
        ServeOptions, simulate_gpus=st.integers(0, 64), ray_address=texts, with_prometheus=st.booleans(), group=texts,
        listen=texts, read_listen=texts, token_file=texts,
    )
)  # fmt: skip
def test_a_detached_daemon_is_started_with_the_same_options(options: ServeOptions) -> None:
    from orchestrator.cli.main import run

    seen: list[ServeOptions] = []

    def serve(_: object, given: ServeOptions) -> int:
        seen.append(given)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "orchestrator.daemon.serve", module(serve=serve))
        assert run(["serve", *serve_arguments(options)]) == 0
    assert seen == [options]


def test_where_metrics_are_read_comes_from_the_settings(
    orch: Orch, daemon: dict[str, Any], home: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCH_METRICS_ADDRESS", "::1")
    monkeypatch.setenv("ORCH_METRICS_PORT", "1234")
    orch("up")
    assert daemon["up"].read_listen == "[::1]:1234"
    orch("up", "--read-listen", "")
    assert daemon["up"].read_listen == ""
    monkeypatch.setenv("ORCH_METRICS_PORT", "many")
    done = orch("up")
    assert done.code == 2
    assert "ORCH_METRICS_PORT" in done.err


def test_an_up_that_fails(orch: Orch, home: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def up(*_: object) -> UpReply:
        raise RefusedError("the daemon did not start:\nlast line of its log", hint="`orch doctor` looks further")

    monkeypatch.setitem(sys.modules, "orchestrator.daemon.up", module(up=up))
    done = orch("up")
    assert done.code == 5
    assert "last line of its log" in done.err


def test_down(orch: Orch, served: ServedFake) -> None:
    job = served.do(lambda service: service.add(state="RUNNING"))
    stopper = stop_when_asked(served)
    done = orch("down")
    stopper.join(timeout=10)
    assert (done.code, done.out) == (0, "the daemon has stopped\n")
    assert f"running on without it: {job.id}" in done.err
    assert served.do(lambda service: service.calls[0][1][0]) is False
    assert orch("down").out == "no daemon is running\n"
    assert orch("down", "--json").json == {"running": [], "stopped": [], "was_running": False}


def stop_when_asked(served: ServedFake) -> threading.Thread:
    asked = threading.Event()
    original = served.service.shutdown

    async def shutdown(**arguments: Any) -> Any:
        reply = await original(**arguments)
        asked.set()
        return reply

    served.service.shutdown = shutdown  # type: ignore[method-assign]

    def stop() -> None:
        assert asked.wait(10)
        served.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    return thread


def test_down_with_jobs(orch: Orch, served: ServedFake) -> None:
    job = served.do(lambda service: service.add(state="RUNNING"))
    stopper = stop_when_asked(served)
    done = orch("down", "--stop-jobs", "--json")
    stopper.join(timeout=10)
    assert done.json == {"running": [], "stopped": [job.id], "was_running": True}


def test_a_daemon_that_will_not_go(orch: Orch, served: ServedFake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DOWN_SECONDS", 0.2)
    done = orch("down")
    assert done.code == 4
    assert "still answers" in done.err
    assert "orch doctor" in done.err


def test_doctor(orch: Orch, daemon: dict[str, Any], home: object) -> None:
    assert orch("doctor") == (0, "ok      Python 3.11\n", "")
    daemon["findings"] = [
        Finding(level=Level.WARNING, what="little disk", remedy="orch prune"),
        Finding(level=Level.ERROR, what="no Ray", remedy="pip install ray"),
    ]
    done = orch("doctor")
    assert done.code == 5
    assert done.out.splitlines() == [
        "warning little disk",
        "        orch prune",
        "error   no Ray",
        "        pip install ray",
    ]
    answer = orch("doctor", "--json")
    assert answer.code == 5
    assert answer.json["healthy"] is False
    assert answer.json["findings"][1] == {"level": "error", "what": "no Ray", "remedy": "pip install ray"}


def test_demo(orch: Orch, daemon: dict[str, Any]) -> None:
    assert orch("demo", "--json").code == 1, "the demo's own result"
    assert daemon["demo"] == DemoOptions(json=True)
