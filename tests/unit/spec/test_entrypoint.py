"""Entry points: those that are forked, plain processes, and those that are refused with the line to write instead."""

import os
import shlex
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.spec.entrypoint import (
    EntrypointError,
    cold_start_variables,
    parse_entrypoint,
    with_checkpoint,
    yaml_line,
)


def refused(text: str) -> EntrypointError:
    with pytest.raises(EntrypointError) as caught:
        parse_entrypoint(text)
    return caught.value


@pytest.mark.parametrize(
    ("text", "kind", "python", "options", "target", "args"),
    [
        ("python train.py --lr 0.1", "script", "python", (), "train.py", ("--lr", "0.1")),
        ("python -u train.py", "script", "python", ("-u",), "train.py", ()),
        ("python3 -u -u a/b.py -u", "script", "python3", ("-u", "-u"), "a/b.py", ("-u",)),
        ("/usr/bin/python3.11 'my train.py' \"a b\"", "script", "/usr/bin/python3.11", (), "my train.py", ("a b",)),
        ("python train", "script", "python", (), "train", ()),
        ("python -m pkg.mod -m x", "module", "python", (), "pkg.mod", ("-m", "x")),
        ("python -u -m pkg", "module", "python", ("-u",), "pkg", ()),
        ("python -mpkg.mod a", "module", "python", (), "pkg.mod", ("a",)),
        ("python -O train.py", "command", "python", (), "python", ("-O", "train.py")),
        ("python -X dev -u train.py", "command", "python", (), "python", ("-X", "dev", "-u", "train.py")),
        ("python -W error t.py", "command", "python", (), "python", ("-W", "error", "t.py")),
        ("python -I t.py", "command", "python", (), "python", ("-I", "t.py")),
        ("python -uO t.py", "command", "python", (), "python", ("-uO", "t.py")),
        ("python -u -c 'print(1)'", "command", "python", (), "python", ("-u", "-c", "print(1)")),
        ("bash run.sh a", "command", None, (), "bash", ("run.sh", "a")),
        ("bash -c 'cd x && python t.py > log'", "command", None, (), "bash", ("-c", "cd x && python t.py > log")),
        ("./train.py", "command", None, (), "./train.py", ()),
        ("env A=1 python t.py", "command", None, (), "env", ("A=1", "python", "t.py")),
        ("python t.py A=1 model.lr=2", "script", "python", (), "t.py", ("A=1", "model.lr=2")),
        ("  python   t.py  \n", "script", "python", (), "t.py", ()),
        ("python t.py \\\n  --x", "script", "python", (), "t.py", ("--x",)),
        ("python t.py --r ${checkpoint}", "script", "python", (), "t.py", ("--r", "${checkpoint}")),
        ('python t.py "${checkpoint}/x"', "script", "python", (), "t.py", ("${checkpoint}/x",)),
        ("python t.py 'a|b;c&d>e$F`g`(h)~'", "script", "python", (), "t.py", ("a|b;c&d>e$F`g`(h)~",)),
        ('python t.py "a|b;c&d>e(h)"', "script", "python", (), "t.py", ("a|b;c&d>e(h)",)),
        (r"python t.py a\|b \$X", "script", "python", (), "t.py", ("a|b", "$X")),
        ("python t.py cost=5$ a~b *.txt", "script", "python", (), "t.py", ("cost=5$", "a~b", "*.txt")),
        ("python -m torch.utils.bottleneck t.py", "module", "python", (), "torch.utils.bottleneck", ("t.py",)),
        ("python t.py torchrun", "script", "python", (), "t.py", ("torchrun",)),
        ("python deepspeed", "script", "python", (), "deepspeed", ()),
        ("ray status", "command", None, (), "ray", ("status",)),
    ],
)
def test_commands_are_recognized(
    text: str, kind: str, python: str | None, options: tuple[str, ...], target: str, args: tuple[str, ...]
) -> None:
    entrypoint = parse_entrypoint(text)
    assert (entrypoint.kind, entrypoint.python, entrypoint.python_options) == (kind, python, options)
    assert (entrypoint.target, entrypoint.args) == (target, args)
    assert entrypoint.argv == tuple(shlex.split(text.replace("\\\n", " ")))


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "the entry point is empty", "python train.py"),
        ("   ", "the entry point is empty", "python train.py"),
        ("''", "the entry point is empty", "python train.py"),
        ("python 'a", "a quotation mark is not closed", "close it"),
        ("python", "nothing to run", "python -m MODULE"),
        ("python -u", "nothing to run", "python FILE"),
        ("python -m", "nothing to run", "python -m MODULE"),
        ("python -", "nothing to run", "python FILE"),
        ("python a\0b", "NUL", "remove it"),
        ("train.py --x", '"train.py" is a script, not a program', "write entrypoint: python train.py --x"),
    ],
)
def test_what_cannot_run_is_refused(text: str, message: str, hint: str) -> None:
    error = refused(text)
    assert message in error.message
    assert hint in error.hint
    assert str(error) == f"{error.message} ({error.hint})"


