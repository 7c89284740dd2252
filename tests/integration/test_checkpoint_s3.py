"""Checkpoints on a real S3 server, a process on loopback: by hand, under faults, and those of a job."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import torch

from orchestrator.checkpoint.repository.repository import CheckpointRepository
from tests.support.stack import Stack, wait_until

if importlib.util.find_spec("s3fs") is None or importlib.util.find_spec("moto") is None:
    pytest.skip("needs s3fs and moto[server]: pip install -e '.[s3]' 'moto[server]'", allow_module_level=True)

KEYS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
SERVER = """
import socket, sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.port, flush=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """Start an S3 server with a bucket named ``bucket``; yield the environment variables that reach it."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        address = f"http://127.0.0.1:{int(process.stdout.readline())}"
        urlopen(Request(f"{address}/bucket", method="PUT"), timeout=300).close()
        yield {**KEYS, "AWS_ENDPOINT_URL": address}
    finally:
        process.kill()
        process.communicate()


def store(s3: dict[str, str], name: str, **options: object) -> CheckpointRepository:
    return CheckpointRepository(f"s3://bucket/{name}", environ=s3, **options)  # type: ignore[arg-type]


@pytest.mark.rare
def test_a_writer_that_is_killed_leaves_a_good_one(s3: dict[str, str]) -> None:
    script = (
        "import sys, torch; from orchestrator.checkpoint.repository.repository import CheckpointRepository\n"
        "store = CheckpointRepository('s3://bucket/killed', attempt=int(sys.argv[1]), keep=3)\n"
        "step = 0\n"
        "while True:\n"
        "    step += 1\n"
        "    store.save({'weights': torch.full((500_000,), float(step))}, step=step)\n"
        "    print(step, flush=True)\n"
    )
    environ = {**os.environ, **s3}
    done = 0
    for attempt in (1, 2):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(attempt)], env=environ, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        done = next(int(line) for line in process.stdout if int(line) >= 2)
        process.send_signal(signal.SIGKILL)
        done = max([done, *(int(line) for line in process.stdout.read().split())])
        process.wait()
    loaded = store(s3, "killed", attempt=3).load_latest()
    assert loaded is not None
    assert loaded.attempt == 2
    assert loaded.step >= done
    assert torch.equal(loaded.state["weights"], torch.full((500_000,), float(loaded.step)))


SCRIPT = """
import sys, torch
from orchestrator.train import context
ctx = context()
loaded = ctx.load()
start = 0 if loaded is None else loaded.step
print(f"begins at {start}", flush=True)
for step in range(start + 1, start + 4):
    ctx.save({"weights": torch.full((1000,), float(step))}, step=step)
    ctx.report(step=step)
"""


def test_a_job_saves_there_and_another_begins_with_it(stack: Stack, s3: dict[str, str], tmp_path: Path) -> None:
    spec = {
        "version": 1,
        "name": "remote",
        "entrypoint": "python train.py",
        "resources": {"num_workers": 1, "resources_per_worker": {"gpu": 0, "cpu": 0.1}},
        "checkpoint": {"storage_path": "s3://bucket/jobs"},
        "env": s3,
    }
    first = stack.submit(json.dumps(spec), tmp_path, train=SCRIPT)
    job = stack.wait(first)
    assert job.state == "SUCCEEDED", stack.log(first)
    found = wait_until("the last snapshot is on storage", lambda: stack.client.checkpoints(first, verify=True))
    assert found[0].path.startswith(f"s3://bucket/jobs/{first}/step-000000000003")
    assert found[0].valid
    (tmp_path / "job.yaml").write_text(json.dumps(spec))
    done = stack.orch("submit", "job.yaml", "--resume-from", f"{first}@3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    second = done.stdout.strip()
    assert stack.wait(second).state == "SUCCEEDED"
    assert "begins at 3" in stack.log(second)
    would = stack.client.prune(older_than_seconds=0, dry_run=True)
    assert {first, second} <= set(would.removed)
    assert {f"s3://bucket/jobs/{first}", f"s3://bucket/jobs/{second}"} <= set(would.kept)
