"""A failure as users see it: its sentence, the log's last lines and advice, sent to a web hook, with log policies applied."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.ledger import TINY
from tests.support.stack import Stack, wait_until

TRAIN = """
import sys
print("about to fail", flush=True)
if sys.argv[1] == "import":
    import no_such_module
if sys.argv[1] == "slow":
    print("a" * 40 + "!", flush=True)
raise ValueError("flaky network")
"""


class Hook(ThreadingHTTPServer):
    """Web hook that refuses the first message and accepts the others."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.came: list[dict[str, Any]] = []


class _Answer(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        self.server.came.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(503 if len(self.server.came) == 1 else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def hook() -> Iterator[Hook]:
    server = Hook()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def submit(stack: Stack, directory: Path, kind: str, **keys: Any) -> str:
    spec = {"version": 1, "name": f"fails-{kind}", "entrypoint": f"python train.py {kind}", **keys}
    resources = {"resources": {"num_workers": 1, "resources_per_worker": TINY}}
    return stack.submit(json.dumps(spec | resources), directory, train=TRAIN)


def test_a_failure_is_told_with_sentence_log_and_advice_and_to_the_hook(
    stack: Stack, tmp_path: Path, hook: Hook
) -> None:
    url = f"http://127.0.0.1:{hook.server_port}/x"
    job_id = submit(stack, tmp_path / "work", "import", notify=[{"url": url, "on": ["FAILED"]}])
    assert stack.wait(job_id).state == "FAILED"
    shown = stack.orch("status", job_id).stdout
    for words in ("rank 0: a Python module is missing", "| about to fail", "install it into the interpreter"):
        assert words in shown
    assert "a Python module is missing" in stack.orch("events", job_id).stdout
    wait_until("the hook was told again", lambda: len(hook.came) == 2)
    assert hook.came[0] == hook.came[1]
    assert (hook.came[0]["failure_code"], hook.came[0]["state"]) == ("import_error", "FAILED")


def test_log_policies_decide_and_one_that_never_ends_stops_nobody(stack: Stack, tmp_path: Path) -> None:
    quick = {"backoff": {"initial": "0s", "max": "0s"}, "max_no_progress": 1}
    restarted = submit(
        *(stack, tmp_path / "one", "flaky"),
        retry={**quick, "log_policies": [{"pattern": "flaky", "action": "restart"}]},
    )
    stuck = submit(
        *(stack, tmp_path / "two", "slow"),
        retry={**quick, "log_policies": [{"pattern": "(a+)+$", "action": "restart"}]},
    )
    one, two = stack.wait(restarted), stack.wait(stuck)
    assert (one.state, one.restarts) == ("FAILED", 1)
    assert "1 restart in a row brought no newer checkpoint" in one.reason
    assert (two.state, two.restarts) == ("FAILED", 0)
    assert two.failure is not None
    assert "the log policy '(a+)+$' took longer than 2s" in two.failure.advice
