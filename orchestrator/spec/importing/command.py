"""Converts one shell line that launches a training to the keys of job.yaml."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.spec.entrypoint import parse_entrypoint, recognize, without_launchers
from orchestrator.spec.problems import BadValueError, quoted
from orchestrator.spec.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import timedelta

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
