"""A batch script for Slurm becomes a job.yaml: its allocation is shared among the ranks, its lines are never run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.spec.importing import Imported, import_line, import_script, job_text, read_sbatch
from orchestrator.spec.job import parse_job
from orchestrator.spec.problems import BadValueError

PAGE = (Path(__file__).parents[4] / "docs" / "coming-from.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## What `orch import` reads")[2].partition("|---|---|---|---|\n")[2]
ROWS = [re.split(r"(?<!\\)\|", line.strip("| ")) for line in TABLE.splitlines() if line.startswith("| ")]
ROWS = [[cell.strip() for cell in row] for row in ROWS]

TWO_NODES = r"""#!/bin/bash
#SBATCH --job-name=llama_ft
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:a100:4   # all of them
#SBATCH --cpus-per-task=32
#SBATCH --mem=256G
#SBATCH -t 1-12:00:00
#SBATCH --partition=gpu --requeue
#SBATCH -o logs/%j.out
set -euo pipefail
module load cuda/12.1
source /home/u/venv/bin/activate
cd $SLURM_SUBMIT_DIR/code
export HF_HOME=/scratch/hf
export WANDB_PROJECT="my project"
LR=1e-4
head_node_ip=$(srun --nodes=1 --ntasks=1 hostname --ip-address)
echo start
srun torchrun \
  --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE \
  --rdzv_id $RANDOM --rdzv_backend c10d --rdzv_endpoint $head_node_ip:29500 \
  train.py --lr $LR
