"""Converts a Slurm batch script to the keys of job.yaml.

It reads #SBATCH lines, variables with plain values, `export`, `cd`, the activation of a virtual environment, and the
one command that starts the training. No line is run. A remark names every other line.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.spec.entrypoint import parse_entrypoint
from orchestrator.spec.importing.command import (
    ASSIGNMENT,
    Imported,
    LaunchLine,
    as_name,
    entrypoint_text,
    expand,
    name_for,
    plain,
    read_line,
    remark,
    set_keys,
    shell_remarks,
    slurm_time,
    with_literals,
)
from orchestrator.spec.launchers import WORDS
from orchestrator.spec.problems import BadValueError, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

_SWITCHES = frozenset(
    {
        *("--contiguous", "--exclusive", "--get-user-env", "--hold", "--ignore-pbs", "--nice", "--no-kill"),
        *("--no-requeue", "--overcommit", "--oversubscribe", "--parsable", "--propagate", "--quiet", "--reboot"),
        *("--requeue", "--spread-job", "--test-only", "--use-min-nodes", "--verbose", "--wait"),
        *("-H", "-k", "-O", "-Q", "-s", "-v", "-W"),
    }
)
"""Options of sbatch whose value, if they have one, follows an equals sign; every other one takes the next word."""
_WRAP = "--wrap"


class SbatchLine(NamedTuple):
    """Options as one line of a script, and what they apply to: a script's path, or the command of --wrap."""

    directive: str
    script: str = ""
    command: str = ""
    arguments: tuple[str, ...] = ()

    def script_text(self, text: str) -> str:
        """Return a script's text with the options of the line at its end, where they override those of the script."""
        return f"{text.rstrip()}\n{self.directive}\n"


def read_sbatch(line: str) -> SbatchLine | None:
    """Return the parts of a line of sbatch; None for any other line. Raises BadValueError where it submits nothing."""
    try:
        words = shlex.split(line)
    except ValueError:
        return None  # the reader of other lines reports the quotation mark
    if not words or words[0].rpartition("/")[2] != "sbatch":
        return None
    options, rest, command = [], words[1:], ""
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        takes_next = not equals and word not in _SWITCHES and (word.startswith("--") or len(word) == 2)
        if takes_next and not rest:
            raise BadValueError(f"{quoted(word)} has no value", "write it after the option")
        value = rest.pop(0) if takes_next else value
        if name == _WRAP:
            command = value
        else:
            options += [word, value] if takes_next else [word]
    directive = f"#SBATCH {shlex.join(options)}" if options else "#"
    if command:
        return SbatchLine(directive, command=command)
    if not rest:
        raise BadValueError(f"{quoted(line)} names no script", "give the script's file, or --wrap and a command")
    return SbatchLine(directive, rest[0], arguments=tuple(rest[1:]))


_DIRECTIVE = re.compile(r"#SBATCH\s+(.*)")
_GRES = re.compile(r"(?:gres/)?gpu(?::([A-Za-z][A-Za-z0-9_.-]*))?(?::(\d+))?(?:\(.*\))?")
_GPUS = re.compile(r"(?:([A-Za-z][A-Za-z0-9_.-]*):)?(\d+)")
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)
_ACTIVATE = re.compile(r"(?:source|\.)\s+(\S+)/bin/activate")
_PROGRAM = re.compile(r"(?:\S*/)?python[0-9.]*")
_SHORT = {
    "J": "job_name",
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus_per_task",
    "t": "time",
    "G": "gpus",
    "D": "chdir",
    "p": "partition",
    "A": "account",
    "q": "qos",
    "w": "nodelist",
    "x": "exclude",
    "C": "constraint",
    "a": "array",
    "d": "dependency",
    "o": "output",
    "e": "error",
    "b": "begin",
}
_MEGABYTE_POWERS = {"K": -1, "M": 0, "": 0, "G": 1, "T": 2}
_SHELL = frozenset(
    {"set", "echo", "date", "hostname", "module", "ml", "true", ":", "shopt", "ulimit", "nvidia-smi", "env"}
)
_READ = frozenset(
    {
        *("job_name", "nodes", "ntasks", "ntasks_per_node", "cpus_per_task", "gpus", "gpus_per_node", "gpus_per_task"),
        *("gres", "mem", "mem_per_cpu", "mem_per_gpu", "time", "chdir", "cpus_per_gpu"),
    }
)


class Gpus(NamedTuple):
    """Number of GPUs of the whole allocation, None where the script requests none, and their model."""

    total: int | None
    model: str = ""


@dataclass(slots=True)
class _Body:
    """The values found in the script so far."""

    variables: dict[str, str]
    env: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    commands: list[tuple[int, LaunchLine]] = field(default_factory=list)
    directory: str = ""
    python: str = ""


