"""Converts one shell line that launches a training, or a Slurm batch script, to the keys of job.yaml.

Of a script it reads the #SBATCH lines that Slurm reads, variables, `export`, `cd`, the activation of a virtual environment, and
the one command that starts the training. No line is run. A remark names every other line; what bash would replace in the
command is replaced here, left to a shell with a remark, or refused.
"""

from __future__ import annotations

import ast
import operator
import posixpath
import re
import shlex
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from orchestrator.spec.entrypoint import (
    SLURM_FLAGS,
    WORDS,
    find_launcher,
    parse_entrypoint,
    recognize,
    without_launchers,
)
from orchestrator.spec.problems import BadValueError, quoted
from orchestrator.spec.shell import ASSIGNMENT, Command, Expansion, Shell, items_of
from orchestrator.spec.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import timedelta


class SbatchLine(NamedTuple):
    """A line of sbatch: its options as a line of a script, and what they apply to, a script's path or the command of --wrap."""

    directive: str
    script: str = ""
    command: str = ""
    arguments: tuple[str, ...] = ()


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
        flag = word.lstrip("-").replace("-", "_") in SLURM_FLAGS
        takes_next = not equals and not flag and (word.startswith("--") or len(word) == 2)
        if takes_next and not rest:
            raise BadValueError(f"{quoted(word)} has no value", "write it after the option")
        value = rest.pop(0) if takes_next else value
        if name == "--wrap":
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
_OTHER_DIRECTIVE = re.compile(r"#(?:PBS|BSUB|COBALT|OAR|\$) ")
_NODES = re.compile(r"\d+(?:-\d+)?")
_GRES = re.compile(r"(?:gres/)?gpu(?::([A-Za-z][A-Za-z0-9_.-]*))?(?::(\d+))?(?:\(.*\))?")
_GPUS = re.compile(r"(?:([A-Za-z][A-Za-z0-9_.-]*):)?(\d+)")
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)
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


def import_script(text: str, batch: SbatchLine | None = None) -> Imported:
    """Return the job that a batch script starts, submitted as ``batch``.

    Raises:
        BadValueError: no training command, several, or one with a value that is not known.

    """
    options, remarks = _directives(text, batch.directive if batch else "")
    script = _Script(_slurm_variables(options), batch.arguments if batch else (), options.get("chdir", ""))
    script.read(text)
    line = _the_command(script)
    name = as_name(options["job_name"]) if options.get("job_name") else name_for(line.words)
    job: dict[str, Any] = {"version": 1, "name": name}
    _set_line(job, script, line)
    job["resources"] = _resources(options, line, job.get("resources", {}))
    if duration := slurm_time(options.get("time", "")):
        job.setdefault("max_duration", duration)
    return Imported(job=job, remarks=_restored(script, (*remarks, *script.remarks, *line.remarks)))


def _restored(script: _Script, remarks: Sequence[str]) -> tuple[str, ...]:
    """Return each remark once, with the expansions in it as they were written."""
    return tuple(dict.fromkeys(map(script.shell.restored, remarks)))


def import_line(line: str) -> Imported:
    """Return the job that the line starts. Raises BadValueError for a line that starts none."""
    script = _Script({})
    script.read(line)
    if not script.launches:
        script = _Script({})
        script.read(line, alone=True)
    if not script.launches:
        raise BadValueError(f"{quoted(line)} starts no command", "give the line that starts the training")
    found = _the_command(script)
    job: dict[str, Any] = {"version": 1, "name": name_for(found.words)}
    _set_line(job, script, found)
    resources = job.setdefault("resources", {})
    resources.setdefault("num_workers", 1)
    resources.setdefault("resources_per_worker", {}).setdefault("gpu", 1)
    return Imported(job=job, remarks=_restored(script, (*script.remarks, *found.remarks)))


def _directives(text: str, last: str) -> tuple[dict[str, str], list[str]]:
    """Return the options that Slurm reads: those before the first command, and those of ``last``, which override them."""
    options: dict[str, str] = {}
    remarks: list[str] = []
    header = True
    for number, line in [*enumerate(text.splitlines(), 1), (0, last)]:
        header = (header and (not line.strip() or line.lstrip().startswith("#"))) or not number
        match = _DIRECTIVE.match(line)
        if match is None:
            if header and _OTHER_DIRECTIVE.match(line):
                remarks.append(f"line {number}, {quoted(line)}: not carried over; only #SBATCH lines are read")
            continue
        if not header:
            remarks.append(f"line {number}, {quoted(line)}: not carried over; Slurm reads none after the first command")
            continue
        try:
            words = shlex.split(match[1], comments=True)
        except ValueError as error:
            raise BadValueError(f"{quoted(line)}: a quotation mark is not closed", "close it") from error
        if words == ["hetjob"]:
            raise BadValueError(
                f"{quoted(line)}: ranks of one job have the same resources", "import each part as a script"
            )
        while words:
            word = words.pop(0)
            name, equals, value = word.lstrip("-").partition("=")
            if not word.startswith("--") and len(word) > 2 and word[1] in _SHORT:
                name, value = word[1], word[2:]
            elif not equals and words and not words[0].startswith("-"):
                value = words.pop(0)
            name = name.replace("-", "_")
            options[_SHORT.get(name, name)] = value
    found = (remark("sbatch", name, value) for name, value in options.items() if name not in _READ)
    return options, [*remarks, *(text for text in found if text), *_check(options)]


