"""docs/api.md is correct: its examples run, and its tables match the code."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.errors import ERRORS
from orchestrator.api.server.testing import serve_fake
from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from orchestrator.api.server.testing import FakeService

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text()


EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_example_of_many_jobs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    monkeypatch.delenv("ORCH_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    _, example = EXAMPLES
    with serve_fake(tmp_path / "run", owner_uid=os.getuid()) as served:
        exec(compile(example, "docs/api.md", "exec"), {})
        jobs = served.do(lambda service: set(service._jobs))
    assert set(capsys.readouterr().out.split()) == jobs
    assert len(jobs) == 100


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    monkeypatch.delenv("ORCH_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("name: digits\nentrypoint: python train.py\n")
    example, _ = EXAMPLES

    def finish(service: FakeService) -> None:
        (job_id,) = list(service._jobs)
        service.write(job_id, "accuracy 0.98")
        service.set(job_id, state="SUCCEEDED", restarts=1)

    with serve_fake(tmp_path / "run", owner_uid=os.getuid()) as served:

        def finish_when_waited_for() -> None:
            deadline = time.monotonic() + 300
            while not served.do(lambda service: service._waiters):
                assert time.monotonic() < deadline
                time.sleep(0.005)
            served.do(finish)

        thread = threading.Thread(target=finish_when_waited_for)
        thread.start()
        exec(compile(example, "docs/api.md", "exec"), {})
        thread.join(timeout=PATIENCE_SECONDS)
    assert capsys.readouterr().out == "SUCCEEDED 1 ()\n0 accuracy 0.98\n"


def test_the_table_of_statuses_is_the_code_s() -> None:
    written = {
        int(code): {int(status) for status in statuses.split(",")}
        for code, statuses in re.findall(r"^\| (\d+) \| [^|]+ \| ([\d, ]+) \|$", PAGE, re.MULTILINE)
    }
    meant: dict[int, set[int]] = {}
    for cls in ERRORS.values():
        meant.setdefault(cls.exit_code, set()).add(cls.http_status)
    assert written == meant
