"""The entry point: converts one line of job.yaml to the command of one rank.

Decides what is forked (a Python script or module) and what is started as a plain process (everything else), and refuses
what would not do what it seems to: launchers, because orch starts the ranks, and shell syntax, because no shell reads
the line. Every refusal contains the line to write instead. Pure; standard library only, and fast to import: the command
line uses it.

Other systems' launch commands are translated for that: `torchrun --nproc-per-node 4 train.py` is `python train.py` on 4 ranks. Never
guesses silently: the result is a suggestion to the user.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Literal, TypeVar

from orchestrator.spec.problems import BadValueError, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")
EntrypointKind = Literal["script", "module", "command"]

CHECKPOINT = "${checkpoint}"
"""Placeholder of the newest valid checkpoint; the only `$` that orch itself replaces."""

_PYTHON = re.compile(r"python[0-9]*(?:\.[0-9]+)?")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_EXPANSION = re.compile(r"\$[A-Za-z_0-9{(@*#?!-]")
_OPERATOR = re.compile(r"&&|\|\||[|&;<>()`\n]")
_PLAIN_YAML = re.compile(r"[A-Za-z0-9_./$][^\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]*")
_SEPARATOR = re.compile(r"&&|\|\||[;|\n]")

_COLD_PREFIXES = (
    *("LD_", "PYTHON", "MALLOC_", "GLIBC_", "MKL_", "KMP_", "OMP_", "GOMP_", "OPENBLAS_"),
    *("ATEN_", "TORCH_", "PYTORCH_", "NUMEXPR_"),
)


class EntrypointError(BadValueError):
    """The entry point cannot be run as written; `hint` has the line to write instead."""

    def __init__(self, message: str, hint: str, *, suggestion: str = "") -> None:
        self.suggestion = suggestion
        """The entry point to write instead, when there is one."""
        super().__init__(message, hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrypoint:
    """One rank's command.

    script: `target` is the path as written, `module`: the dotted name, `command`: the program. `python` is the
    interpreter as written, None where the command is not one. `argv` is the whole command, in words.
    """

    kind: EntrypointKind
    python: str | None
    python_options: tuple[str, ...]
    target: str
    args: tuple[str, ...]
    argv: tuple[str, ...]

    def interpreter(self, usual: T) -> str | T:
        """Return the interpreter if it is written as an absolute path, else `usual`: the submitter's own `python`.

        A job keeps the interpreter of its submission, or the one behind it where that is a version manager's script.
        """
        return self.python if self.python is not None and self.python.startswith("/") else usual


@lru_cache(maxsize=1024)
def parse_entrypoint(text: str) -> Entrypoint:
    """Parse an entry point; results are cached.

    `python [-u] FILE ...` is a script, `python [-u] -m NAME ...` a module; any other interpreter option, and any
    other program, makes it a command.

    Raises:
        EntrypointError: empty, unbalanced quotation marks, a launcher, or shell syntax outside quotation marks.

    """
    text = text.replace("\\\n", " ").strip()
    if "\x00" in text:
        raise EntrypointError("the entry point holds a NUL character", "remove it")
    _refuse_shell_syntax(text)
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise EntrypointError("a quotation mark is not closed", "close it, or write it as \\' or \\\"") from error
    if not words or not words[0]:
        raise EntrypointError("the entry point is empty", "write the command of one rank: python train.py")
    _refuse_assignments(words)
    entrypoint = recognize(words)
    _refuse_launcher(entrypoint)
    if _is_bare_script(words):
        suggestion = shlex.join(("python", *words))
        hint = f"write {yaml_line('entrypoint', suggestion)}"
        raise EntrypointError(f"{quoted(words[0])} is a script, not a program", hint, suggestion=suggestion)
    return entrypoint


def with_checkpoint(entrypoint: Entrypoint, path: str | None) -> Entrypoint:
    """Replace every `${checkpoint}` by the path; without one, remove the words that contain it, and options that name it."""
    return replace(
        entrypoint,
        args=_filled(entrypoint.args, path),
        argv=(entrypoint.argv[0], *_filled(entrypoint.argv[1:], path)),
    )


def _filled(words: tuple[str, ...], path: str | None) -> tuple[str, ...]:
    if path is not None:
        return tuple(word.replace(CHECKPOINT, path) for word in words)
    kept: list[str] = []
    for word in words:
        if CHECKPOINT not in word:
            kept.append(word)
        elif word == CHECKPOINT and kept and kept[-1].startswith("-") and "=" not in kept[-1]:
            kept.pop()
    return tuple(kept)


def cold_start_variables(env: Mapping[str, str]) -> tuple[str, ...]:
    """Name the variables that libraries or the interpreter read before any line of the script runs, sorted.

    One of them requires a plain process: a fork of a process that has imported torch would read it too late.
    `OMP_NUM_THREADS` is not among them, because torch takes it afterwards as well.
    """
    return tuple(sorted(name for name in env if name.startswith(_COLD_PREFIXES) and name != "OMP_NUM_THREADS"))


def _is_bare_script(words: tuple[str, ...]) -> bool:
    return words[0].endswith(".py") and "/" not in words[0]


def recognize(words: tuple[str, ...]) -> Entrypoint:
    """Return the entry point that the words start; raises EntrypointError where Python is given nothing to run."""
    program = words[0].rsplit("/", 1)[-1]
    if not _PYTHON.fullmatch(program):
        return Entrypoint(kind="command", python=None, python_options=(), target=words[0], args=words[1:], argv=words)
    position = 1
    while words[position : position + 1] == ("-u",):
        position += 1
    options, rest = words[1:position], words[position:]
    if not rest or rest[0] == "-" or rest == ("-m",):
        raise EntrypointError("Python is given nothing to run", "write python FILE, or python -m MODULE")
    kind: EntrypointKind = "script"
    if rest[0].startswith("-m"):
        kind = "module"
        rest = rest[1:] if rest[0] == "-m" else (rest[0][2:], *rest[1:])
    elif rest[0].startswith("-"):
        return Entrypoint(
            kind="command", python=words[0], python_options=(), target=words[0], args=words[1:], argv=words
        )
    return Entrypoint(kind=kind, python=words[0], python_options=options, target=rest[0], args=rest[1:], argv=words)


def _refuse_launcher(entrypoint: Entrypoint) -> None:
    translation = without_launchers(entrypoint)
    if translation is None:
        return
    raise _instead(f"orch starts the ranks itself; within each, {translation.launcher} would start more", translation)


def without_launchers(entrypoint: Entrypoint) -> Translation | None:
    """Translate nested launchers (`ray job submit -- torchrun ...`); return None when there is none."""
    found: Translation | None = None
    keys: dict[str, str] = {}
    options: tuple[tuple[str, str, str], ...] = ()
    counted, unknown = False, ""
    while True:
        module = entrypoint.target if entrypoint.kind == "module" else None
        words = (entrypoint.target, *entrypoint.args)
        if entrypoint.kind == "command" and entrypoint.python is not None and "-m" in words[:-1]:
            words = words[words.index("-m") + 1 :]
            module = words[0]
        launcher = find_launcher(words, python=entrypoint.python, module=module)
        if launcher is None:
            return found
        kind, length = launcher
        step = translate(kind, words[length:], python=entrypoint.python or "python")
        keys = {**keys, **dict(step.keys)}
        options += step.options
        counted, unknown = counted or step.counted, unknown or step.unknown
        found = replace(step, keys=tuple(keys.items()), options=options, counted=counted, unknown=unknown)
        try:
            entrypoint = recognize(step.words)
        except EntrypointError:
            return found


def _refuse_assignments(words: tuple[str, ...]) -> None:
    env: dict[str, str] = {}
    rest = words
    while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
        env[match[1]] = match[2]
        rest = rest[1:]
    if not env:
        return
    first = next(iter(env))
    devices = env.pop("CUDA_VISIBLE_DEVICES", "").split(",")
    keys = {f"env.{name}": _yaml_string(value) for name, value in env.items()}
    words = rest or ("python", "train.py")
    try:
        launched = without_launchers(recognize(words))
    except EntrypointError:
        launched = None
    if launched is not None:
        words, keys = launched.words, {**keys, **dict(launched.keys)}
    elif len(devices) > 1:
        keys["resources.resources_per_worker.gpu"] = str(len(devices))
    message = f"no shell reads this line, so {quoted(first + '=...')} would be taken for a program"
    raise _instead(message, Translation(launcher="", words=words, keys=tuple(keys.items())))


def _instead(message: str, translation: Translation) -> EntrypointError:
    suggestion = shlex.join(_runnable(translation.words)).replace(shlex.quote(CHECKPOINT), CHECKPOINT)
    keys = ", ".join(f"{key}: {value}" for key, value in translation.keys)
    hint = f"write {yaml_line('entrypoint', suggestion)}" + (f" with {keys}" if keys else "")
    return EntrypointError(message, hint, suggestion=suggestion)


def _runnable(words: tuple[str, ...]) -> tuple[str, ...]:
    """Turn the words after a launcher into an accepted command: they may lack the interpreter, or be invalid."""
    if _is_bare_script(words):
        return ("python", *words)
    try:
        recognize(words)
    except EntrypointError:
        return ("python", "train.py")
    return ("python", "train.py") if not words[0] or _ASSIGNMENT.fullmatch(words[0]) else words


def yaml_line(key: str, text: str) -> str:
    """Write one line of YAML that reads back as the text."""
    # A single word may be one that YAML takes for a number or a boolean.
    plain = text.isprintable() and (
        _PLAIN_YAML.fullmatch(text) and " " in text and ": " not in text and " #" not in text and text[-1] not in ": "
    )
    return f"{key}: {text if plain else _yaml_string(text)}"


def _yaml_string(text: str) -> str:
    """Quote a text for YAML as JSON does; characters that are not printable become escapes."""
    return "".join(_visible(character) for character in json.dumps(text, ensure_ascii=False))


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    number = ord(character)
    return f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"


def _refuse_shell_syntax(text: str) -> None:
    found = _shell_syntax(text)
    if found is None:
        return
    message = f"no shell reads this line, so {quoted(found)} would reach the script unchanged"
    advice = f"or put {quoted(found)} in single quotation marks when the script is to see it"
    if found == "\n":
        message = "the entry point is one command, this text has several lines"
        advice = "or, when it is one long command, begin the YAML text with > instead of |"
    if WORDS.search(text):
        raise _launcher_in_shell(text, message)
    suggestion = f"bash -c {shlex.quote(text)}"
    hint = f"write {yaml_line('entrypoint', suggestion)}, {advice}"
    if found in ("<", ">"):
        hint += "; output needs no file: `orch logs` shows it"
    raise EntrypointError(message, hint, suggestion=suggestion)


def _launcher_in_shell(text: str, message: str) -> EntrypointError:
    """Return the error for a launcher between shell operators; the hint translates it, as `bash -c` would only hide it."""
    for part in _SEPARATOR.split(text):
        command = re.split(r"[0-9]*[<>&]", part)[0].strip()
        if not WORDS.search(command) or _shell_syntax(command) is not None:
            continue
        try:
            parse_entrypoint(command)
        except EntrypointError as error:
            hint = f"{error.hint}; put what else the line does into a script, and start that with bash"
            return EntrypointError(message, hint, suggestion=error.suggestion)
    return EntrypointError(message, "write the command of one rank alone, without the launcher: python train.py")


def _shell_syntax(text: str) -> str | None:
    """Return the first piece of the text that a shell would act on, or None."""
    quote = ""
    position = 0
    while position < len(text):
        character = text[position]
        if character == "\\" and quote != "'":
            position += 1
        elif quote and character == quote:
            quote = ""
        elif not quote and character in "'\"":
            quote = character
        elif quote != "'" and (found := _active(text, position, quoted_part=bool(quote))):
            return found
        position += 1
    return None


def _active(text: str, position: int, *, quoted_part: bool) -> str | None:
    """Name what a shell would act on at one position; never called for single-quoted text."""
    if text.startswith(CHECKPOINT, position):
        return None
    expansion = _EXPANSION.match(text, position)
    if expansion is not None:
        return text[position : position + 2] if text[position + 1] in "({" else _variable(text, position)
    if quoted_part:
        return "`" if text[position] == "`" else None
    operator = _OPERATOR.match(text, position)
    if operator is not None:
        return operator.group()
    starts_word = position == 0 or text[position - 1].isspace()
    return "~/" if starts_word and text.startswith("~/", position) else None


def _variable(text: str, position: int) -> str:
    name = re.match(r"\$(?:[A-Za-z_][A-Za-z0-9_]*|.)", text[position:])
    return name.group() if name is not None else "$"


_PYTHON_FILE = ".py"
_ATTACHED_NUMBER = re.compile(r"-([A-Za-z])([0-9]+)")
_ATTACHED_TEXT = re.compile(r"-([A-Za-z])([^-=].*)")
_SETS_VARIABLE = frozenset({"x", "env", "genv"})
_SHELLS = frozenset({"bash", "sh"})
_ELASTIC_RANGE = re.compile(r"([0-9]{1,6}):([0-9]{1,6})")
_ALL_GPUS = frozenset({"auto", "gpu"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """Replacement of a launch command: the words of one rank's command, and job.yaml keys with values.

    ``options`` are those that became neither, as (launcher, name, value). ``counted``: an option gave the number of ranks.
    ``unknown``: the option, as name=value, whose number of ranks could not be read.
    """

    launcher: str
    words: tuple[str, ...]
    keys: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, str, str], ...] = ()
    counted: bool = False
    unknown: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Syntax of one launcher's command line.

    `workers`: groups of options; the first of each group that is given counts, and the product of the groups is the
    number of ranks. `flags` take no value; every other option takes one, unless what follows looks like the script.
    `default`: the number of ranks without any option. `runs_python`: the first word after the options is a Python
    script, not a command. Option names are written with underscores and without leading hyphens.
    """

    name: str
    workers: tuple[tuple[str, ...], ...]
    flags: frozenset[str] = frozenset()
    pairs: frozenset[str] = frozenset()
    default: str = "1"
    runs_python: bool = True
    keys: dict[str, str] = field(default_factory=dict)


