"""Commands of a user against a real daemon: runs without a file, secrets, dry runs, mistakes, examples of every kind."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.support.stack import Stack, wait_until

SMALL = "resources: {num_workers: 1, resources_per_worker: {gpu: 0, cpu: 0.1}}"


def test_a_run_without_a_file_follows_the_output_and_ends_with_the_jobs_result(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    done = stack.orch(
        "run", "-n", "2", "--gpu", "0", "--cpu", "0.1", "--follow", "--", "python", "hello.py", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2" in done.stdout
    assert "rank 1 of 2" in done.stdout


def test_a_secret_reaches_the_script_and_nothing_else(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nprint('token is', os.environ['MY_TOKEN'], flush=True)\n")
    (tmp_path / "job.yaml").write_text(
        f"version: 1\nname: secret\nentrypoint: python train.py\nsecrets: [MY_TOKEN]\n{SMALL}\n"
    )
    refused = stack.orch("submit", "job.yaml", cwd=tmp_path)
    assert refused.returncode == 2
    assert "MY_TOKEN" in refused.stderr
    stack.environ["MY_TOKEN"] = "hunter2-very-secret"
    try:
        done = stack.orch("submit", "job.yaml", "--wait", cwd=tmp_path)
    finally:
        del stack.environ["MY_TOKEN"]
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.split()[0]
    assert "token is ***" in stack.log(job_id)
    kept = [p for p in stack.settings.paths.job(job_id).rglob("*") if p.is_file()]
    assert not any(b"hunter2" in p.read_bytes() for p in kept)
    assert not stack.settings.paths.secrets(job_id).exists()


def test_a_dry_run_says_where_it_would_run_and_stores_nothing(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text(f"version: 1\nname: dry\nentrypoint: python train.py\n{SMALL}\n")
    before = [job.id for job in stack.client.jobs().jobs]
    done = stack.orch("submit", "job.yaml", "--dry-run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["starts"] == "now"
    assert plan["snapshot_files"] == 2
    assert [job.id for job in stack.client.jobs().jobs] == before


def test_every_mistake_of_a_file_is_told_at_once_with_its_place(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "version: 1\nname: wrong\nentrypoint: torchrun --nproc-per-node 4 train.py\nworkdir: .\n"
        "resources: {gpus_per_worker: 1}\npriority: 900\n"
    )
    before = len(stack.client.jobs().jobs)
    done = stack.orch("submit", "job.yaml", cwd=tmp_path)
    assert done.returncode == 2
    for expected in ("job.yaml:3", "num_workers: 4", "working_dir", "job.yaml:5", "job.yaml:6"):
        assert expected in done.stderr
    assert len(stack.client.jobs().jobs) == before


def test_the_working_directory_is_the_one_of_the_submission(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("data/\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "large").write_text("x")
    (tmp_path / "value.txt").write_text("as submitted")
    (tmp_path / "train.py").write_text(
        "import os\nprint(open('value.txt').read(), os.path.exists('data'))\nopen('written', 'w').write('here')\n"
    )
    (tmp_path / "job.yaml").write_text(f"version: 1\nname: snap\nentrypoint: python train.py\npriority: 1\n{SMALL}\n")
    done = stack.orch("submit", "job.yaml", cwd=tmp_path)
    (tmp_path / "value.txt").write_text("changed afterwards")
    job = stack.wait(done.stdout.strip())
    assert "as submitted False" in stack.log(job.id)
    assert (Path(job.working_dir) / "written").read_text() == "here"
    assert not (tmp_path / "written").exists()


def test_what_cannot_be_taken_along_is_refused_with_its_name(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text(f"version: 1\nname: odd\nentrypoint: python train.py\n{SMALL}\n")
    os.mkfifo(tmp_path / "pipe")
    done = stack.orch("submit", "job.yaml", cwd=tmp_path)
    assert done.returncode == 5
    assert "neither a file" in done.stderr


def test_output_is_followed_live_and_can_be_read_after_the_end(stack: Stack, tmp_path: Path) -> None:
    script = "import time, pathlib\nprint('first', flush=True)\nwhile not pathlib.Path('go').exists(): time.sleep(0.02)\nprint('last')\n"
    job_id = stack.submit(
        f"version: 1\nname: talk\nentrypoint: python train.py\nworking_dir: .\n{SMALL}\n", tmp_path, train=script
    )
    wait_until("the first line is there", lambda: "first" in stack.log(job_id))
    assert "last" not in stack.log(job_id)
    follower = stack.client.logs(job_id, follow=True)
    assert next(follower).text == "first"
    (Path(stack.job(job_id).working_dir) / "go").touch()
    assert [line.text for line in follower] == ["last"]
    assert "first\nlast" in stack.log(job_id)


def test_other_commands_get_the_same_environment(stack: Stack, tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "run.sh").write_text('echo "rank $RANK of $WORLD_SIZE in $ORCH_JOB_ID"; python -c "print(6 * 7)"\n')
    job = stack.wait(stack.submit(f"version: 1\nname: shell\nentrypoint: bash run.sh\n{SMALL}\n", tmp_path))
    assert job.state == "SUCCEEDED", job.failure
    assert f"rank 0 of 1 in {job.id}" in stack.log(job.id)
    assert "42" in stack.log(job.id)


def test_pause_saves_and_resume_goes_on(stack: Stack, tmp_path: Path) -> None:
    script = """