"""


def script(*lines: str) -> str:
    return "\n".join(("#!/bin/bash", *lines, ""))


def job_of(text: str) -> dict[str, Any]:
    job = import_script(text).job
    written = job_text(job)
    parse_job(written)
    assert yaml.safe_load(written) == job
    return job


def test_a_script_for_two_nodes() -> None:
    assert job_of(TWO_NODES) == {
        "version": 1,
        "name": "llama-ft",
        "entrypoint": "/home/u/venv/bin/python train.py --lr 1e-4",
        "working_dir": "./code",
        "env": {"HF_HOME": "/scratch/hf", "WANDB_PROJECT": "my project"},
        "resources": {
            "num_workers": 8,
            "resources_per_worker": {"gpu": 1, "cpu": 8, "memory": "64GiB", "gpu_model": "a100"},
        },
        "max_duration": "1d12h",
    }
    said = "\n".join(import_script(TWO_NODES).remarks)
    assert len(import_script(TWO_NODES).remarks) == 3
    for part in ("--partition=gpu", "line 12", "module load cuda/12.1", "line 18"):
        assert part in said


@pytest.mark.parametrize(
    ("lines", "workers", "gpu"),
    [
        (["#SBATCH -n 4", "#SBATCH --gpus-per-task=1", "srun python t.py"], 4, 1),
        (["#SBATCH -N 2", "#SBATCH --ntasks-per-node 4", "#SBATCH --gpus-per-node=4", "srun python t.py"], 8, 1),
        (["#SBATCH -n2", "#SBATCH -G 4", "srun python t.py"], 2, 2),
        (["#SBATCH --gpus=h100:2", "python t.py"], 1, 2),
        (["python t.py"], 1, 0),
        (["#SBATCH -n 2", "#SBATCH --gres=gpu:1", "srun python t.py"], 2, 0.5),
        (["#SBATCH --gres=gpu:4", "accelerate launch t.py"], 4, 1),
        (["#SBATCH --gres=shard:2,gpu:2", "torchrun --nproc_per_node 2 t.py"], 2, 1),
        (["#SBATCH --gres=gpu:2", "OMP_NUM_THREADS=4 torchrun --nproc_per_node gpu t.py"], 2, 1),
    ],
)
def test_the_allocation_is_shared_out(lines: list[str], workers: int, gpu: float) -> None:
    resources = job_of(script(*lines))["resources"]
    assert (resources["num_workers"], resources["resources_per_worker"]["gpu"]) == (workers, gpu)


@pytest.mark.parametrize(
    ("lines", "memory"),
    [
        (["#SBATCH --mem=16000"], "8000MiB"),
        (["#SBATCH --mem-per-cpu=2G", "#SBATCH -c 3"], "6GiB"),
        (["#SBATCH --mem-per-gpu=8G", "#SBATCH --gres=gpu:2"], "8GiB"),
        (["#SBATCH --mem=0"], None),
    ],
)
def test_memory_of_a_rank(lines: list[str], memory: str | None) -> None:
    job = job_of(script("#SBATCH -n 2", *lines, "srun python t.py"))
    assert job["resources"]["resources_per_worker"].get("memory") == memory


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("#SBATCH --array=0-9", "matrix"),
        ("#SBATCH -d afterok:17", "depends_on"),
        ("#SBATCH --signal=B:USR1@120", "stop_duration"),
        ("#SBATCH --some-new=thing", "--some-new=thing"),
        ("conda activate llm", "before `orch submit`"),
        ("mkdir -p out", "line 2"),
        ("export CUDA_VISIBLE_DEVICES=0", "orch picks the GPUs"),
        ("python prepare.py", "depends_on"),
    ],
)
def test_what_is_not_carried_over_is_named(line: str, said: str) -> None:
    found = import_script(script(line, "srun python t.py"))
    assert found.job["entrypoint"] == "python t.py"
    (remark,) = found.remarks
    assert said in remark


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["#SBATCH -n 2", "echo hello"], "no line of the script"),
        (["srun python a.py", "srun python b.py"], "lines 2, 3"),
        (["srun python a.py || python b.py"], "joins several commands"),
        (["srun python a.py | grep loss"], "joins several commands"),
        (["cat list | python a.py"], "joins several commands"),
        ([], "no line of the script"),
    ],
)
def test_scripts_without_one_training(lines: list[str], said: str) -> None:
    with pytest.raises(BadValueError, match=said) as caught:
        import_script(script(*lines))
    assert caught.value.hint


def test_a_variable_s_quoted_value_stays_quoted() -> None:
    job = job_of(script("export PRICE='$5 a day'", "WHAT='$(touch x) $HOME'", 'python t.py "$WHAT" "$PRICE" $PRICE'))
    assert shlex.split(job["entrypoint"]) == ["python", "t.py", "$(touch x) $HOME", "$5 a day", "$5", "a", "day"]
    assert job["env"] == {"PRICE": "$5 a day"}


def _cell(text: str) -> list[str]:
    """Return the code spans of a cell of a table."""
    spans = re.findall(r"``(?: )(.*?)(?: )``|`([^`]*)`", text)
    return [(first or second).replace(r"\|", "|") for first, second in spans]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_of_the_table_of_idioms(row: list[str]) -> None:
    _, cell, kind, result = row
    lines = _cell(cell)
    batch = read_sbatch(lines[0])

    def read() -> Imported:
        if batch is None and len(lines) == 1:
            return import_line(lines[0])
        return import_script("\n".join(lines[1:] if batch else lines), batch)

    if kind == "refused":
        with pytest.raises(BadValueError) as caught:
            read()
        assert caught.value.hint
        text = str(caught.value)
    else:
        found = read()
        parse_job(job_text(found.job))
        assert kind == ("noted" if found.remarks else "translated")
        text = "\n".join((job_text(found.job), *found.remarks))
    for part in _cell(result):
        assert part in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("X=a\n" + 'X="$X$X"\n' * 40 + "python t.py $X", "longer than 1 MiB"),
        ("(" * 1000 + "python t.py", "nested too deeply"),
        ("python t.py " + "$(" * 1000, "not closed"),
        ("python t.py " + " ".join(f"$A{number}" for number in range(2000)), "different expansions"),
    ],
)
def test_a_script_that_would_take_for_ever_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadValueError, match=said):
        import_script(text)
