"""`orch import` prints a job.yaml and names what it left out; it submits nothing and asks no daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def test_what_cannot_be_imported(orch: Orch, home: Path) -> None:
    refused = orch("import", "cd x && torchrun train.py")
    assert (refused.code, refused.out) == (2, "")
    assert "next:" in refused.err
    (home / "binary").write_bytes(b"\0\1")
    assert "no shell script" in orch("import", str(home / "binary")).err
    assert orch("import", "srun -t soon python train.py").code == 2
    assert orch("import", "-o", str(home / "none" / "x"), "python t.py").code == 2
    assert orch("import").code == 2
