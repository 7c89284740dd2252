"""Other systems' launch commands, translated: `torchrun --nproc-per-node 4 train.py` is `python train.py` on 4 ranks.

orch starts the ranks itself, so a launcher inside an entry point would start them again in each. Defines each
launcher's options; must not decide what an entry point is (`entrypoint` does), and never guesses silently: the result
is a suggestion to the user. Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod

_PYTHON_FILE = ".py"
_ATTACHED_NUMBER = re.compile(r"-([A-Za-z])([0-9]+)")
_ELASTIC_RANGE = re.compile(r"([0-9]{1,6}):([0-9]{1,6})")
_ALL_GPUS = frozenset({"auto", "gpu"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """Replacement of a launch command: the words of one rank's command, and job.yaml keys with values.

    ``options`` are those that became neither, as (launcher, name, value). ``counted``: an option gave the number of ranks.
    """

    launcher: str
    words: tuple[str, ...]
    keys: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, str, str], ...] = ()
    counted: bool = False


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
_SRUN = Launcher(
    name="srun",
    workers=(("n", "ntasks"),),
    flags=frozenset(
        {"l", "label", "u", "unbuffered", "v", "verbose", "q", "quiet", "Q", "K", "k", "no_kill", "E", "exclusive"}
        | {"overlap", "pty", "s", "oversubscribe", "H", "hold", "mpi_combine", "requeue", "h", "help"}
    ),
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
    pairs=frozenset({"mca", "gmca"}),
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
    options, rest = _split(launcher, arguments)
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
    others = tuple((launcher.name, n, v) for n, v in options.items() if n not in counts and n not in launcher.keys)
    counted = any(options.get(name) for name in counts)
    return Translation(launcher=launcher.name, words=rest, keys=tuple(keys.items()), options=others, counted=counted)


def _names(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word.rsplit("/", 1)[-1] if position == 0 else word for position, word in enumerate(words))


def _split(launcher: Launcher, arguments: tuple[str, ...]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Separate the launcher's own options from the command that follows them."""
    options: dict[str, str] = {}
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            return options, arguments[position + 1 :]
        if not word.startswith("-") or word == "-":
            break
        attached = _ATTACHED_NUMBER.fullmatch(word)
        following = arguments[position + 1] if position + 1 < len(arguments) else None
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        position += 1
        if attached is not None:
            options[attached[1]] = attached[2]
        elif equals or _takes_nothing(launcher, name, following):
            options[name] = value
        else:
            options[name] = following or ""
            position += 2 if name in launcher.pairs else 1
    return options, arguments[position:]


def _takes_nothing(launcher: Launcher, name: str, following: str | None) -> bool:
    if name in launcher.flags or following is None:
        return True
    known = any(name in group for group in launcher.workers) or name in launcher.keys or name in launcher.pairs
    return not known and (following.startswith("-") or following.endswith(_PYTHON_FILE))


def _workers(launcher: Launcher, options: dict[str, str]) -> str:
    """Write `resources.num_workers`: a number, a range, or `auto` for as many as there are GPUs."""
    groups = launcher.workers
    if launcher is _SRUN and "ntasks_per_node" in options:
        groups = _SRUN_PER_NODE
    given = [next((options[name] for name in group if options.get(name)), None) for group in groups]
    present = [value for value in given if value is not None]
    if any(value in _ALL_GPUS for value in present):
        return "auto"
    if not present or (launcher.default == "auto" and given[0] is None):
        return launcher.default
    low = [int(value) for value in (_bound(v, 1) for v in present) if value.isdecimal()]
    high = [int(value) for value in (_bound(v, 2) for v in present) if value.isdecimal()]
    if len(low) < len(present):
        return launcher.default
    return str(prod(low)) if low == high else f"{{min: {prod(low)}, max: {prod(high)}}}"


def _bound(value: str, side: int) -> str:
    elastic = _ELASTIC_RANGE.fullmatch(value)
    return elastic[side] if elastic is not None else value[:6]