_TORCHRUN = Launcher(
    name="torchrun",
    workers=(("nproc_per_node",), ("nnodes",)),
    flags=frozenset(
        {"standalone", "m", "module", "no_python", "run_path", "use_env", "virtual_local_rank", "h", "help"}
    ),
    keys={"max_restarts": "retry.max_restarts.user"},
)
_ACCELERATE = Launcher(
    name="accelerate launch",
    workers=(("num_processes",),),
    flags=frozenset(
        {"multi_gpu", "cpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_xpu", "quiet", "q", "m"}
        | {"module", "no_python", "debug", "same_network", "dynamo_use_fullgraph", "dynamo_use_dynamic", "h", "help"}
    ),
    default="auto",
    keys={"mixed_precision": "env.ACCELERATE_MIXED_PRECISION"},
)
_DEEPSPEED = Launcher(
    name="deepspeed",
    workers=(("num_gpus",), ("num_nodes",)),
    flags=frozenset(
        {"module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid", "h", "help"}
    ),
    default="auto",
)
SLURM_FLAGS = frozenset(
    {
        *(
            "contiguous",
            "exclusive",
            "get_user_env",
            "hold",
            "ignore_pbs",
            "nice",
            "no_kill",
            "no_requeue",
            "overcommit",
        ),
        *("oversubscribe", "parsable", "propagate", "quiet", "reboot", "requeue", "spread_job", "test_only"),
        *("use_min_nodes", "verbose", "wait", "H", "k", "O", "Q", "s", "v", "W", "h", "help"),
    }
)
"""Options of sbatch whose value, if they have one, follows an equals sign; every other one takes the next word."""
_SRUN = Launcher(
    name="srun",
    workers=(("n", "ntasks"),),
    flags=(SLURM_FLAGS - {"wait", "W"})
    | {"l", "label", "u", "unbuffered", "q", "K", "kill_on_bad_exit", "E", "preserve_env", "overlap", "pty", "exact"}
    | {"whole", "X", "disable_status", "Z", "no_allocate", "mpi_combine", "interactive"},
    runs_python=False,
    keys={"t": "max_duration", "time": "max_duration", "cpus_per_task": "resources.resources_per_worker.cpu"}
    | {"c": "resources.resources_per_worker.cpu", "gpus_per_task": "resources.resources_per_worker.gpu"},
)
_SRUN_PER_NODE = (("N", "nodes"), ("ntasks_per_node",))
_MPIRUN = Launcher(
    name="mpirun",
    workers=(("n", "np", "c"),),
    flags=frozenset(
        {"allow_run_as_root", "oversubscribe", "v", "q", "report_bindings", "tag_output", "display_map", "verbose"}
        | {"bind_to_core", "bind_to_none", "nolocal", "gloo", "h", "help"}
    ),
    pairs=frozenset({"mca", "gmca", "env", "genv"}),
    default="auto",
    runs_python=False,
)
_RAY_SUBMIT = Launcher(
    name="ray job submit",
    workers=(),
    flags=frozenset({"no_wait", "verify", "h", "help"}),
    default="",
    runs_python=False,
    keys={"working_dir": "working_dir"},
)

