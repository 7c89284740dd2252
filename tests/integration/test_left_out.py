"""A script needs data that .gitignore names: `orch submit` reports what is left out, and how to include it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.stack import Stack

SCRIPT = """
with open("data/train.bin", "rb") as file:
    print(len(file.read()), "bytes of data", flush=True)
"""
SPEC = """
version: 1
name: leftout
entrypoint: python train.py
resources: {num_workers: 1, resources_per_worker: {gpu: 0, cpu: 0.1}}
"""
SAID = "1 file, 2.1 MiB left out by .gitignore"


def test_what_gitignore_leaves_out_is_told_before_and_after(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text(SPEC)
    (tmp_path / ".gitignore").write_text("*.bin\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.bin").write_bytes(bytes(2_200_000))
    planned = stack.orch("submit", "job.yaml", "--dry-run", cwd=tmp_path)
    assert SAID in planned.stdout
    done = stack.orch("submit", "job.yaml", "--json", cwd=tmp_path)
    reply = json.loads(done.stdout)
    assert SAID in done.stderr
    assert reply["left_out"] == {
        "files": 1,
        "size_bytes": 2_200_000,
        "by": [".gitignore"],
        "largest": ["data/train.bin"],
        "more": False,
        "links_out": 0,
        "links": [],
    }
    job = stack.wait(reply["job_id"])
    assert job.failure is not None
    assert (job.state, job.failure.failure_class) == ("FAILED", "user")
    assert ".gitignore leaves out of the job's copy" in job.failure.sentence
    assert "!train.bin" in job.failure.advice
    first = stack.client.events(job.id)[0]
    assert SAID in first.summary
    for name, text in (
        ("cold", f"{SPEC}env: {{MALLOC_ARENA_MAX: '2'}}\n"),
        ("shell", SPEC.replace("python train.py", "bash run.sh")),
    ):
        (tmp_path / "run.sh").write_text("python train.py\n")
        (tmp_path / f"{name}.yaml").write_text(text)
        told = json.loads(stack.orch("submit", f"{name}.yaml", "--json", cwd=tmp_path).stdout)
        ended = stack.wait(told["job_id"])
        assert ended.failure is not None
        assert "!train.bin" in ended.failure.advice, name
    (tmp_path / ".orchignore").write_text("!train.bin\n")
    again = json.loads(stack.orch("submit", "job.yaml", "--json", cwd=tmp_path).stdout)
    assert again["left_out"] is None
    assert stack.wait(again["job_id"]).state == "SUCCEEDED"
    assert "2200000 bytes of data" in stack.log(again["job_id"])
