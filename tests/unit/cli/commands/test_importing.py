"""`orch import` prints a job.yaml and names what it left out; it submits nothing and calls no daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]


def test_a_line_quoted_or_not(orch: Orch) -> None:
    quoted = orch("import", "torchrun --nproc-per-node 4 --bogus=1 train.py --lr 1")
    assert quoted.code == 0
    assert yaml.safe_load(quoted.out)["resources"]["num_workers"] == 4
    assert quoted.err.startswith("note: torchrun --bogus=1: not carried over")
    bare = orch("import", "torchrun", "--nproc-per-node", "4", "--bogus=1", "train.py", "--lr", "1")
    assert bare == quoted


def test_a_script_file_and_the_file_that_it_becomes(orch: Orch, home: Path) -> None:
    script = home / "train.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH -n 2\n#SBATCH -p gpu\nsrun python train.py\n")
    output = home / "job.yaml"
    done = orch("import", "-o", str(output), str(script))
    assert (done.code, done.out) == (0, f"{output}\n")
    assert "--partition=gpu" in done.err
    assert yaml.safe_load(output.read_text())["resources"]["num_workers"] == 2
    assert orch("import", "-o", str(output), str(script)).code == 5
    assert orch("import", "--force", "-o", str(output), str(script)).code == 0
    found = orch("import", "--json", str(script)).json
    assert found["job"] == yaml.safe_load(found["yaml"])
    assert len(found["remarks"]) == 1


def test_a_line_of_sbatch_is_its_script_with_the_options_of_the_line(
    orch: Orch, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    (home / "x.sh").write_text("#!/bin/bash\n#SBATCH -n 2 -t 30\nsrun python train.py --name $1\n")
    done = orch("import", "sbatch --parsable -n 4 --gpus-per-task 1 x.sh one")
    assert done.code == 0, done.err
    job = yaml.safe_load(done.out)
    assert (job["entrypoint"], job["resources"]["num_workers"], job["max_duration"]) == (
        "python train.py --name one",
        4,
        "30m",
    )
    missing = orch("import", "sbatch none.sh")
    assert (missing.code, missing.out) == (2, "")
    assert "none.sh cannot be read" in missing.err


def test_a_file_that_is_not_there_is_no_command(orch: Orch, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    done = orch("import", "train.sbatch")
    assert (done.code, done.out) == (2, "")
    assert f"train.sbatch not found in {home}" in done.err


def test_what_cannot_be_imported(orch: Orch, home: Path) -> None:
    refused = orch("import", "torchrun train.py | sort")
    assert (refused.code, refused.out) == (2, "")
    assert "next:" in refused.err
    (home / "binary").write_bytes(b"\0\1")
    assert "not a shell script" in orch("import", str(home / "binary")).err
    assert orch("import", "srun -t soon python train.py").code == 2
    assert orch("import", "-o", str(home / "none" / "x"), "python t.py").code == 2
    assert orch("import").code == 2