_COMMANDS = {
    ("torchrun",): _TORCHRUN,
    ("accelerate", "launch"): _ACCELERATE,
    ("deepspeed",): _DEEPSPEED,
    ("ray", "job", "submit"): _RAY_SUBMIT,
    ("srun",): _SRUN,
    ("mpirun",): _MPIRUN,
    ("mpiexec",): _MPIRUN,
    ("horovodrun",): _MPIRUN,
}
_MODULES = {
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    "accelerate.commands.launch": _ACCELERATE,
    "deepspeed.launcher.runner": _DEEPSPEED,
}
WORDS = re.compile(
    r"\b(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate\s+launch|deepspeed|ray\s+job\s+submit|srun|mpirun|mpiexec)\b"
)
"""Finds a launcher's name in a text that could not be split into words."""


def find_launcher(words: tuple[str, ...], *, python: str | None, module: str | None) -> tuple[Launcher, int] | None:
    """Recognize a launcher by a command's first words, or by the module or script that Python is to run.

    `words` begin with the command itself, or with the script or module when Python runs it. Returns the launcher
    and how many of the words are its name.
    """
    if module is not None:
        return (_MODULES[module], 1) if module in _MODULES else None
    for name, launcher in _COMMANDS.items():
        # `python /venv/bin/torchrun` is the same launcher; other names after `python` may be a user's own script.
        if _names(words[: len(name)]) == name and (python is None or launcher in (_TORCHRUN, _ACCELERATE)):
            return launcher, len(name)
    return None


