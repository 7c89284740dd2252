"""`orch advise job.yaml`: the job file becomes the script that the advisor runs; what cannot be advised on is told."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from orchestrator.api.errors import BadRequestError
from orchestrator.bench.errors import BenchError
from orchestrator.cli.commands.runs.advising import logs_kept_on_failure, script_of
from orchestrator.spec.job import parse_job

JOB = "version: 1\nname: one\nentrypoint: {}\nresources: {{num_workers: 2, resources_per_worker: {{gpu: {}}}}}\n"


def test_the_script_has_the_job_s_arguments_directory_and_environment(tmp_path: Path) -> None:
    spec = parse_job(
        JOB.format("python train.py --lr 0.1 --from ${checkpoint}", 0) + "working_dir: code\nenv: {A: b}\n"
    )
    (tmp_path / "code").mkdir()
    script = script_of(spec, tmp_path / "job.yaml", {"PATH": str(Path(sys.executable).parent), "HOME": "/h"})
    assert (script.kind, script.target, script.args) == ("script", "train.py", ("--lr", "0.1"))
    assert script.directory == tmp_path / "code"
    assert script.python == str(Path(sys.executable).parent / "python")
    assert script.environ["A"] == "b"
    assert script.environ["HOME"] == "/h"
    assert script.environ["CUDA_VISIBLE_DEVICES"] == "", "a job without GPUs is timed without them"


def test_a_job_with_gpus_sees_them_and_a_full_interpreter_is_taken(tmp_path: Path) -> None:
    script = script_of(parse_job(JOB.format("/usr/bin/python3 -m pkg.train", 1)), tmp_path / "job.yaml", {})
    assert (script.kind, script.target, script.python) == ("module", "pkg.train", "/usr/bin/python3")
    assert "CUDA_VISIBLE_DEVICES" not in script.environ


def test_without_python_on_the_path_orch_s_own_is_taken(tmp_path: Path) -> None:
    assert (
        script_of(parse_job(JOB.format("python t.py", 0)), tmp_path / "job.yaml", {"PATH": ""}).python == sys.executable
    )


@pytest.mark.parametrize(
    ("entrypoint", "more", "message"),
    [
        ("bash run.sh", "", "is no Python script"),
        ("python t.py", "working_dir: nowhere\n", "nowhere is not a directory"),
    ],
)
def test_what_has_no_steps_to_time_is_refused(tmp_path: Path, entrypoint: str, more: str, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        script_of(parse_job(JOB.format(entrypoint, 0) + more), tmp_path / "job.yaml", {})


def test_logs_stay_only_when_an_error_names_them() -> None:
    with logs_kept_on_failure() as removed:
        assert removed.is_dir()
    assert not removed.exists()
    with pytest.raises(KeyboardInterrupt), logs_kept_on_failure() as interrupted:
        raise KeyboardInterrupt
    assert not interrupted.exists()
    for hint in ("name another", "its output is in {}"):
        with pytest.raises(BenchError), logs_kept_on_failure() as empty:
            raise BenchError("failed", hint=hint.format(empty))
        assert not empty.exists(), "nothing was printed"
    with pytest.raises(BenchError) as caught:
        fail_after_output()
    kept = Path(caught.value.message)
    assert (kept / "rank0.log").read_text() == "a traceback"
    shutil.rmtree(kept)


def fail_after_output() -> None:
    with logs_kept_on_failure() as logs:
        (logs / "rank0.log").write_text("a traceback")
        raise BenchError(str(logs), hint=f"its output is in {logs}/rank0.log")
