"""`orch trackio`: the dashboard's address, and the messages where there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest

from orchestrator.api.curve_views import TrackerView

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orchestrator.api.server.testing import ServedFake
    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]


def test_a_job_that_is_not_in_trackio_is_told_how_to_be(orch: Orch, served: ServedFake) -> None:
    job = served.do(lambda fake: fake.add("digits"))
    done = orch("trackio", job.id)
    assert done.code == 2
    assert "trackers: [trackio]" in done.err


def test_a_job_that_has_nothing_there_yet_is_told_why(orch: Orch, served: ServedFake) -> None:
    tracker = TrackerView(name="trackio", problem="DatabaseError: locked")
    job = served.do(lambda fake: fake.add("digits", trackers=(tracker,)))
    done = orch("trackio", job.id)
    assert done.code == 5
    assert f"{job.id} has nothing in Trackio yet: DatabaseError: locked" in done.err


def test_status_says_which_tracker_has_not_begun_and_why(orch: Orch, served: ServedFake) -> None:
    trackers = (
        TrackerView(name="wandb", problem="CommError: connection refused"),
        TrackerView(name="tensorboard", where="tensorboard --logdir x", points=17, waiting=2),
    )
    job = served.do(lambda fake: fake.add("digits", trackers=trackers))
    out = orch("status", job.id).out
    for line in (
        "wandb: not begun",
        "wandb failed: CommError: connection refused",
        "tensorboard: tensorboard --logdir x (17 points, 2 on their way)",
    ):
        assert line in out


SERVE = """
import sys
from orchestrator.cli.commands.runs import _serve
from orchestrator.cli.session import Session
sys.exit(_serve(Session(), "digits", browser=False))
"""


def test_the_address_is_the_only_line_and_the_dashboard_answers_there(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    import httpx

    environ = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "ORCH_HOME": str(tmp_path / "home")}
    with subprocess.Popen([sys.executable, "-c", SERVE], env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        try:
            assert urlsplit(address).hostname == "127.0.0.1"
            assert parse_qs(urlsplit(address).query)["project"] == ["digits"]
            assert httpx.get(address, trust_env=False, follow_redirects=True).status_code == 200
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.communicate()[0]
    assert rest == ""