def translate(launcher: Launcher, arguments: tuple[str, ...], *, python: str) -> Translation:
    """Return the replacement of the launcher called with these arguments."""
    given, rest = _split(launcher, arguments)
    options = dict(given)
    if launcher.runs_python and "no_python" not in options:
        module = ("-m",) if options.keys() & {"m", "module"} else ()
        rest = (python, *module, *(rest or ("train.py",)))
    elif not rest:
        rest = (python, "train.py")
    keys: dict[str, str] = {}
    workers = _workers(launcher, options)
    if workers:
        keys["resources.num_workers"] = workers
    for option, key in launcher.keys.items():
        if options.get(option):
            keys[key] = options[option]
    counts = {name for group in (*launcher.workers, *(_SRUN_PER_NODE if launcher is _SRUN else ())) for name in group}
    others: list[tuple[str, str, str]] = []
    for option, value in given:
        if launcher is _MPIRUN and option in _SETS_VARIABLE and (pair := _ASSIGNMENT.fullmatch(value)):
            keys[f"env.{pair[1]}"] = pair[2]
        elif option not in counts and option not in launcher.keys:
            others.append((launcher.name, option, value))
    counted = [name for name in sorted(counts) if options.get(name)]
    unknown = next((f"{n}={options[n]}" for n in counted if workers is None and not _bound(options[n], 1)), "")
    return Translation(
        launcher=launcher.name,
        words=rest,
        keys=tuple(keys.items()),
        options=tuple(others),
        counted=bool(counted),
        unknown=unknown,
    )


