"""`orch advise job.yaml`: the job file becomes the script that the advisor runs; unsuitable jobs are refused."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.api.errors import BadRequestError
from orchestrator.bench.advisor import script_advice
from orchestrator.bench.plan import BenchError
from orchestrator.cli.commands.bench import advice_overrides, advise_job, logs_kept_on_failure, script_of
from orchestrator.cli.session import Session
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


@pytest.mark.parametrize(
    ("entrypoint", "more", "message"),
    [
        ("bash run.sh", "", "is not a Python script"),
        ("python t.py", "working_dir: nowhere\n", "nowhere is not a directory"),
    ],
)
def test_what_has_no_steps_to_time_is_refused(tmp_path: Path, entrypoint: str, more: str, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        script_of(parse_job(JOB.format(entrypoint, 0) + more), tmp_path / "job.yaml", {})


SCRIPT = """
import torch
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(40):
    optimizer.zero_grad()
    net(torch.randn(16, 8)).sum().backward()
    optimizer.step()
"""
AUTO = "resources: {num_workers: auto, auto: {min: 1, max: 1}, resources_per_worker: {gpu: 0}}\n"


def test_advice_becomes_a_part_of_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"version: 1\nname: one\nentrypoint: {sys.executable} train.py\nworking_dir: {tmp_path}\n{AUTO}")
    (tmp_path / "train.py").write_text(SCRIPT)
    (override,) = advice_overrides(Session(), [str(file)], ())
    assert "advice: worth 1 rank" in capsys.readouterr().err
    spec = parse_job(file.read_text(), overrides=(override,))
    assert spec.resources.auto is not None
    advice = spec.resources.auto.advice
    assert advice is not None
    assert (advice.ranks, advice.efficiency, advice.gradient_bytes) == (1, 1.0, 36)
    assert advice.compute_ms is not None
    assert spec.resources.auto.bounds == (1, 1)


@pytest.mark.rare
def test_a_job_whose_number_of_ranks_is_to_be_advised_can_be_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"version: 1\nname: one\nentrypoint: {sys.executable} train.py\nworking_dir: {tmp_path}\n{AUTO}")
    (tmp_path / "train.py").write_text(SCRIPT)
    assert advise_job(Session(), file, ranks=(1,), precision="fp32", threads=1, as_json=False) == 0
    assert "worth 1 rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "resources", "message"),
    [
        (["a.yaml", "b.yaml"], "", "--advise runs the script of one job file"),
        (["-"], "", "--advise runs the script of one job file"),
        (["job.yaml"], "{num_workers: auto, auto: {min: 65}}", "the advisor tries at most 64 ranks"),
    ],
)
def test_what_cannot_be_advised_on_is_refused(tmp_path: Path, files: list[str], resources: str, message: str) -> None:
    (tmp_path / "job.yaml").write_text(f"version: 1\nname: one\nentrypoint: python t.py\nresources: {resources}\n")
    paths = [name if name == "-" else str(tmp_path / name) for name in files]
    with pytest.raises(BadRequestError, match=message):
        advice_overrides(Session(), paths, ())


def test_a_job_with_gpus_is_not_advised_on_by_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe finds the device that a script computed on: tests/unit/bench/advisor/test_script_advice.py."""
    monkeypatch.setattr(script_advice, "run_script_advisor", lambda *_, **__: SimpleNamespace(device="cpu"))
    file = tmp_path / "job.yaml"
    auto = AUTO.replace("gpu: 0", "gpu: 1")
    file.write_text(f"version: 1\nname: one\nentrypoint: {sys.executable} train.py\nworking_dir: {tmp_path}\n{auto}")
    with pytest.raises(BadRequestError, match="the job asks for GPUs, and its script computed on processors here"):
        advice_overrides(Session(), [str(file)], ())


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