def _check(options: Mapping[str, str]) -> Iterator[str]:
    """Raise BadValueError for a value that is read and not understood; return remarks about generic resources."""
    forms = {"nodes": _NODES, "mem": _MEMORY, "mem_per_cpu": _MEMORY, "mem_per_gpu": _MEMORY}
    forms |= dict.fromkeys(("gpus", "gpus_per_node", "gpus_per_task"), _GPUS)
    forms |= dict.fromkeys(("ntasks", "ntasks_per_node", "cpus_per_task", "cpus_per_gpu"), re.compile(r"\d+"))
    for name, value in options.items():
        if name in forms and not forms[name].fullmatch(value):
            raise BadValueError(
                f"sbatch {shown(name, value)}: the value is not understood",
                "write a number; sbatch expands no variables",
            )
    for part in filter(None, options.get("gres", "").split(",")):
        if _GRES.fullmatch(part) is None and part != "none":
            if part.startswith("gpu"):
                raise BadValueError(f"sbatch --gres={part}: the value is not understood", "write gpu:NUMBER")
            yield f"sbatch --gres={part}: not carried over"


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
    text = options.get("nodes", "").partition("-")[0]
    if not text and "ntasks" in options and "ntasks_per_node" in options:
        return max(-(-int(options["ntasks"]) // max(int(options["ntasks_per_node"]), 1)), 1)
    return max(int(text or 1), 1)


def _tasks(options: Mapping[str, str]) -> int:
    if "ntasks" in options:
        return max(int(options["ntasks"]), 1)
    return _nodes(options) * max(int(options.get("ntasks_per_node", 1)), 1)


def gpus_of(options: Mapping[str, str]) -> Gpus:
    """Return the number of GPUs that the options request in all, and their model."""
    for name, times in (("gpus", 1), ("gpus_per_node", _nodes(options)), ("gpus_per_task", _tasks(options))):
        if (match := _GPUS.fullmatch(options.get(name, ""))) is not None:
            return Gpus(int(match[2]) * times, match[1] or "")
    for part in options.get("gres", "").split(","):
        if (match := _GRES.fullmatch(part)) is not None:
            return Gpus(int(match[2] or 1) * _nodes(options), match[1] or "")
    return Gpus(None)


_OPENING = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac", "{": "}"}
_LOOPS = frozenset({"for", "while", "until", "select"})
_KEYWORDS = frozenset({*_OPENING, *_OPENING.values(), "then", "elif", "else", "do", "function", "!"})
_DECLARE = frozenset({"export", "declare", "typeset", "local", "readonly"})
_TESTS = frozenset({"[", "[[", "test"})
_SILENT = frozenset(
    {"set", "echo", "date", "hostname", "wait", "sleep", "pwd", "which", "printf", "true", ":", "exit", "break"}
)
_PREFIXES = {
    **dict.fromkeys(("nohup", "command", "setsid", "unbuffer", "taskset", "chrt"), ""),
    "exec": "a",
    "time": "fo",
    "stdbuf": "ioe",
    "env": "uC",
    "nice": "n",
    "ionice": "cnp",
    "timeout": "sk",
    "numactl": "NmCpP",
}
"""Programs that run the words after their options, with the short options that take the next word."""
_WITH_OPERAND = frozenset({"timeout", "taskset", "chrt"})
_NO_EFFECT = frozenset({"nohup", "exec", "time", "command", "setsid", "stdbuf", "env", "unbuffer"})
_LONG_WITH_VALUE = frozenset(
    {"unset", "chdir", "adjustment", "signal", "kill_after", "class", "classdata", "output", "format", "input", "error"}
    | {"cpunodebind", "membind", "physcpubind", "interleave", "preferred"}
)
_WRAPPERS = {
    **dict.fromkeys(("singularity", "apptainer", "docker", "podman"), ("exec", "run")),
    **dict.fromkeys(("conda", "mamba", "micromamba", "uv", "poetry", "pipenv", "pixi", "hatch"), ("run",)),
    "nsys": ("profile",),
}
"""Programs that run a command in another environment, with the words that say so; they stay in the entry point."""
_PROGRAM = re.compile(r"python[0-9.]*")
_NOT_TRAINING = frozenset({"-c", "-V", "--version", "-", "setup.py"})
_NOT_TRAINING_MODULES = frozenset({"pip", "venv", "virtualenv", "ensurepip", "compileall", "site"})
_NUMBERS = frozenset(
    {"retry.max_restarts.user", *(f"resources.resources_per_worker.{name}" for name in ("cpu", "gpu"))}
)
_ERRANDS = frozenset(
    {"hostname", "nvidia-smi", "echo", "date", "env", "mkdir", "rm", "cp", "mv", "tar", "rsync", "ls", "true"}
)
"""Programs that a script starts with srun, and that are no training."""
_OURS = frozenset(
    {"CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
)
_SLURM_COUNTERPARTS = {
    "SLURM_PROCID": "$RANK",
    "SLURM_LOCALID": "$LOCAL_RANK",
    "SLURM_JOB_ID": "$ORCH_JOB_ID",
    "SLURM_JOBID": "$ORCH_JOB_ID",
}
_SLURM_PROGRAM = re.compile(r"\b(?:srun|scontrol|squeue|sacct|sinfo|sbatch)\b")
_RUNS_PROGRAM = re.compile(r"`|\$\((?!\()")
_DEFAULT = re.compile(r"\$\{([A-Za-z_0-9]+):?([-=])(.*)\}", re.DOTALL)
_NAME = re.compile(r"\$(?:\{([A-Za-z_]\w*|[0-9]+|[@*#])\}|([A-Za-z_]\w*|[0-9]|[@*#]))", re.ASCII)
_ARRAY = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}", re.ASCII)
_OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_LARGEST, _LONGEST, _DEEPEST = 10**9, 2**20, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The keys of job.yaml, nested as in the file, and a remark for each thing that has no key."""

    job: dict[str, Any]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLine:
    """A command without its launchers: one rank's command, keys of job.yaml, its variables and directory, and remarks.

    ``counted``: an option of a launcher gives the number of ranks.
    """

    number: int
    words: tuple[str, ...]
    keys: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    directory: str = ""
    launched: bool = False
    counted: bool = False
    remarks: tuple[str, ...] = ()


class _Script:
    """The variables, directory and training commands found so far, in the order of the script."""

    def __init__(self, variables: Mapping[str, str], arguments: Sequence[str] = (), directory: str = "") -> None:
        self.shell = Shell()
        self.variables = dict(variables)
        self.arguments = tuple(arguments)
        self.unknown: set[str] = set()
        self.exported: dict[str, None] = {}  # in the order of the script
        self.directory = directory
        self.piped = False  # whether the output of the training goes to the next command
        self.python = ""
        self.remarks: list[str] = []
        self.launches: list[LaunchLine] = []

    def read(self, text: str, *, alone: bool = False) -> None:
        """Read a script's text; with ``alone``, every command is a training."""
        blocks: list[str] = []
        function = False
        before: tuple[Command, list[str]] | None = None
        for command in self.shell.commands(text):
            words = list(command.words)
            while words and words[0] in _KEYWORDS:
                word = words.pop(0)
                if blocks and word == _OPENING.get(blocks[-1].removesuffix("()")):
                    blocks.pop()
                elif word in _OPENING:
                    blocks.append(word + "()" * function)
                    function = False
                function = function or word == "function"
                if word in {"for", "select", "case"} or (word == "function" and words):
                    self.unknown.update(words[:1])
                    words = words[1:] if word == "function" else []
            if len(blocks) > _DEEPEST:
                raise BadValueError(
                    "the script's blocks are nested too deeply", "give the line that starts the training alone"
                )
            joined = before[0].operator if before else ""
            if command.operator == "(":
                function = function or len(words) == 1
                blocks.append("(")
            elif command.operator == ")" and blocks and blocks[-1] == "(":
                blocks.pop()
            elif command.operator == ")":  # a pattern of `case`
                words = []
            inside = next((name for name in (*(b for b in blocks if b in _LOOPS), *blocks) if name not in "{("), "")
            tested = joined == "&&" and before is not None and before[1][:1] and before[1][0] in _TESTS
            inside = "||" if joined == "||" else inside or ("&&" if tested else "")
            if words and words[0] in {"exit", "return"} and not inside and joined != "&&":
                return
            if words and not (command.operator == "(" and function):
                self._command(command, words, inside, joined, alone=alone)
            if words or command.operator not in {"", "\n"}:
                before = (command, words)

    def _command(self, command: Command, words: list[str], inside: str, joined: str, *, alone: bool) -> None:
        first = self.shell.restored(words[0])
        changes = words[1:] if first in _DECLARE else words
        pairs = [ASSIGNMENT.fullmatch(word) for word in changes]
        if first in _DECLARE or all(pairs):
            self._assign(command, changes, inside, exported=first == "export" or "-x" in changes)
            return
        notes: list[str] = []
        expanded = self.expanded(words, notes)
        program = expanded[0] if expanded else ""
        if program == ":":  # `: ${NAME:=value}` gives a variable its value
            self.remarks += notes
        if joined in {"|", "|&"} and not self._starts_training(expanded):
            if self.piped and program == "tee":
                note = f"| {command.source}: left out; `orch logs` shows the output"
                self.launches[-1] = replace(self.launches[-1], remarks=(*self.launches[-1].remarks, note))
            elif self.piped:
                self._refuse_joined(joined)
            return
        self.piped = False
        if program in {"source", "."} and len(expanded) > 1 and expanded[1].endswith("/bin/activate") and not inside:
            self.python = expanded[1].removesuffix("activate") + "python"
        elif program == "cd" and not inside and (place := self._place(expanded[1:])):
            # the directory of the submission, `.`, is not relative to --chdir
            submitted = "SLURM_SUBMIT_DIR" in self.shell.restored(words[1])
            self.directory = posixpath.join("" if submitted else self.directory, place)
        elif self._starts_training(expanded) or (alone and program not in {"cd", *_SILENT}):
            self._training(command, words, inside, joined)
        elif program in {"read", "mapfile", "readarray", "unset", "getopts"}:
            self.unknown.update(word for word in expanded[1:] if not word.startswith("-"))
            self._leave_out(command, program)
        elif program not in _SILENT or (program == "set" and {"-a", "--"} & set(expanded)):
            self._leave_out(command, program)

    def _place(self, words: Sequence[str]) -> str:
        known = len(words) == 1 and not words[0].startswith("-") and not self.shell.open(words[0])
        return words[0] if known else ""

    def _leave_out(self, command: Command, program: str) -> None:
        instead = "; put it into a script that the job runs"
        if program in {"module", "ml"}:
            instead = "; load it before `orch submit`: the `python` that is found then is the job's"
        elif program in {"conda", "source", "."}:
            instead = "; activate it before `orch submit`: the `python` that is found then is the job's"
        elif program == "cd":
            instead = "; set working_dir"
        self.remarks.append(f"line {command.line}, {quoted(command.source)}: not carried over{instead}")

    def _assign(self, command: Command, words: Sequence[str], inside: str, *, exported: bool) -> None:
        for word in words:
            match = ASSIGNMENT.fullmatch(word)
            name = match[1] if match else word
            if not name.isidentifier():
                continue
            if exported:
                self.exported[name] = None
            if inside:
                if name not in self.variables:
                    self.unknown.add(name)
                stays = f", so ${name} stays {quoted(self.variables[name])}" if name in self.variables else ""
                self.remarks.append(
                    f"line {command.line}, {quoted(command.source)}: not carried over; it is in `{inside}`{stays}"
                )
            elif match is not None:
                value = self._value(match[3])
                old = self.variables.get(name, "")
                if match[2] and old.startswith("\0") and value.startswith("\0"):
                    value = value[1:]
                self.variables[name] = old + value if match[2] else value
                self.unknown.discard(name)
                if any(_RUNS_PROGRAM.match(one.text) for one in self.shell.open(match[3])):
                    self.remarks.append(
                        f"line {command.line}, {quoted(command.source)}: not run here; its text replaces ${name} where that is used"
                    )

    def _value(self, text: str) -> str:
        """Return the value of an assignment: bash divides no words in it, and matches no file names."""
        if text.startswith("\0"):
            return "\0" + "".join(f"{word}\0" for word in self.expanded(items_of(text), self.remarks))
        text = "".join(
            part if isinstance(part, str)
            else self.shell.mark(part.text, quoted=True) if part.text.startswith(("$", "`")) and part.text[:2] != "$'"
            else self.shell.mark(part.text, quoted=False) if part.text[0] in "~$<>"
            else part.text
            for part in self.shell.parts(text)
        )  # fmt: skip
        return " ".join(self.expanded([text], self.remarks))

    def expanded(self, words: Sequence[str], remarks: list[str]) -> list[str]:
        """Return the words with every expansion replaced whose value is known; an unquoted value becomes several words."""
        found: list[str] = []
        for word in words:
            pieces = [""]
            present = not word
            for part in self.shell.parts(word):
                value = self._known(part, remarks) if isinstance(part, Expansion) else part
                if isinstance(part, Expansion) and not part.quoted and isinstance(value, str):
                    value = [self._unquoted(one) for one in value.split()]
                several = value if isinstance(value, list) else [value]
                present = present or bool(several)
                if sum(map(len, several)) + len(pieces[-1]) > _LONGEST:
                    raise BadValueError("a value is longer than 1 MiB", "give the line that starts the training alone")
                pieces[-1:] = [pieces[-1] + several[0], *several[1:]] if several else pieces[-1:]
            found += pieces if present else []
        return found

    def _unquoted(self, text: str) -> str:
        """Return a word of an unquoted value: patterns of file names are active in it."""
        word = "".join(
            self.shell.mark(part.text, quoted=False) if isinstance(part, Expansion) else part
            for part in self.shell.parts(text)
        )
        return re.sub(r"[*?]|\[[^\]\s]+\]", lambda match: self.shell.mark(match[0], quoted=False), word)

    def _known(self, part: Expansion, remarks: list[str]) -> str | list[str]:
        """Return the value of an expansion, a list for an array; what is not known stays the expansion's mark."""
        mark = self.shell.mark(part.text, quoted=part.quoted)
        if part.text.startswith("$(("):
            return self._number(part.text[3:-2], mark)
        if (array := _ARRAY.fullmatch(part.text)) is not None and self.variables.get(array[1], "").startswith("\0"):
            return self._items(items_of(self.variables[array[1]]), part)
        match = _NAME.fullmatch(part.text)
        name = (match[1] or match[2]) if match is not None else ""
        if name in {"@", "*"}:
            if not self.arguments:
                remarks.append(f"{part.text}: the script's arguments; there are none, add yours to the entrypoint")
            return self._items(list(self.arguments), part)
        if name == "#":
            return str(len(self.arguments))
        default = _DEFAULT.fullmatch(part.text)
        wanted = default[1] if default is not None else name
        value = self.variables.get(wanted)
        if wanted.isdecimal() and 0 < int(wanted) <= len(self.arguments):
            value = self.arguments[int(wanted) - 1]
        if value is not None:
            return value if not value.startswith("\0") else (items_of(value) or [""])[0]
        text = default[3] if default is not None else "'"
        text = text[1:-1] if text[:1] == text[-1:] == '"' and len(text) > 1 else text
        if default is not None and wanted not in self.unknown and not {"'", '"'} & set(text):
            value = " ".join(self.expanded([self.shell.word(text)], remarks))
            if default[2] == "=":
                self.variables[wanted] = value
            remarks.append(f"{part.text}: {wanted} has no value here, {quoted(self.shell.restored(value))} is taken")
            return value
        if name in _SLURM_COUNTERPARTS:
            return [self.shell.mark(_SLURM_COUNTERPARTS[name], quoted=part.quoted)]
        return [mark]

    def _items(self, words: list[str], part: Expansion) -> list[str]:
        if part.quoted:
            return words if "*" not in part.text else [" ".join(words)]
        return [self._unquoted(one) for word in words for one in word.split()]

    def _number(self, text: str, mark: str) -> str | list[str]:
        """Return the value of an arithmetic expression of known whole numbers."""
        text = re.sub(
            r"\$?\{?([A-Za-z_][A-Za-z0-9_]*)\}?", lambda match: self.variables.get(match[1], match[0]), text
        ).strip()
        if not re.fullmatch(r"[0-9+*/%() -]{1,200}", text):
            return [mark]
        try:
            return str(_result(ast.parse(text, mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return [mark]

    def _starts_training(self, words: Sequence[str]) -> bool:
        rest = list(words)
        while rest and (ASSIGNMENT.fullmatch(rest[0]) or rest[0].rpartition("/")[2] in _PREFIXES):
            rest, _ = _without_prefix(rest)
        if not rest:
            return False
        program = rest[0].rpartition("/")[2]
        if _PROGRAM.fullmatch(program):
            options = [word for word in rest[1:3] if word != "-u"]
            module = options[1] if options[:1] == ["-m"] and len(options) > 1 else ""
            return bool(options) and options[0] not in _NOT_TRAINING and module not in _NOT_TRAINING_MODULES
        if (text := _inner_text(rest)) is not None:
            text = self.shell.restored(text)
            return bool(WORDS.search(text) or re.search(r"(?:^|[\s/])python[0-9.]*\s", text))
        if _wrapped(rest):
            return True
        if find_launcher(tuple(rest), python=None, module=None) is None:
            return False
        step = without_launchers(recognize(tuple(rest)))
        started = step.words if step is not None else ("",)
        program = started[0].rpartition("/")[2]
        return program not in _ERRANDS and (not _PROGRAM.fullmatch(program) or self._starts_training(started))

    def _training(self, command: Command, raw: list[str], inside: str, joined: str) -> None:
        if inside in _LOOPS:
            raise BadValueError(
                f"line {command.line}, {quoted(command.source)}: it is in a loop (`{inside}`)",
                "give the line alone; matrix: makes a job of each value, and retry: starts a job again",
            )
        if inside == "||" or joined in {"|", "|&"}:
            self._refuse_joined(joined)
        self.piped = command.operator in {"|", "|&"}
        remarks: list[str] = []
        if inside:
            place = "a function" if inside.endswith("()") else f"`{inside}`"
            remarks.append(
                f"line {command.line}, {quoted(command.source)}: taken as if it always runs; it is in {place}"
            )
        if command.document or any("<<<" in one for one in command.redirections):
            raise BadValueError(
                f"line {command.line}, {quoted(command.source)}: its input is a text of the script",
                "write the text to a file, and give the command that reads it",
            )
        for one in command.redirections:
            instead = "a rank has no standard input" if "<" in one else "`orch logs` shows the output"
            remarks.append(f"{one}: left out; {instead}")
        self.launches.append(self._launch(command, raw, remarks))

    @staticmethod
    def _refuse_joined(operator: str) -> NoReturn:
        raise BadValueError(
            f"{quoted(operator)} joins several commands", "give the one that starts the training, or a script file"
        )

    def _launch(self, command: Command, raw: Sequence[str], remarks: list[str]) -> LaunchLine:
        """Return the command without prefixes and launchers, in whatever order they stand."""
        env = {name: self.variables[name] for name in self.exported if name in self.variables}
        words = list(raw)
        while words and (match := ASSIGNMENT.fullmatch(words[0])) is not None:
            env[match[1]] = self._value(match[3])
            words.pop(0)
        words = self.expanded(words, remarks)
        keys: dict[str, str] = {}
        kept: list[str] = []
        launched = counted = False
        while words:
            program = words[0].rpartition("/")[2]
            if (match := ASSIGNMENT.fullmatch(words[0])) is not None:
                env[match[1]] = match[3]
                words.pop(0)
                continue
            if program in _PREFIXES:
                words, options = _without_prefix(words)
                if program == "timeout" and (limit := re.fullmatch(r"0*(\d+)([smhd]?)", (options or [""])[-1])):
                    keys["max_duration"] = limit[1] + (limit[2] or "s") if limit[1] != "0" else ""
                elif program not in _NO_EFFECT or (program == "env" and options):
                    remarks.append(
                        f"{self.shell.restored(' '.join((program, *options)))}: left out; orch binds and limits the ranks"
                    )
                continue
            start = _wrapped(words)
            if start and find_launcher(tuple(words[start:]), python=None, module=None) is not None:
                kept, words = kept + words[:start], words[start:]
                continue
            step = without_launchers(recognize(tuple(words)))
            if step is None:
                break
            if step.unknown:
                raise BadValueError(
                    f"{step.launcher} {self.shell.restored(shown(*step.unknown.split('=', 1)))}: the number of ranks is not known",
                    "write the number, or set the variable in the script or before the command: NAME=8 torchrun ...",
                )
            for launcher, option, value in step.options:
                if option == "multi_prog":
                    raise BadValueError(
                        "srun --multi-prog: ranks of one job run the same command", "import each line of its file"
                    )
                if launcher == "mpirun" and option == "x" and value in env:
                    continue
                if (found := remark(launcher, option, value)) is not None:
                    remarks.append(found)
            if _passes_local_rank(words, {option for _, option, _ in step.options}):
                remarks.append(
                    "the launcher passes --local-rank to the script, orch does not: read the variable LOCAL_RANK"
                )
            given = dict(step.keys)
            if "max_duration" in given:
                given["max_duration"] = slurm_time(self.shell.restored(given["max_duration"]))
            keys |= given
            launched, counted = True, counted or step.counted
            words = list(step.words)
        if not words:
            raise BadValueError(f"{quoted(command.source)} starts no command", "give the line that starts the training")
        for key in [key for key in keys if key.startswith("env.")]:
            env[key.removeprefix("env.")] = keys.pop(key)
        for key, value in list(keys.items()):
            number = _GPUS.fullmatch(value) if key.startswith("resources.resources") else None
            if number is not None:
                keys |= {key: number[2], **({f"{key}_model": number[1]} if number[1] else {})}
            elif self.shell.open(value) or (key in _NUMBERS and not value.isdecimal()):
                raise BadValueError(
                    f"{quoted(self.shell.restored(value))}: this value of {key} is not known", "write the number"
                )
        keys = {key: value for key, value in keys.items() if value}
        line = LaunchLine(
            number=command.line, words=tuple(kept + words), keys=keys, env=env, directory=self.directory,
            launched=launched, counted=counted, remarks=tuple(remarks),
        )  # fmt: skip
        return self._opened(command, line)

    def _opened(self, command: Command, line: LaunchLine) -> LaunchLine:
        """Read the text of `bash -c` as a script of its own: the training in it, if that is all it does."""
        text = _inner_text(line.words)
        if text is None:
            program = next((word for word in line.words[:2] if word.endswith((".sh", ".sbatch", ".slurm"))), "")
            note = f"{program} is not read: if it starts torchrun or another launcher, import it instead"
            return replace(line, remarks=(*line.remarks, note)) if program else line
        # the outer shell replaces these in single quotation marks too, the reader of the text would not
        outside = bool(self.shell.open(text)) and "'" in text
        text = self.shell.restored(text)
        inner = _Script(self.variables, self.arguments)
        inner.shell, inner.exported, inner.unknown = self.shell, dict(self.exported), self.unknown
        inner.directory, inner.python = line.directory, self.python
        inner.read(text)
        launches = [one for one in inner.launches if one.launched] or inner.launches
        if not WORDS.search(text) and (outside or len(inner.launches) != 1 or inner.remarks):
            _refuse_slurm(text, quoted(text))
            return line  # the shell does it all
        if outside or len(launches) != 1:
            raise BadValueError(
                f"line {command.line}, {quoted(command.source)}: a launcher within a shell, which orch would start in each rank",
                "import the line that starts the launcher alone",
            )
        self.remarks += inner.remarks
        found = launches[0]
        self.python = inner.python
        return replace(
            found, number=line.number, keys={**line.keys, **found.keys}, env={**line.env, **found.env},
            launched=line.launched or found.launched, counted=line.counted or found.counted,
            remarks=(*line.remarks, *found.remarks),
        )  # fmt: skip


def _result(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value < _LARGEST:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        found = int(_OPERATIONS[type(node.op)](_result(node.left), _result(node.right)))
        if abs(found) < _LARGEST:
            return found
    raise ValueError


def _without_prefix(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words after a prefix such as `timeout`, its options and its operand; and these."""
    program = words[0].rpartition("/")[2]
    at = 1
    if program not in _PREFIXES:  # an assignment
        return list(words[1:]), []
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        long = word.startswith("--")
        takes_next = (
            (word[2:].replace("-", "_") in _LONG_WITH_VALUE) if long else word[1:] in _PREFIXES[program] and word[1:]
        )
        at += 2 if takes_next else 1
    at += program in _WITH_OPERAND
    return list(words[at:]), list(words[1:at])


def _inner_text(words: Sequence[str]) -> str | None:
    """Return the text that `bash -c` or `eval` runs; None for any other command."""
    if words[0] == "eval":
        return " ".join(words[1:])
    if words[0].rpartition("/")[2] not in {"bash", "sh"}:
        return None
    for at, word in enumerate(words[1:], 1):
        if not word.startswith("-"):
            return None
        if not word.startswith("--") and word.endswith("c"):
            return words[at + 1] if at + 1 < len(words) else None
    return None


def _wrapped(words: Sequence[str]) -> int:
    """Return where the command begins that a container or an environment's tool runs; 0 for any other command."""
    commands = _WRAPPERS.get(words[0].rpartition("/")[2], ())
    if not set(words[1:3]) & set(commands):
        return 0
    inner = (at for at in range(2, len(words)) if _is_program(words[at:]))
    return next(inner, 0)


def _is_program(words: Sequence[str]) -> bool:
    found = find_launcher(tuple(words), python=None, module=None) or _PROGRAM.fullmatch(words[0].rpartition("/")[2])
    return bool(found or words[0] in {"bash", "sh"})


def _the_command(script: _Script) -> LaunchLine:
    if not script.launches:
        raise BadValueError(
            "no line of the script starts a training",
            "it needs one with python, srun, torchrun, accelerate or deepspeed",
        )
    launched = [line for line in script.launches if line.launched] or script.launches
    if len(launched) > 1:
        numbers = ", ".join(str(line.number) for line in launched)
        raise BadValueError(
            f"lines {numbers} each start a training", "import each as a line of its own: orch import 'srun python ...'"
        )
    for line in script.launches:
        if line is not launched[0]:
            text = shlex.join(line.words)
            script.remarks.append(
                f"line {line.number}, {quoted(text)}: not carried over; make it a job of its own, and use depends_on"
            )
    return launched[0]


def _refuse_slurm(text: str, shown: str) -> None:
    if _SLURM_PROGRAM.search(text) or "SLURM_" in text:
        raise BadValueError(f"{shown}: Slurm is not there, and orch has no such value", "write the value into the line")


def _set_line(job: dict[str, Any], script: _Script, line: LaunchLine) -> None:
    """Put the command into the job, its variables, and its directory. Raises BadValueError for a value that is not known."""
    shell = script.shell
    words = list(line.words)
    if script.python and (named := [at for at, word in enumerate(words) if word in {"python", "python3"}]):
        words[named[0]] = script.python
    elif script.python:
        script.remarks.append(
            f"{shell.restored(script.python)}: not carried over; the command does not begin with python"
        )
    env = dict(line.env)
    for name in sorted(_OURS & env.keys()):
        del env[name]
        what = "orch picks the GPUs" if name == "CUDA_VISIBLE_DEVICES" else "orch sets it"
        script.remarks.append(f"{name}: not carried over; {what}")
    for name, value in list(env.items()):
        if any(_SLURM_PROGRAM.search(one.text) or "SLURM_" in one.text for one in shell.open(value)):
            del env[name]
            script.remarks.append(
                f"{name}={shell.restored(value)}: not carried over; Slurm is not there, set it in env"
            )
    late = {name: value for name, value in env.items() if shell.open(value)}
    opened = [one for word in (*words, *late.values()) for one in shell.open(word)]
    if not opened:
        job["entrypoint"] = shlex.join(words)
    else:
        names = sorted({name for one in opened for name in one.names()})
        for one in opened:
            _refuse_slurm(one.text, one.text)
        if lost := [name for name in names if name in script.unknown or name[0] in "0123456789@*#"]:
            raise BadValueError(
                f"${lost[0]}: its value is not known",
                "write the value into the line, or give arguments: orch import 'sbatch SCRIPT VALUE'",
            )
        # a plain `$NAME` that is left had no value where it stood
        needed = sorted({name for one in opened if not _NAME.fullmatch(one.text) for name in one.names()})
        own = [f"{name}={shell.written(script.variables[name])}; " for name in needed if name in script.variables]
        texts = [f"{name}={shell.written(value)} " for name, value in late.items()]
        job["entrypoint"] = (
            f"bash -c {shlex.quote(''.join((*own, *texts)) + 'exec ' + ' '.join(map(shell.written, words)))}"
        )
        what = ", ".join(dict.fromkeys(one.text for one in opened))
        script.remarks.append(
            f"{what}: left to a shell on the rank's node, which starts slower; write the value, or set it in env:"
        )
    parse_entrypoint(job["entrypoint"])
    if line.directory:
        job["working_dir"] = line.directory
    if plain := {name: value for name, value in env.items() if name not in late}:
        job["env"] = {
            name: (items_of(value) or [""])[0] if value.startswith("\0") else value for name, value in plain.items()
        }
    set_keys(job, line.keys)


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
        *("exact", "overlap", "whole", "pty", "jobid"),
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
    "mpirun x": "env: NAME: value sets a variable, secrets: passes one of your environment",
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
    instead = INSTEAD.get(f"{launcher} {option}", INSTEAD.get(option, ""))
    return f"{launcher} {shown(option, value)}: not carried over" + (f"; {instead}" if instead else "")


_SLURM_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_ELASTIC = re.compile(r"\{min: (\d+), max: (\d+)\}")
_PLAIN = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null)$)[a-z][a-z0-9-]*|\d+[dhms](?:\d+[hms])*|\d+[KMGT]iB")
_NAME_LENGTH = 50
_LOCAL_RANK = frozenset({"deepspeed", "torch.distributed.launch"})


def _passes_local_rank(words: Sequence[str], options: set[str]) -> bool:
    named = {words[0].rpartition("/")[2], *(words[position + 1] for position, w in enumerate(words[:-1]) if w == "-m")}
    return bool(named & _LOCAL_RANK) and not options & {"use_env", "no_local_rank"}


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
    """Convert Slurm's ``days-hours:minutes:seconds`` to a duration of orch; the empty string means no limit.

    Raises BadValueError for any other text.
    """
    if text.upper() in {"", "UNLIMITED", "INFINITE", "-1"}:
        return ""
    match = _SLURM_TIME.fullmatch(text)
    if match is None:
        raise BadValueError(
            f"{quoted(text)} is not a time of Slurm", "write 90 (minutes), 2:00:00, 1-12:00:00 or UNLIMITED"
        )
    span = _span(match)
    return format_duration(span) if span else ""


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