@pytest.mark.parametrize(
    ("text", "suggestion", "keys"),
    [
        ("torchrun --nproc-per-node 4 train.py --lr 1", "python train.py --lr 1", "resources.num_workers: 4"),
        ("torchrun --nproc_per_node=4 train.py", "python train.py", "resources.num_workers: 4"),
        ("torchrun --standalone --nproc-per-node=2 -m a.b c", "python -m a.b c", "resources.num_workers: 2"),
        ("torchrun --nnodes 2 --nproc-per-node 8 train.py", "python train.py", "resources.num_workers: 16"),
        ("torchrun --nnodes=1:4 --nproc-per-node=2 t.py", "python t.py", "resources.num_workers: {min: 2, max: 8}"),
        ("torchrun --nproc-per-node gpu t.py", "python t.py", "resources.num_workers: auto"),
        ("torchrun --nproc-per-node cpu t.py", "python t.py", ""),
        ("torchrun t.py", "python t.py", "resources.num_workers: 1"),
        ("torchrun", "python train.py", "resources.num_workers: 1"),
        ("torchrun --no-python --nproc-per-node 2 bash run.sh", "bash run.sh", "resources.num_workers: 2"),
        (
            "torchrun --rdzv-backend c10d --rdzv-endpoint=h:1 --max-restarts 3 t.py",
            "python t.py",
            "retry.max_restarts.user: 3",
        ),
        ("/opt/bin/torchrun --nproc-per-node 2 t.py", "python t.py", "resources.num_workers: 2"),
        ("python /opt/bin/torchrun --nproc-per-node 2 t.py", "python t.py", "resources.num_workers: 2"),
        ("python3 -m torch.distributed.run --nproc-per-node 2 t.py -x", "python3 t.py -x", "resources.num_workers: 2"),
        ("python -O -m torch.distributed.run --nproc-per-node 2 t.py", "python t.py", "resources.num_workers: 2"),
        ("python -m torch.distributed.launch --use_env t.py", "python t.py", "resources.num_workers: 1"),
        ("torchrun --unheard-of t.py a", "python t.py a", "resources.num_workers: 1"),
        ("torchrun --unheard-of value t.py a", "python t.py a", "resources.num_workers: 1"),
        ("accelerate launch --num_processes 8 t.py", "python t.py", "resources.num_workers: 8"),
        (
            "accelerate launch --multi_gpu --mixed_precision bf16 t.py",
            "python t.py",
            "env.ACCELERATE_MIXED_PRECISION: bf16",
        ),
        ("accelerate launch t.py", "python t.py", "resources.num_workers: auto"),
        ("python -m accelerate.commands.launch --num_processes=2 t.py", "python t.py", "resources.num_workers: 2"),
        (
            "deepspeed --num_gpus=2 t.py --deepspeed c.json",
            "python t.py --deepspeed c.json",
            "resources.num_workers: 2",
        ),
        ("deepspeed --num_gpus=2 --num_nodes 3 t.py", "python t.py", "resources.num_workers: 6"),
        ("deepspeed t.py", "python t.py", "resources.num_workers: auto"),
        ("srun -n 4 python t.py", "python t.py", "resources.num_workers: 4"),
        ("srun -n4 -l python t.py", "python t.py", "resources.num_workers: 4"),
        ("srun -N 2 --ntasks-per-node=4 --gres=gpu:4 python t.py", "python t.py", "resources.num_workers: 8"),
        ("srun --time 24:00:00 bash run.sh", "bash run.sh", "max_duration: 24:00:00"),
        ("srun t.py", "python t.py", "resources.num_workers: 1"),
        ("mpirun -np 4 --mca btl tcp -x PATH python t.py", "python t.py", "resources.num_workers: 4"),
        ("mpiexec -n 2 python t.py", "python t.py", "resources.num_workers: 2"),
        ("horovodrun -np 2 -H localhost:2 python t.py", "python t.py", "resources.num_workers: 2"),
        ("mpirun python t.py", "python t.py", "resources.num_workers: auto"),
        ("ray job submit --working-dir src -- python t.py", "python t.py", "working_dir: src"),
        ("ray job submit -- torchrun --nproc-per-node 2 t.py", "python t.py", "resources.num_workers: 2"),
        ("srun -n 2 torchrun --nproc-per-node 3 t.py", "python t.py", "resources.num_workers: 3"),
        ("ray job submit -- python", "python train.py", ""),
        ("srun A=1 python t.py", "python train.py", "resources.num_workers: 1"),
        ("torchrun --no-python ''", "python train.py", "resources.num_workers: 1"),
        ("torchrun t.py --r ${checkpoint}", "python t.py --r ${checkpoint}", ""),
        ("torchrun t.py 'a: b' '#c'", "python t.py 'a: b' '#c'", ""),
    ],
)
def test_launchers_are_refused_with_the_line_to_write(text: str, suggestion: str, keys: str) -> None:
    error = refused(text)
    assert error.message.startswith("orch starts the ranks itself; within each, ")
    assert error.suggestion == suggestion
    assert error.hint.startswith(f"write {yaml_line('entrypoint', suggestion)}")
    assert keys in error.hint


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("python t.py | tee log", "|"),
        ("python t.py && echo done", "&&"),
        ("python t.py || true", "||"),
        ("python t.py ; ls", ";"),
        ("python t.py;ls", ";"),
        ("python t.py &", "&"),
        ("python t.py > log", ">"),
        ("python t.py 2>&1", ">"),
        ("python t.py < in", "<"),
        ("python t.py $(nproc)", "$("),
        ('python t.py "$(nproc)"', "$("),
        ("python t.py `nproc`", "`"),
        ('python t.py "`nproc`"', "`"),
        ("python t.py $HOME/x", "$HOME"),
        ('python t.py "$HOME"', "$HOME"),
        ("python t.py ${HOME}", "${"),
        ("python t.py ${checkpoints}", "${"),
        ("python t.py $1", "$1"),
        ("(python t.py)", "("),
        ("python ~/t.py", "~/"),
        ("~/bin/python t.py", "~/"),
    ],
)
def test_shell_syntax_is_refused_with_the_line_that_keeps_it(text: str, found: str) -> None:
    error = refused(text)
    assert f'"{found}" would reach the script' in error.message
    assert error.suggestion == f"bash -c {shlex.quote(text)}"
    assert parse_entrypoint(error.suggestion).argv == ("bash", "-c", text)
    assert f"write {yaml_line('entrypoint', error.suggestion)}" in error.hint
    assert ("orch logs" in error.hint) == (found in "<>")