import time
from orchestrator.train import context
ctx = context()
saved = ctx.load()
step = saved.step if saved else 0
last = step + 20 if saved else 1_000_000
print("begins at", step, flush=True)
while step < last:
    step += 1
    time.sleep(0.01)
    ctx.report(step=step, total_steps=last)
    if ctx.should_stop():
        ctx.save({"step": step}, step=step)
        raise SystemExit(0)
"""
    job_id = stack.submit(f"version: 1\nname: rest\nentrypoint: python train.py\n{SMALL}\n", tmp_path, train=script)
    stack.wait_step(job_id, 20)
    assert stack.orch("pause", job_id).returncode == 0
    paused = stack.wait_state(job_id, "SUSPENDED")
    assert paused.checkpoint is not None
    assert stack.orch("resume", job_id).returncode == 0
    job = stack.wait(job_id)
    assert job.state == "SUCCEEDED", job.failure
    assert f"begins at {paused.checkpoint.step}" in stack.log(job_id, attempt=2)


def test_a_job_of_higher_priority_has_others_stopped_which_save_and_go_on_after_it(
    stack: Stack, tmp_path: Path
) -> None:
    script = """
import sys, time
from orchestrator.train import context
ctx = context()
saved = ctx.load()
step = saved.step if saved else 0
last = step + 20 if saved or sys.argv[1:] else 1_000_000
print("begins at", step, flush=True)
while step < last:
    step += 1
    time.sleep(0.01)
    ctx.report(step=step, total_steps=last)
    if ctx.should_stop():
        ctx.save({"step": step}, step=step)
        raise SystemExit(0)
"""
    whole = "resources: {num_workers: 1, resources_per_worker: {gpu: 4, cpu: 0.1}}\n"
    head = "version: 1\nname: {}\nentrypoint: python train.py {}\npriority: {}\n"
    low = stack.submit(head.format("low", "", 40) + whole, tmp_path, train=script)
    stack.wait_step(low, 20)
    high = stack.submit(head.format("high", "once", 60) + whole, tmp_path, train=script)
    assert stack.wait(high).state == "SUCCEEDED"
    job = stack.wait(low)
    assert (job.state, job.attempt) == ("SUCCEEDED", 2), job.failure
    stopped = [event.summary for event in stack.client.events(low) if event.kind == "stop_requested"]
    assert len(stopped) == 1
    assert f"for {high}, priority 60" in stopped[0]
    assert job.checkpoint is not None
    assert "begins at 0" not in stack.log(low, attempt=2)


def test_max_duration_ends_a_job_as_failed_with_its_class(stack: Stack, tmp_path: Path) -> None:
    job_id = stack.submit(
        f"version: 1\nname: long\nentrypoint: python train.py\nmax_duration: 1s\nstop_duration: 1s\n{SMALL}\n",
        tmp_path,
        train="import time\ntime.sleep(600)\n",
    )
    job = stack.wait(job_id)
    assert job.state == "FAILED"
    assert job.failure is not None
    assert job.failure.failure_class == "timeout"
