"""The examples run as they are, and their job files are accepted."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from orchestrator.api.views import JobView
from orchestrator.spec.job import parse_job
from orchestrator.train.trainer.config.config import trainer_findings
from tests.support.stack import PATIENCE_SECONDS, Stack, wait_until

pytestmark = pytest.mark.rare

EXAMPLES = Path(__file__).parents[2] / "examples"
ROOT = EXAMPLES.parent


def run(example: str, *arguments: str, cwd: Path) -> str:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / example / "train.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_digits_are_learned_and_gone_on_with(tmp_path: Path) -> None:
    first = run("digits", "--epochs", "2", cwd=tmp_path)
    assert "on 360 images not trained on" in first
    again = run("digits", "--epochs", "6", cwd=tmp_path)
    accuracy = float(again.split("accuracy ")[1].split()[0])
    assert accuracy > 0.9
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert steps[-1].startswith(f"step-{6 * (1437 // 32):012d}")


def test_the_gpt_learns_to_write(tmp_path: Path) -> None:
    out = run("gpt", *("--steps", "20", "--depth", "1", "--context", "32", "--shards", "1"), cwd=tmp_path)
    assert "20 steps of 512 bytes" in out
    assert 2 < float(out.split(" bits per byte")[0].splitlines()[-1]) < 7.5, "knowing nothing costs 8 bits"
    assert "\ndef " in out


def test_the_mlps_have_the_parameters_that_they_say() -> None:
    spec = importlib.util.spec_from_file_location("mlp_example", EXAMPLES / "mlp" / "train.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, expected in {"medium": 54_403, "large": 2_021_379}.items():
        assert (
            sum(parameter.numel() for parameter in script.mlp(name).parameters()) == expected == script.PARAMETERS[name]
        )


def test_the_mlp_learns(tmp_path: Path) -> None:
    out = run("mlp", *("--epochs", "2", "--samples", "2000", "--batch-size", "32"), cwd=tmp_path)
    assert "| medium | 1 |" in out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_job_files_are_accepted(path: Path) -> None:
    job = parse_job(path.read_text())
    assert job is not None
    assert 3 <= len((path.parent / "README.md").read_text().splitlines()) <= 6, "an example is told in a few lines"


def test_the_recipe_keeps_the_global_batch() -> None:
    """Eight ranks accumulate 4 batches of 8, two ranks 16: 256 samples each."""
    from orchestrator.train.trainer.config.config import MultiGPUConfig
    from orchestrator.train.trainer.engine.trainer import accumulation

    for name, ranks, accumulated in (("eight", 8, 4), ("job", 2, 16)):
        job = parse_job((EXAMPLES / "eight_to_two" / f"{name}.yaml").read_text(), rules=(trainer_findings,))
        assert job.resources.num_workers == ranks
        assert accumulation(MultiGPUConfig.from_dict(job.trainer), ranks) == accumulated


@pytest.mark.parametrize(
    ("example", "arguments", "said"),
    [
        (
            "gpt",
            "--steps 12 --depth 1 --context 32 --shards 1",
            r"12 steps of 1,024 bytes \(2 ranks x 16 x 32, 1 accum",
        ),
        ("mlp", "--model medium --epochs 1 --samples 2000", r"\| medium \| 2 \|"),
        ("huggingface", "--epochs 2 --batch-size 64", r"loss \d\.\d+ in the first epoch, \d\.\d+ in the last"),
        (
            "eight_to_two",
            "--depth 1 --shards 1 --context 64 --steps 4 --lr 0.01",
            r"4 steps of 16,384 bytes \(2 ranks x 8 x 64, 16 accumulated\)(.|\n)*[\d,]+ bytes/s, MFU unknown",
        ),
    ],
    ids=["gpt", "mlp", "huggingface", "eight_to_two"],
)
def test_under_orch(stack: Stack, example: str, arguments: str, said: str) -> None:
    """Each example runs as its README says, with less work."""
    if example == "huggingface":
        pytest.importorskip("transformers")
    changed = ("--set", f"entrypoint=python train.py {arguments}", "--set", "resources.resources_per_worker.cpu=0.5")
    done = stack.orch("submit", "job.yaml", *changed, cwd=EXAMPLES / example)
    assert done.returncode == 0, done.stderr
    job = stack.wait(done.stdout.strip())
    log = stack.log(job.id)
    assert job.state == "SUCCEEDED", log
    assert re.search(said, log), log
    assert job.progress is not None
    assert (job.progress.metrics["samples_per_second"] or 0) > 0
    assert job.checkpoint is not None


TENSORFLOW_PYTHON = os.environ.get("ORCH_TEST_TENSORFLOW") or (sys.executable if find_spec("tensorflow") else "")
"""An interpreter with TensorFlow, torch and orch's extra `train`: `make tensorflow` makes one."""


def step_or_end(stack: Stack, job_id: str, step: int) -> JobView:
    """Return the job once it has reached the step, or has ended before."""

    def reached() -> JobView | None:
        job = stack.job(job_id)
        return job if job.is_terminal or (job.progress and (job.progress.step or 0) >= step) else None

    found = wait_until(f"{job_id} reaches step {step}", reached)
    assert isinstance(found, JobView)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not TENSORFLOW_PYTHON, reason="`make tensorflow`, or ORCH_TEST_TENSORFLOW=an interpreter with it")
def test_killed_tensorflow_ranks_go_on_from_the_last_save_and_end_with_the_same_weights(stack: Stack) -> None:
    """Each of the two ranks is killed; the first is the one to whose port the others connect."""
    changed = ("--set", f"entrypoint={TENSORFLOW_PYTHON} train.py --steps 4000 --lr 0.1")
    done = stack.orch("submit", "job.yaml", *changed, cwd=EXAMPLES / "tensorflow")
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.strip()
    for rank, step in ((0, 200), (1, 600)):
        running = step_or_end(stack, job_id, step)
        assert running.state == "RUNNING", stack.log(job_id)
        (pid,) = (gpu.pid for gpu in running.gpus if gpu.rank == rank)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    job = stack.wait(job_id)
    log = stack.log(job_id)
    assert job.state == "SUCCEEDED", log
    assert [attempt.state for attempt in job.attempts] == ["FAILED", "FAILED", "SUCCEEDED"]
    for attempt, step in ((2, 200), (3, 600)):
        said = re.findall(r"rank \d goes on after step (\d+)", stack.log(job_id, attempt=attempt))
        assert len(said) == 2, log
        assert said[0] == said[1], "one rank is ahead of the other"
        assert int(said[0]) >= step - 50, said
    ended = re.findall(r"rank \d of 2: (.*)", log)
    assert ended == ["2.000, -1.000, 0.500, 3.000"] * 2, log
    assert job.checkpoint is not None
    assert job.checkpoint.step == 4000
    assert job.progress is not None
    assert job.progress.metrics["loss"] < 1e-3
