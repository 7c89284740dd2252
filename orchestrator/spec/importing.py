"""Converts one shell line that launches a training, or a Slurm batch script, to the keys of job.yaml.

Of a script it reads #SBATCH lines, variables with plain values, `export`, `cd`, the activation of a virtual environment, and the
one command that starts the training. No line is run. A remark names every other line.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.spec.entrypoint import WORDS, parse_entrypoint, recognize, without_launchers
from orchestrator.spec.problems import BadValueError, quoted
from orchestrator.spec.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import timedelta

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


NOT_NEEDED = frozenset(
    {
        *("standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "master_addr", "master_port"),
        *("node_rank", "local_addr", "monitor_interval", "start_method", "use_env", "role", "redirects", "tee"),
        *("log_dir", "local_ranks_filter", "logs_specs", "event_log_handler", "signals_to_handle", "no_python"),
        *("m", "module", "run_path", "multi_gpu", "main_process_ip", "main_process_port", "num_machines"),
        *("machine_rank", "same_network", "rdzv_timeout", "tee_file", "hostfile", "launcher", "no_ssh"),
        *("no_ssh_check", "no_local_rank", "force_multi", "save_pid", "ssh_port", "l", "label", "u", "unbuffered"),
        *("v", "verbose", "q", "quiet", "mpi", "cpu_bind", "gpu_bind", "ntasks", "n", "nodes", "N"),
        *("ntasks_per_node", "nnodes", "num_nodes", "num_gpus", "nproc_per_node", "num_processes", "np", "c"),
        *("job_name", "J", "output", "o", "error", "e", "open_mode", "allow_run_as_root", "bind_to_none"),
        *("num_cpu_threads_per_process", "no_wait", "requeue", "parsable", "wait_all_nodes", "kill_on_bad_exit", "K"),
    }
)
"""Options that orch makes unnecessary: it starts the ranks, creates the rendezvous, labels and keeps the output."""

INSTEAD = {
    "config_file": "its settings are not read; pass them as options of accelerate launch",
    "gpu_ids": "orch picks the GPUs",
    "include": "orch picks the GPUs; resources.num_workers says how many",
    "exclude": "orch picks the GPUs; `orch nodes cordon` keeps a node free",
    "nodelist": "orch picks the nodes",
    "w": "orch picks the nodes",
    "x": "orch picks the nodes; `orch nodes cordon` keeps one free",
    "partition": "queue: NAME, where queues divide your cluster",
    "p": "queue: NAME, where queues divide your cluster",
    "account": "labels: {account: NAME} keeps it for your own lists",
    "A": "labels: {account: NAME} keeps it for your own lists",
    "qos": "priority: 0 to 100",
    "gres": "resources.resources_per_worker.gpu",
    "gpus": "resources.resources_per_worker.gpu",
    "gpus_per_node": "resources.resources_per_worker.gpu",
    "constraint": "resources.resources_per_worker.gpu_model for the model of GPU",
    "C": "resources.resources_per_worker.gpu_model for the model of GPU",
    "array": "matrix: parameters, one job for each value",
    "a": "matrix: parameters, one job for each value",
    "dependency": "depends_on: [{job: NAME, on: success}]",
    "d": "depends_on: [{job: NAME, on: success}]",
    "signal": "orch sends SIGTERM; stop_duration is the time to save",
    "mail_type": "notify: [{url: ..., on: [FAILED]}]",
    "mail_user": "notify: [{url: ..., on: [FAILED]}]",
    "export": "env: for values, secrets: for names of your environment",
    "exclusive": "ask for as many GPUs and CPUs as a node has",
    "use_deepspeed": "let the script configure DeepSpeed",
    "deepspeed_config_file": "let the script configure DeepSpeed",
    "use_fsdp": "let the script configure FSDP",
    "dynamo_backend": "env.ACCELERATE_DYNAMO_BACKEND",
    "container_image": "runtime_env, or the interpreter's full path in entrypoint",
    "begin": "submit it then",
}
"""Advice for options that have no counterpart."""


def shown(option: str, value: str) -> str:
    """Return the option as a person types it."""
    dashes = "-" if len(option) == 1 else "--"
    joint = " " if len(option) == 1 else "="
    return f"{dashes}{option.replace('_', '-')}" + (f"{joint}{value}" if value else "")


def remark(launcher: str, option: str, value: str) -> str | None:
    """Return the remark about an option that has no key; None where orch does by itself what it requests."""
    if option in NOT_NEEDED:
        return None
    instead = INSTEAD.get(option, "")
    return f"{launcher} {shown(option, value)}: not carried over" + (f"; {instead}" if instead else "")


ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_SLURM_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_REDIRECT = re.compile(r"\d*(?:>>|>|<)(?:&\d+)?|&>>?")
_ELASTIC = re.compile(r"\{min: (\d+), max: (\d+)\}")
_PLAIN = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null)$)[a-z][a-z0-9-]*|\d+[dhms](?:\d+[hms])*|\d+[KMGT]iB")
_WORD = re.compile(
    r"""\d*(?:>>|>|<)&\d+ | &>>? | \d*(?:>>|>|<) | &&|\|\||[;|&\n]
    | (?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^\s;|&<>'"\\]|['"\\])+""",
    re.VERBOSE | re.DOTALL,
)
"""Redirections, operators, and words; a quotation mark that is not closed is a word of its own."""
_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)
_LITERAL = {ord(character): chr(0xDC00 + ord(character)) for character in "$`"}
"""Stand-ins for characters that a shell would not act on: in single quotation marks, or after a backslash."""
_OPERATORS = frozenset({"&&", "||", ";", "|", "&", "\n"})
_NAME_LENGTH = 50
_PREFIXES = frozenset({"nohup", "exec", "time", "command", "stdbuf", "env"})
_LOCAL_RANK = frozenset({"deepspeed", "torch.distributed.launch"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The keys of job.yaml, nested as in the file, and a remark for each thing that has no key."""

    job: dict[str, Any]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLine:
    """A line without its launchers: one rank's command, keys of job.yaml, the line's variables, and remarks.

    ``counted``: an option of a launcher gives the number of ranks.
    """

    words: tuple[str, ...]
    keys: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    launched: bool = False
    counted: bool = False
    remarks: tuple[str, ...] = ()


def import_line(line: str) -> Imported:
    """Return the job that the line starts. Raises BadValueError for a line that starts none."""
    found = read_line(line)
    job: dict[str, Any] = {"version": 1, "name": name_for(found.words), "entrypoint": entrypoint_text(found.words)}
    remarks = list(found.remarks) + shell_remarks(found.words)
    if found.env:
        job["env"] = dict(found.env)
    set_keys(job, found.keys)
    resources = job.setdefault("resources", {})
    resources.setdefault("num_workers", 1)
    resources.setdefault("resources_per_worker", {}).setdefault("gpu", 1)
    parse_entrypoint(job["entrypoint"])
    return Imported(job=job, remarks=tuple(remarks))


def read_line(line: str, variables: Mapping[str, str] | None = None) -> LaunchLine:
    """Parse a shell line, and replace the variables that have a value in ``variables``.

    Raises:
        BadValueError: unbalanced quotation marks, several commands, no command.

    """
    known = variables or {}
    words, remarks = _one_command(_words(line))
    env: dict[str, str] = {}
    while words and (words[0] in _PREFIXES or ASSIGNMENT.fullmatch(words[0])):
        match = ASSIGNMENT.fullmatch(words.pop(0))
        if match is not None:
            env[match[1]] = plain(expand(match[2], known))
    if not words:
        raise BadValueError(f"{quoted(line)} starts no command", "give the line that starts the training")
    launched = without_launchers(recognize(tuple(expand(word, known) for word in words)))
    if env.pop("CUDA_VISIBLE_DEVICES", None) is not None:
        remarks.append("CUDA_VISIBLE_DEVICES: not carried over; orch picks the GPUs")
    expanded = tuple(expand(word, known) for word in words)
    if launched is None:
        return LaunchLine(words=expanded, env=env, remarks=tuple(remarks))
    for launcher, option, value in launched.options:
        if (found := remark(launcher, option, value)) is not None:
            remarks.append(found)
    if _passes_local_rank(expanded, {option for _, option, _ in launched.options}):
        remarks.append("the launcher passes --local-rank to the script, orch does not: read the variable LOCAL_RANK")
    keys = {key: plain(text) for key, text in launched.keys}
    if "max_duration" in keys:
        keys["max_duration"] = slurm_time(keys["max_duration"])
    return LaunchLine(
        words=launched.words, keys=keys, env=env, launched=True, counted=launched.counted, remarks=tuple(remarks)
    )


def _words(line: str) -> list[str]:
    """Return the words as written, quotation marks included; operators stand alone, a comment ends the line."""
    found = [match[0] for match in _WORD.finditer(line.strip().replace("\\\n", " "))]
    comment = next((position for position, word in enumerate(found) if word.startswith("#")), len(found))
    try:
        for word in found[:comment]:
            shlex.split(word)
    except ValueError as error:
        raise BadValueError(f"{quoted(line)}: a quotation mark is not closed", "close it") from error
    return found[:comment]


def _one_command(raw: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of the only command, without quotation marks, and remarks about what was left out."""
    words: list[str] = []
    remarks: list[str] = []
    rest = list(raw)
    while rest:
        word = rest.pop(0)
        if word in {"&", ";"} and not rest:
            break  # orch runs everything in the background
        if word == "|" and rest[:1] == ["tee"]:
            remarks.append(f"| {' '.join(rest)}: left out; `orch logs` shows the output")
            break
        if word in _OPERATORS:
            raise BadValueError(
                f"{quoted(word)} joins several commands", "give the one that starts the training, or a script file"
            )
        if _REDIRECT.fullmatch(word):
            target = rest.pop(0) if word[-1] in "<>" and rest else ""
            remarks.append(f"{word}{target}: left out; `orch logs` shows the output")
            continue
        words += shlex.split(with_literals(word))
    return words, remarks


def with_literals(word: str) -> str:
    """Return a word as written, with stand-ins for the characters that a shell would not act on; ``plain`` undoes it."""
    return _QUOTED.sub(_literal, word)


def _literal(part: re.Match[str]) -> str:
    if part[0].startswith("'"):
        return part[0].translate(_LITERAL)
    return re.sub(r"\\([$`])", lambda match: match[1].translate(_LITERAL), part[0])


def plain(word: str) -> str:
    """Return the word with the characters that it has stand-ins for."""
    return word.translate({ord(stand_in): character for character, stand_in in _LITERAL.items()})


def _passes_local_rank(words: Sequence[str], options: set[str]) -> bool:
    named = {words[0].rpartition("/")[2], *(words[position + 1] for position, w in enumerate(words[:-1]) if w == "-m")}
    return bool(named & _LOCAL_RANK) and not options & {"use_env", "no_local_rank"}


def expand(word: str, known: Mapping[str, str]) -> str:
    """Replace the variables of the word that have a value in ``known``; others stay."""
    return _VARIABLE.sub(lambda match: known.get(match[1] or match[2], match[0]), word)


def entrypoint_text(words: Sequence[str]) -> str:
    """Return the line for `entrypoint`; a command with variables left is run by a shell."""
    if not any(_VARIABLE.search(word) for word in words):
        return shlex.join(map(plain, words))
    text = "exec " + " ".join(f'"{_escaped(w)}"' if _VARIABLE.search(w) else shlex.quote(plain(w)) for w in words)
    return f"bash -c {shlex.quote(text)}"


def _escaped(word: str) -> str:
    return plain(re.sub(f'(["\\\\`{"".join(_LITERAL.values())}])', r"\\\1", word))


def shell_remarks(words: Sequence[str]) -> list[str]:
    """Return a remark where a shell must replace variables; an empty list otherwise."""
    names = sorted({match[1] or match[2] for word in words for match in _VARIABLE.finditer(word)})
    if not names:
        return []
    text = ", ".join(f"${name}" for name in names)
    return [f"{text}: left to a shell on the rank's node, which starts slower; write the value, or set it in env:"]


def set_keys(job: dict[str, Any], keys: Mapping[str, str]) -> None:
    """Put values with dotted keys into the nested job."""
    for key, text in keys.items():
        *parents, last = key.split(".")
        place = job
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = _value(text) if parents[:1] != ["env"] else text


def _value(text: str) -> Any:
    if (elastic := _ELASTIC.fullmatch(text)) is not None:
        return {"min": int(elastic[1]), "max": int(elastic[2])}
    return int(text) if text.isdecimal() else text


def slurm_time(text: str) -> str:
    """Convert Slurm's ``days-hours:minutes:seconds`` to a duration of orch; return any other text unchanged."""
    match = _SLURM_TIME.fullmatch(text)
    if match is None:
        return text
    return format_duration(_span(match))


def _span(match: re.Match[str]) -> timedelta:
    from datetime import timedelta

    days, first, second, third = match.groups()
    if days is not None:
        return timedelta(days=int(days), hours=int(first), minutes=int(second or 0), seconds=int(third or 0))
    if third is not None:
        return timedelta(hours=int(first), minutes=int(second), seconds=int(third))
    return timedelta(minutes=int(first), seconds=int(second or 0))


def name_for(words: Sequence[str]) -> str:
    """Return a job's name: that of its script or module, else that of its program."""
    plain = [word for word in words if not word.startswith("-")]
    script = next((word for word in plain if word.endswith((".py", ".sh"))), None)
    if script is None and "-m" in words[:-1]:
        script = words[list(words).index("-m") + 1].rpartition(".")[2]
    stem = (script or words[0]).rpartition("/")[2].removesuffix(".py").removesuffix(".sh")
    return as_name(stem)


def as_name(text: str) -> str:
    """Convert a text to a name that job.yaml accepts."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_NAME_LENGTH].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".strip("-")


def job_text(job: Mapping[str, Any]) -> str:
    """Return the job as the text of a job.yaml."""
    return "".join(_lines(job, ""))


def _lines(values: Mapping[str, Any], indent: str) -> Iterator[str]:
    from orchestrator.spec.entrypoint import yaml_line

    for key, value in values.items():
        if isinstance(value, dict) and set(value) == {"min", "max"}:
            yield f"{indent}{key}: {{min: {value['min']}, max: {value['max']}}}\n"
        elif isinstance(value, dict):
            yield f"{indent}{key}:\n"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, str) and not _PLAIN.fullmatch(value):
            yield f"{indent}{yaml_line(key, value)}\n"
        else:
            yield f"{indent}{key}: {value}\n"