def is_batch_script(text: str) -> bool:
    """Whether the text has lines for sbatch."""
    return any(_DIRECTIVE.match(line) for line in text.splitlines())


def import_script(text: str) -> Imported:
    """Return the job that a batch script starts. Raises BadValueError for no training command, or several."""
    options, remarks = _directives(text)
    body = _read_body(text, _slurm_variables(options))
    line = _the_command(body)
    if body.python:
        line = replace(line, words=tuple(body.python if word in {"python", "python3"} else word for word in line.words))
    job: dict[str, Any] = {
        "version": 1,
        "name": as_name(options["job_name"]) if options.get("job_name") else name_for(line.words),
        "entrypoint": entrypoint_text(line.words),
    }
    parse_entrypoint(job["entrypoint"])
    directory = body.directory or options.get("chdir", "")
    if directory:
        job["working_dir"] = directory
    env = {**body.env, **line.env}
    if env.pop("CUDA_VISIBLE_DEVICES", None) is not None:
        remarks.append("CUDA_VISIBLE_DEVICES: not carried over; orch picks the GPUs")
    if env:
        job["env"] = env
    set_keys(job, line.keys)
    job["resources"] = _resources(options, line, job.get("resources", {}))
    if "time" in options:
        job.setdefault("max_duration", slurm_time(options["time"]))
    return Imported(job=job, remarks=(*remarks, *body.remarks, *line.remarks, *shell_remarks(line.words)))


def _directives(text: str) -> tuple[dict[str, str], list[str]]:
    options: dict[str, str] = {}
    for line in text.splitlines():
        match = _DIRECTIVE.match(line)
        if match is None:
            continue
        try:
            words = shlex.split(match[1], comments=True)
        except ValueError as error:
            raise BadValueError(f"{quoted(line)}: a quotation mark is not closed", "close it") from error
        while words:
            word = words.pop(0)
            name, equals, value = word.lstrip("-").partition("=")
            if not word.startswith("--") and len(word) > 2 and not equals:
                name, value = word[1], word[2:]
            elif not equals and words and not words[0].startswith("-"):
                value = words.pop(0)
            name = name.replace("-", "_")
            options[_SHORT.get(name, name)] = value
    found = (remark("sbatch", name, value) for name, value in options.items() if name not in _READ)
    return options, [text for text in found if text]