def test_several_lines_are_refused_with_both_ways_out() -> None:
    error = refused("python a.py\npython b.py")
    assert "several lines" in error.message
    assert error.suggestion == "bash -c 'python a.py\npython b.py'"
    assert "> instead of |" in error.hint


@pytest.mark.parametrize(
    ("text", "suggestion", "keys"),
    [
        ("A=1 python t.py", "python t.py", ['env.A: "1"']),
        ("A=1 B='x y' python t.py", "python t.py", ['env.A: "1"', 'env.B: "x y"']),
        ("A=1", "python train.py", ['env.A: "1"']),
        ("A=1 python", "python train.py", ['env.A: "1"']),
        ("A=1 t.py", "python t.py", ['env.A: "1"']),
        ("CUDA_VISIBLE_DEVICES=0,1 python t.py", "python t.py", ["resources.resources_per_worker.gpu: 2"]),
        ("CUDA_VISIBLE_DEVICES=0 python t.py", "python t.py", []),
        (
            "OMP_NUM_THREADS=4 torchrun --nproc-per-node 2 t.py",
            "python t.py",
            ['env.OMP_NUM_THREADS: "4"', "resources.num_workers: 2"],
        ),
    ],
)
def test_variables_in_front_become_env(text: str, suggestion: str, keys: list[str]) -> None:
    error = refused(text)
    assert "would be taken for a program" in error.message
    assert error.suggestion == suggestion
    assert all(key in error.hint for key in keys)
    assert keys or " with " not in error.hint


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        ("cd src && torchrun --nproc-per-node 4 t.py > log 2>&1", "python t.py"),
        ("source a/bin/activate; accelerate launch t.py --x", "python t.py --x"),
        ("module load cuda\nsrun -n 4 python t.py", "python t.py"),
        ("A=1 torchrun t.py | tee log", "python t.py"),
        ("torchrun t.py $(cat args)", ""),
        ("echo 'torchrun; x", ""),
    ],
)
def test_a_launcher_between_shell_operators_is_not_hidden_in_bash(text: str, suggestion: str) -> None:
    error = refused(text)
    assert error.suggestion == suggestion
    assert "bash -c" not in error.hint
    assert "python t.py" in error.hint or "python train.py" in error.hint or "close it" in error.hint


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20), max_size=4))
def test_words_that_a_shell_would_keep_together_arrive_as_they_are(args: list[str]) -> None:
    text = shlex.join(["python", "train.py", *args])
    expected = tuple(arg.replace("\\\n", " ") for arg in args)
    assert parse_entrypoint(text).args == expected


