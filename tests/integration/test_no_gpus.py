"""A machine without GPUs, and without simulated ones."""

from __future__ import annotations

from pathlib import Path

from tests.support.stack import Stack


def test_a_gpu_that_is_not_there_is_refused_with_the_remedy(breakable: Stack, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text("version: 1\nname: gpu\nentrypoint: python train.py\n")
    done = breakable.orch("submit", "job.yaml", cwd=tmp_path)
    assert done.returncode == 5
    assert "gpu: 0" in done.stderr
    assert "--simulate-gpus" in done.stderr
