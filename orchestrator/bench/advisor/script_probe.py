"""Probes the training script of a job: runs it unchanged on one rank of this machine, in a copy of its directory, for a few steps.

The copy and a checkpoint directory of its own keep the probe away from the job's files. What DDP would do with the gradients
follows from the parameters in the order of the optimizer: buckets of at most 25 MiB, the first of 1 MiB, from the last parameter on.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from orchestrator import trees
from orchestrator.bench.advisor.cost_model import Bucket, Probe, ProbePoint
from orchestrator.bench.errors import BenchError
from orchestrator.bench.statistics import relative_error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOST_STEPS: Final = 20
MOST_SECONDS: Final = 2.0
MOST_COPIED_BYTES: Final = 500 * 10**6
START_SECONDS: Final = 600.0
_FIRST_BUCKET: Final = 1 << 20
_BUCKET: Final = 25 << 20
_MOST_ANSWER: Final = 64 << 20
_TAIL: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A job's entry point as the probe runs it. ``python`` is the interpreter, ``kind`` script or module, ``directory`` its working directory."""

    python: str
    kind: str
    target: str
    args: tuple[str, ...]
    directory: Path
    environ: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptProbe:
    """Measurements of the script's steps: the probe (its batch is that of one rank, counted as 1), and the device of its parameters."""

    probe: Probe
    device: str


def probe_script(script: Script, log: Path, *, start_seconds: float = START_SECONDS) -> ScriptProbe:
    """Run the script and read its measurements. Raises BenchError for one that fails, makes no step, or takes too long."""
    with tempfile.TemporaryDirectory(prefix="orch-advise-") as scratch:
        work = Path(scratch, "work")
        _copy(script.directory, work)
        answer = _run(script, work, Path(scratch, "checkpoints"), log, start_seconds)
    return read_script_probe(answer)


def _copy(directory: Path, target: Path) -> None:
    """Copy the directory. Raises BenchError where it is too large."""
    if trees.measure(directory, trees.Problems()).bytes > MOST_COPIED_BYTES:
        raise BenchError(
            f"{directory} holds more than {MOST_COPIED_BYTES // 10**6} MB, and the probe runs in a copy of it",
            hint="keep data outside of working_dir and read it by an absolute path",
        )
    problems = trees.Problems()
    trees.copy(directory, target, problems)
    if problems:
        raise BenchError(
            f"{directory} cannot be copied: {problems}", hint="make its files readable, or move them elsewhere"
        )


def _run(script: Script, work: Path, checkpoints: Path, log: Path, start_seconds: float) -> Mapping[str, Any]:
    answers, theirs = os.pipe()
    limits = json.dumps({"most_steps": MOST_STEPS, "most_seconds": MOST_SECONDS})
    command = [script.python, rank_script(), str(theirs), limits]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    environ = {
        **script.environ,
        **alone,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "ORCH_CHECKPOINT_DIR": str(checkpoints),
    }
    with os.fdopen(answers, "rb") as pipe:
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*command, script.kind, script.target, *script.args],
                    cwd=work,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs,),
                    start_new_session=True,
                )
        finally:
            os.close(theirs)
        try:
            code = process.wait(start_seconds)
        except subprocess.TimeoutExpired:
            raise BenchError(
                f"the script made fewer than {MOST_STEPS} optimizer steps within {start_seconds:g}s",
                hint=f"its output is in {log}; try it with less data",
            ) from None
        finally:
            _end(process)
        text = pipe.read(_MOST_ANSWER)
    if not text:
        raise BenchError(
            f"the script ended with {code} before it had made its steps: {_last_line(log)}",
            hint=f"its output is in {log}",
        )
    found: Mapping[str, Any] = json.loads(text)
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the script's session: data loaders are processes of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def rank_script() -> str:
    """Return the path of the program that times the script; it runs by path, as its interpreter may have only torch."""
    return str(Path(__file__).parents[1] / "rank" / "script.py")


def _last_line(log: Path) -> str:
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _TAIL))
        lines = stream.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


def read_script_probe(answer: Mapping[str, Any]) -> ScriptProbe:
    """Build a probe from the script's output. Raises BenchError where it made no step that counts."""
    steps, sizes = list(answer["steps"]), [int(size) for size in answer["gradient_bytes"]]
    if not steps:
        raise BenchError(
            "the script ended before it had made enough optimizer steps to time one",
            hint="give it more data or epochs; steps of optimizers that are not torch.optim's cannot be seen",
        )
    point = ProbePoint(batch=1, step=median(steps), backward=median(answer["backwards"]), error=relative_error(steps))
    probe = Probe(
        parameters=0,
        gradient_bytes=sum(sizes),
        points=(point,),
        wrapper=0.0,
        buckets=buckets_of(sizes),
        steps=len(steps),
        seconds=sum(steps),
    )
    return ScriptProbe(probe=probe, device=str(answer["device"]))


def buckets_of(sizes: Sequence[int]) -> tuple[Bucket, ...]:
    """Return DDP's buckets of parameters of these sizes: filled from the last one on, each ready once its gradients are computed.

    The share of backward that a gradient takes is unknown from outside: it is assumed proportional to its bytes.
    """
    total = sum(sizes)
    found: list[Bucket] = []
    held = done = 0
    for size in reversed(sizes):
        held += size
        done += size
        if held >= (_BUCKET if found else _FIRST_BUCKET):
            found.append(Bucket(ready=done / total, bytes=held))
            held = 0
    if held or not found:
        found.append(Bucket(ready=1.0, bytes=held))
    return tuple(found)