def test_the_words_are_those_that_a_shell_gives() -> None:
    line = r"""'a b' "c d" e\ f 'g'"h"i "j\"k" ''"""
    script = "import sys; print('\\n'.join(sys.argv[1:]) + '|')"
    shell = subprocess.run(
        ["sh", "-c", f"exec {shlex.quote(sys.executable)} -c {shlex.quote(script)} {line}"],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    assert "\n".join(parse_entrypoint(f"python t.py {line}").args) + "|" == shell.stdout.rstrip("\n")


def test_variables_that_matter_before_import_are_named_in_order() -> None:
    env = dict.fromkeys(
        (
            *(
                "OMP_NUM_THREADS",
                "TOKENIZERS_PARALLELISM",
                "HF_HOME",
                "NCCL_DEBUG",
                "WANDB_MODE",
                "PATH",
                "CUDA_LAUNCH_BLOCKING",
            ),
            *("LD_PRELOAD", "PYTHONPATH", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "MKL_NUM_THREADS", "KMP_AFFINITY"),
            *(
                "OPENBLAS_NUM_THREADS",
                "ATEN_CPU_CAPABILITY",
                "TORCH_LOGS",
                "PYTORCH_CUDA_ALLOC_CONF",
                "NUMEXPR_MAX_THREADS",
            ),
            *("OMP_PROC_BIND", "GOMP_CPU_AFFINITY"),
        ),
        "1",
    )
    assert cold_start_variables(env) == (
        *(
            "ATEN_CPU_CAPABILITY",
            "GLIBC_TUNABLES",
            "GOMP_CPU_AFFINITY",
            "KMP_AFFINITY",
            "LD_PRELOAD",
            "MALLOC_ARENA_MAX",
        ),
        *("MKL_NUM_THREADS", "NUMEXPR_MAX_THREADS", "OMP_PROC_BIND", "OPENBLAS_NUM_THREADS", "PYTHONPATH"),
        *("PYTORCH_CUDA_ALLOC_CONF", "TORCH_LOGS"),
    )
    assert cold_start_variables({}) == ()


@pytest.mark.parametrize(
    ("text", "path", "args"),
    [
        ("python t.py --resume ${checkpoint} -v", "/c/7", ("--resume", "/c/7", "-v")),
        ("python t.py --resume ${checkpoint} -v", None, ("-v",)),
        ("python t.py --resume=${checkpoint} -v", "/c/7", ("--resume=/c/7", "-v")),
        ("python t.py --resume=${checkpoint} -v", None, ("-v",)),
        ("python t.py data ${checkpoint}", None, ("data",)),
        ("python t.py --a=1 ${checkpoint}", None, ("--a=1",)),
        ("bash run.sh ${checkpoint}", "/c/7", ("run.sh", "/c/7")),
    ],
)
def test_the_checkpoint_is_filled_in_and_without_one_nothing_speaks_of_it(
    text: str, path: str | None, args: tuple[str, ...]
) -> None:
    filled = with_checkpoint(parse_entrypoint(text), path)
    assert filled.args == args
    assert filled.argv[-len(args) :] == args