def _slurm_variables(options: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Slurm sets from the options alone."""
    nodes, tasks = _nodes(options), _tasks(options)
    gpus = gpus_of(options).total
    values = {
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NPROCS": str(tasks),
        "SLURM_SUBMIT_DIR": ".",
    }
    named = {
        "SLURM_CPUS_PER_TASK": options.get("cpus_per_task"),
        "SLURM_NTASKS_PER_NODE": options.get("ntasks_per_node"),
        "SLURM_JOB_NAME": options.get("job_name"),
        "SLURM_GPUS": None if gpus is None else str(gpus),
        "SLURM_GPUS_PER_NODE": None if gpus is None else str(gpus // nodes),
        "SLURM_GPUS_ON_NODE": None if gpus is None else str(gpus // nodes),
    }
    return {**values, **{name: value for name, value in named.items() if value}}


def _nodes(options: Mapping[str, str]) -> int:
    text = options.get("nodes", "1").partition("-")[0]
    return max(int(text), 1) if text.isdecimal() else 1


def _tasks(options: Mapping[str, str]) -> int:
    if options.get("ntasks", "").isdecimal():
        return max(int(options["ntasks"]), 1)
    each = options.get("ntasks_per_node", "1")
    return _nodes(options) * (int(each) if each.isdecimal() else 1)


def gpus_of(options: Mapping[str, str]) -> Gpus:
    """Return the number of GPUs that the options request in all, and their model."""
    for name, times in (("gpus", 1), ("gpus_per_node", _nodes(options)), ("gpus_per_task", _tasks(options))):
        if (match := _GPUS.fullmatch(options.get(name, ""))) is not None:
            return Gpus(int(match[2]) * times, match[1] or "")
    for part in options.get("gres", "").split(","):
        if (match := _GRES.fullmatch(part)) is not None:
            return Gpus(int(match[2] or 1) * _nodes(options), match[1] or "")
    return Gpus(None)


def _read_body(text: str, variables: dict[str, str]) -> _Body:
    body = _Body(variables=variables)
    pending, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        pending, first = pending + line.strip(), first if pending else number
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        if pending and not pending.startswith("#"):
            _read_line(body, first, pending)
        pending = ""
    return body


def _read_line(body: _Body, number: int, line: str) -> None:
    exported = line.startswith("export ")
    match = ASSIGNMENT.fullmatch(line.removeprefix("export ").strip())
    if match is not None and (value := _plain_value(match[2], body.variables)) is not None:
        body.variables[match[1]] = value
        if exported:
            body.env[match[1]] = plain(value)
    elif match is not None and match[2].lstrip('"').startswith(("$(", "(", "`")):
        body.remarks.append(f"line {number}, {quoted(line)}: not carried over; its variable has no value here")
    elif (activated := _ACTIVATE.fullmatch(line)) is not None:
        body.python = plain(f"{expand(activated[1], body.variables)}/bin/python")
    elif line.startswith("cd ") and len(words := shlex.split(line)) == 2:
        body.directory = plain(expand(words[1], body.variables))
    elif _is_training(line):
        body.commands.append((number, read_line(line, body.variables)))
    elif line.split(maxsplit=1)[0] not in {"set", "echo", "date", "hostname"}:
        body.remarks.append(f"line {number}, {quoted(line)}: not carried over{_instead(line)}")


def _plain_value(text: str, known: Mapping[str, str]) -> str | None:
    """Return the value of an assignment that needs no shell; None where it needs one."""
    text = with_literals(text)
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return None
    if len(words) > 1 or "$(" in text or "`" in text:
        return None
    return expand(words[0], known) if words else ""


def _is_training(line: str) -> bool:
    first = line.split(maxsplit=1)[0]
    if first in _SHELL:
        return False
    return bool(
        WORDS.search(line) or _PROGRAM.fullmatch(first) or re.search(r"(?:^|\s)(?:\S*/)?python[0-9.]*\s+\S", line)
    )


def _instead(line: str) -> str:
    if line.startswith(("module ", "ml ")):
        return "; load it before `orch submit`: the `python` that is found then is the job's"
    if line.startswith("conda ") or line.split(maxsplit=1)[0] in {"source", "."}:
        return "; activate it before `orch submit`: the `python` that is found then is the job's"
    return "; put it into a script that the job runs" if not ASSIGNMENT.match(line.removeprefix("export ")) else ""


def _the_command(body: _Body) -> LaunchLine:
    if not body.commands:
        raise BadValueError(
            "no line of the script starts a training",
            "it needs one with python, srun, torchrun, accelerate or deepspeed",
        )
    launched = [item for item in body.commands if item[1].launched] or body.commands
    if len(launched) > 1:
        numbers = ", ".join(str(number) for number, _ in launched)
        raise BadValueError(
            f"lines {numbers} each start a training", "import each as a line of its own: orch import 'srun python ...'"
        )
    for number, line in body.commands:
        if line is not launched[0][1]:
            body.remarks.append(
                f"line {number}, {quoted(shlex.join(map(plain, line.words)))}: not carried over; make it a job of its own, and use depends_on"
            )
    return launched[0][1]


def _resources(options: Mapping[str, str], line: LaunchLine, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of ranks and the resources of each: the allocation, divided among the ranks."""
    ranks = given.get("num_workers", 1)
    gpus = gpus_of(options)
    if ranks == "auto" and gpus.total:
        ranks = gpus.total
    elif line.launched and not line.counted:
        ranks = _tasks(options)
    count = ranks if isinstance(ranks, int) else ranks["max"] if isinstance(ranks, dict) else 1
    worker: dict[str, Any] = {"gpu": _share(gpus.total or 0, count)}
    if options.get("cpus_per_task", "").isdecimal():
        worker["cpu"] = max(int(options["cpus_per_task"]) * _tasks(options) // count, 1)
    elif options.get("cpus_per_gpu", "").isdecimal() and gpus.total:
        worker["cpu"] = max(int(options["cpus_per_gpu"]) * gpus.total // count, 1)
    if (megabytes := _megabytes(options, gpus.total or 0)) is not None:
        worker["memory"] = _memory_text(max(megabytes // count, 1))
    if gpus.model:
        worker["gpu_model"] = gpus.model
    worker.update(given.get("resources_per_worker", {}))
    return {"num_workers": ranks, "resources_per_worker": worker}


def _share(gpus: int, ranks: int) -> int | float:
    return gpus // ranks if gpus % ranks == 0 else round(gpus / ranks, 4) if gpus < ranks else -(-gpus // ranks)


def _memory_text(megabytes: int) -> str:
    return f"{megabytes // 1024}GiB" if megabytes % 1024 == 0 else f"{megabytes}MiB"


def _megabytes(options: Mapping[str, str], gpus: int) -> int | None:
    """Return the memory of the whole allocation, in MiB; None where it is not limited."""
    cpus = options.get("cpus_per_task", "1")
    times = {
        "mem": _nodes(options),
        "mem_per_cpu": (int(cpus) if cpus.isdecimal() else 1) * _tasks(options),
        "mem_per_gpu": gpus,
    }
    for name, factor in times.items():
        match = _MEMORY.fullmatch(options.get(name, ""))
        if match is not None and int(match[1]) and factor:
            return int(int(match[1]) * 1024.0 ** _MEGABYTE_POWERS[match[2].upper()]) * factor
    return None