def _names(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word.rsplit("/", 1)[-1] if position == 0 else word for position, word in enumerate(words))


def _split(launcher: Launcher, arguments: tuple[str, ...]) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Separate the launcher's own options, each with its value, from the command that follows them."""
    options: list[tuple[str, str]] = []
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            return options, arguments[position + 1 :]
        if not word.startswith("-") or word == "-":
            break
        attached = _ATTACHED_NUMBER.fullmatch(word) or (launcher is _SRUN and _ATTACHED_TEXT.fullmatch(word))
        following = arguments[position + 1] if position + 1 < len(arguments) else None
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        position += 1
        if attached:
            options.append((attached[1], attached[2]))
        elif equals or _takes_nothing(launcher, name, following):
            options.append((name, value))
        else:
            pair = name in launcher.pairs
            options.append((name, "=".join(arguments[position : position + 1 + pair])))
            position += 1 + pair
    return options, arguments[position:]


def _takes_nothing(launcher: Launcher, name: str, following: str | None) -> bool:
    if name in launcher.flags or following is None:
        return True
    known = any(name in group for group in launcher.workers) or name in launcher.keys or name in launcher.pairs
    program = following.rpartition("/")[2]
    starts = _PYTHON.fullmatch(program) or any(program == command[0] for command in _COMMANDS) or program in _SHELLS
    return not known and bool(following.startswith("-") or following.endswith(_PYTHON_FILE) or starts)


def _workers(launcher: Launcher, options: dict[str, str]) -> str | None:
    """Write `resources.num_workers`: a number, a range, or `auto` for as many as there are GPUs; None if it is unknown."""
    groups = launcher.workers
    if launcher is _SRUN and "ntasks_per_node" in options:
        groups = _SRUN_PER_NODE
    given = [next((options[name] for name in group if options.get(name)), None) for group in groups]
    present = [value for value in given if value is not None]
    if any(value in _ALL_GPUS for value in present):
        return "auto"
    if not present or (launcher.default == "auto" and given[0] is None):
        return launcher.default
    low, high = prod(_bound(value, 1) for value in present), prod(_bound(value, 2) for value in present)
    if not low or not high:
        return None
    return str(low) if low == high else f"{{min: {low}, max: {high}}}"


def _bound(value: str, side: int) -> int:
    """Return the smallest or largest number of an option; 0 where it is no number of ranks."""
    elastic = _ELASTIC_RANGE.fullmatch(value)
    text = elastic[side] if elastic is not None else value[:6]
    return int(text) if text.isdecimal() else 0
