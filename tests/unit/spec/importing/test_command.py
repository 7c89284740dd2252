"""A launch line of another system becomes a job.yaml that orch takes, and nothing is dropped in silence."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.spec.importing import import_line, import_script, job_text, slurm_time
from orchestrator.spec.job import parse_job
from orchestrator.spec.problems import BadValueError

DOCUMENT = Path(__file__).parents[4] / "docs" / "job-yaml.md"


def job_of(line: str) -> dict[str, Any]:
    job = import_line(line).job
    text = job_text(job)
    parse_job(text)
    assert yaml.safe_load(text) == job
    return job


@pytest.mark.parametrize(
    ("line", "entrypoint", "workers"),
    [
        ("torchrun --nproc-per-node 4 train.py --lr 1", "python train.py --lr 1", 4),
        ("torchrun --nnodes=2 --nproc_per_node=4 -m pkg.train", "python -m pkg.train", 8),
        ("torchrun --nnodes=1:2 --nproc_per_node=4 train.py", "python train.py", {"min": 4, "max": 8}),
        ("torchrun --nproc_per_node=gpu train.py", "python train.py", "auto"),
        ("python -m torch.distributed.run --nproc_per_node 2 a.py 'b c'", "python a.py 'b c'", 2),
        ("/opt/venv/bin/python -m torch.distributed.run --nproc_per_node 2 a.py", "/opt/venv/bin/python a.py", 2),
        ("accelerate launch --num_processes 8 --multi_gpu train.py --x=1", "python train.py --x=1", 8),
        ("deepspeed --num_gpus 4 train.py --deepspeed ds.json", "python train.py --deepspeed ds.json", 4),
        ("srun -n 4 python train.py", "python train.py", 4),
        ("srun --nodes 2 --ntasks-per-node 1 torchrun --nnodes 2 --nproc_per_node 4 t.py", "python t.py", 8),
        ("mpirun -np 2 python train.py", "python train.py", 2),
        ("nohup python train.py &\n", "python train.py", 1),
    ],
)
def test_the_launcher_goes_and_its_ranks_stay(line: str, entrypoint: str, workers: object) -> None:
    job = job_of(line)
    assert job["entrypoint"] == entrypoint
    assert job["resources"] == {"num_workers": workers, "resources_per_worker": {"gpu": 1}}


def test_other_keys_are_carried_over() -> None:
    job = job_of("A=1 B='x y' torchrun --max-restarts 3 --nproc_per_node 2 train.py")
    assert job["env"] == {"A": "1", "B": "x y"}
    assert job["retry"] == {"max_restarts": {"user": 3}}
    assert job_of("accelerate launch --mixed_precision bf16 t.py")["env"] == {"ACCELERATE_MIXED_PRECISION": "bf16"}
    timed = job_of("srun -t 1-12:00:00 -c 8 --gpus-per-task=2 python t.py")
    assert timed["max_duration"] == "1d12h"
    assert timed["resources"]["resources_per_worker"] == {"gpu": 2, "cpu": 8}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("accelerate launch --config_file a.yaml t.py", ["--config-file=a.yaml"]),
        ("deepspeed --include localhost:1 t.py", ["--include=localhost:1", "LOCAL_RANK"]),
        ("deepspeed --no_local_rank --num_gpus 2 t.py", []),
        ("python -m torch.distributed.launch --nproc_per_node 2 t.py", ["LOCAL_RANK"]),
        ("python -m torch.distributed.launch --use_env --nproc_per_node 2 t.py", []),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 t.py", ["CUDA_VISIBLE_DEVICES"]),
        ("torchrun --standalone --rdzv_backend c10d --master-port 1 --nproc_per_node 2 t.py", []),
        ("torchrun --bogus-option=7 t.py", ["--bogus-option=7"]),
        ("srun --partition=gpu -A proj python t.py", ["--partition=gpu", "-A proj"]),
        ("python t.py > log.txt 2>&1 &", [">log.txt", "2>&1"]),
        ("python t.py 2>&1 | tee log.txt", ["2>&1", "tee log.txt"]),
        ("python t.py --out $SCRATCH/x", ["$SCRATCH"]),
    ],
)
def test_what_is_not_carried_over_is_named(line: str, said: list[str]) -> None:
    job_of(line)
    remarks = import_line(line).remarks
    assert len(remarks) == len(said)
    assert all(text in remark for text, remark in zip(said, remarks, strict=True))


def test_variables_are_left_to_a_shell() -> None:
    assert job_of("python t.py --out $SCRATCH/x 'a b'")["entrypoint"] == (
        """bash -c 'exec python t.py --out $SCRATCH/x '"'"'a b'"'"''"""
    )


@pytest.mark.parametrize(
    ("line", "entrypoint"),
    [
        ("python t.py '$HOME $(touch x)'", "python t.py '$HOME $(touch x)'"),
        ("A='$B' python t.py \\$HOME \"\\$(touch x) \\`pwd\\`\"", "python t.py '$HOME' '$(touch x) `pwd`'"),
        ("torchrun --nproc_per_node 2 t.py --x='$(touch x)'", "python t.py '--x=$(touch x)'"),
        (
            "python t.py '$HOME `x`' \"don't $A isn't\" $B'$C `y`'",
            """exec python t.py '$HOME `x`' 'don'"'"'t '"$A"' isn'"'"'t' $B'$C `y`'""",
        ),
    ],
)
def test_what_is_quoted_stays_quoted(line: str, entrypoint: str) -> None:
    found = job_of(line)["entrypoint"]
    assert (shlex.split(found)[2] if found.startswith("bash") else found) == entrypoint


@pytest.mark.parametrize(
    "line",
    [
        """python t.py $A "$A" pre$A"post" ${A}b "$A"b '$A' \\$A "it's $A" """,
        "python t.py *.bin '*.bin' ~/x a=~/y {1,2} [x] $(echo a  b) \"$(echo a  b)\" `echo q`",
        "V='1  2 *'\npython t.py $V \"$V\" ${V%\\*} ${#V}",
        "R=(a 'b c' '*')\nR+=(z)\npython t.py \"${R[@]}\" ${R[@]} $R \"${R[1]}\"",
        "export X=\"$A/$HOME\"\npython t.py ${Z:-d $A} \"${Z-$A}\" ${Z:+n} $((1+2*3)) $((7/2)) '' $'a\\tb'",
        "C='python t.py --x \"a b\" *'\n$C",
        "C='python t.py --x \"a b\"'\neval $C",
        "bash -c \"python t.py '$A' \\$A\"",
        'B=$A\npython t.py $B "$B" x$B',
        'X=$A Y=2 python t.py \'a\\b\' "a\\b" "a\\\\b" a\\ b',
    ],
)
def test_the_script_gets_the_words_that_bash_would_give_it(line: str, tmp_path: Path) -> None:
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "[%s]" "$@" "X=$X"\n')
    (tmp_path / "python").chmod(0o755)
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).touch()
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/h", "A": "x y"}
    job = import_script(line).job

    def words_of(command: list[str], extra: dict[str, str]) -> str:
        done = subprocess.run(command, env={**env, **extra}, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout

    wanted = words_of(["bash", "-c", line], {})
    assert wanted.startswith("[t.py]")
    assert words_of(shlex.split(job["entrypoint"]), job.get("env", {})) == wanted


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torchrun t.py || torchrun u.py", "joins several commands"),
        ("torchrun --nproc_per_node=2 t.py --x $(date", "not closed"),
        ("torchrun t.py 'a", "not closed"),
        ("A=1", "starts no command"),
        ("python", "nothing to run"),
        ("", "starts no command"),
    ],
)
def test_lines_that_start_no_job(line: str, said: str) -> None:
    with pytest.raises(BadValueError, match=said) as caught:
        import_line(line)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("slurm", "ours"),
    [
        ("90", "1h30m"),
        ("30:15", "30m15s"),
        ("2:00:00", "2h"),
        ("1-0", "1d"),
        ("2-03:04", "2d3h4m"),
        ("1-00:00:10", "1d10s"),
        ("0", ""),
        ("0:00:00", ""),
        ("UNLIMITED", ""),
        ("infinite", ""),
        ("-1", ""),
    ],
)
def test_times_of_slurm(slurm: str, ours: str) -> None:
    assert slurm_time(slurm) == ours


@pytest.mark.parametrize("text", ["soon", "$TIME", "1h"])
def test_what_is_no_time_of_slurm(text: str) -> None:
    with pytest.raises(BadValueError, match="is not a time of Slurm"):
        slurm_time(text)


@given(st.lists(st.text(min_size=1, max_size=8), max_size=4))
def test_any_argument_arrives_or_the_line_is_refused(arguments: list[str]) -> None:
    line = shlex.join(["torchrun", "--nproc-per-node", "2", "train.py", *arguments])
    try:
        job = import_line(line).job
    except BadValueError:
        return
    text = job_text(job)
    assert yaml.safe_load(text) == job
    assert shlex.split(job["entrypoint"]) == ["python", "train.py", *arguments]


def test_the_example_of_the_documentation_is_what_it_prints() -> None:
    (shown,) = re.findall(r"```console\n\$ orch import '(.*)'\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert job_text(import_line(shown[0]).job) == shown[1]
