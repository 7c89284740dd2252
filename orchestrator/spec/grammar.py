"""The table of job.yaml's keys: the shape, the bounds and the meaning of each.

One table is the parser, the JSON Schema and the list that the documentation is tested against. Defaults are those of
`model`. Rules that bind several keys are in `checks`. Must not read text or do I/O.
"""

from __future__ import annotations

import re
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from orchestrator.spec import model
from orchestrator.spec.key_aliases import unknown_key
from orchestrator.spec.records import REQUIRED, Field, Items, OneOf, Record, Table, walk
from orchestrator.spec.rules import (
    ENV_PATTERN,
    ENV_REMEDY,
    LABEL_PATTERN,
    NAME_PATTERN,
    NAME_REMEDY,
    inside,
    local_directory,
    progress_expression,
    regular_expression,
    storage,
    user_variable,
    watched,
    web_address,
)
from orchestrator.spec.shapes import (
    Boolean,
    Choice,
    Duration,
    Integer,
    Json,
    Maybe,
    Memory,
    Number,
    Schema,
    Shape,
    Text,
    Word,
    written,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.spec.document import Node
    from orchestrator.spec.model import JsonValue
    from orchestrator.spec.problems import BadValueError, Path, Problem

T = TypeVar("T")

MAX_WORKERS = 10_000
MAX_GPUS_PER_WORKER = 64


class StepsOrTime(Shape[int | timedelta]):
    """A number of steps, or a duration with its unit."""

    def read(self, node: Node, path: Path, problems: list[Problem]) -> int | timedelta:
        """Read `100` as steps and `10m` as time."""
        text = written(node, "a number of steps, or a duration such as 10m")
        if re.fullmatch(r"[-+]?[0-9]+(?:\.[0-9]*)?", text):
            return Integer(1, 10**12).read(node, path, problems)
        return Duration(minimum=timedelta(seconds=1)).read(node, path, problems)

    def write(self, value: int | timedelta) -> JsonValue:
        """Steps stay a number; time is written with its unit."""
        return Duration().write(value) if isinstance(value, timedelta) else value

    def schema(self) -> Schema:
        """Either of the two."""
        return {"anyOf": [Integer(1, 10**12).schema(), Duration().schema()]}


def _unknown(path: Path, key: str, siblings: Sequence[str]) -> BadValueError:
    return unknown_key(path, key, siblings, all_keys())


def _record(make: type[T], fields: Mapping[str, Field], *, shorthand: str = "") -> Record[T]:
    return Record(make, fields, unknown=_unknown, shorthand=shorthand)


def _key(shape: Shape[Any], doc: str, *, attribute: str = "", stand_in: Any = REQUIRED) -> Field:
    return Field(shape=shape, doc=doc, attribute=attribute, stand_in=stand_in)


_NAME = Text("a name", pattern=NAME_PATTERN, remedy=NAME_REMEDY, max_length=50)
_PATTERN = Text("a regular expression", check=regular_expression, max_length=1000)
_VARIABLE = Text("the name of a variable", pattern=ENV_PATTERN, remedy=ENV_REMEDY, max_length=255, check=user_variable)
_LABEL_KEY = Text(
    "a label's key", pattern=LABEL_PATTERN, remedy="letters, digits and - _ . / inside, at most 63", max_length=63
)
_PARAMETER = Text("a parameter's name", pattern=ENV_PATTERN, remedy=ENV_REMEDY, max_length=255)
_BUDGET = Integer(0, 1_000_000, instead={-1: "write a number; only preemption can be unlimited"})
_UNLIMITED_BUDGET = Integer(0, 1_000_000, instead={-1: "write unlimited"})

_ELASTIC = _record(
    model.ElasticWorkers,
    {
        "min": _key(Integer(1, MAX_WORKERS), "fewest ranks it runs with"),
        "max": _key(Integer(1, MAX_WORKERS), "most ranks it grows to"),
        "grow_after": _key(
            Duration(minimum=timedelta(seconds=1)), "how long it runs before it is stopped to start on more ranks"
        ),
    },
)

_PER_WORKER = _record(
    model.WorkerResources,
    {
        "gpu": _key(
            Number(0, MAX_GPUS_PER_WORKER, digits=4),
            "GPUs for each rank; a fraction shares one, 0 runs on the CPU, a number above 1 is whole",
        ),
        "cpu": _key(Number(0, 4096, digits=4), "processor cores for each rank, reserved"),
        "memory": _key(
            Maybe(Memory(minimum=1_000_000)),
            "main memory for each rank, in bytes, reserved, and its limit where the node can set one; 8GB is 8*10^9, 8GiB is 8*2^30; null reserves none",
            attribute="memory_bytes",
        ),
        "gpu_model": _key(
            Maybe(Text("a GPU model", max_length=100)), "only nodes with GPUs of this model, as `orch nodes` shows it"
        ),
    },
    shorthand="write resources_per_worker: {gpu: 1, cpu: 1}",
)

_RESOURCES = _record(
    model.ResourcesSpec,
    {
        "num_workers": _key(
            OneOf(Word("auto", "auto"), scalar=Integer(1, MAX_WORKERS), mapping=_ELASTIC),
            "ranks (processes); {min: 2, max: 8} for an elastic job; auto for as many as there are GPUs free at its first start",
        ),
        "resources_per_worker": _key(_PER_WORKER, "what each rank holds"),
        "placement_strategy": _key(
            Choice[model.PlacementStrategy](*get_args(model.PlacementStrategy)),
            "PACK: on few nodes; STRICT_PACK: on one; SPREAD: over many; STRICT_SPREAD: each on another",
        ),
    },
    shorthand="write resources: {num_workers: 1}",
)

_MAX_RESTARTS = _record(
    model.MaxRestarts,
    {
        "user": _key(_BUDGET, "restarts after the script's own exceptions and exit codes"),
        "infra": _key(_BUDGET, "restarts after signals, lost nodes and GPUs, host memory running out"),
        "hang": _key(_BUDGET, "restarts after hangs"),
        "preemption": _key(
            OneOf(Word("unlimited", None), scalar=_UNLIMITED_BUDGET), "restarts after SIGTERM to a whole node"
        ),
    },
    shorthand="each class of failure has its own: {user: 0, infra: 10, hang: 2, preemption: unlimited}",
)

_LOG_POLICY = _record(
    model.LogPolicy,
    {
        "pattern": _key(_PATTERN, "a regular expression, searched for in the end of the failed attempt's log"),
        "action": _key(
            Choice[model.LogAction](
                *get_args(model.LogAction), instead={"cancel_retries": "fail", "retry": "restart", "stop": "fail"}
            ),
            "fail: no further restart; restart: charged to the infra budget",
        ),
    },
)

_RETRY = _record(
    model.RetrySpec,
    {
        "max_restarts": _key(_MAX_RESTARTS, "restarts allowed for each class of failure"),
        "max_no_progress": _key(Integer(1, 1_000_000), "restarts in a row without a newer checkpoint before it fails"),
        "backoff": _key(
            _record(
                model.Backoff,
                {
                    "initial": _key(Duration(), "wait before the second restart without progress; the first has none"),
                    "max": _key(Duration(), "longest wait; it doubles each time without a newer checkpoint"),
                },
            ),
            "how long to wait before a restart",
        ),
        "exit_codes": _key(
            _record(
                model.ExitCodes,
                {
                    "retry": _key(
                        Items(Integer(1, 255), unique=True),
                        "exit codes that are not the script's fault: restarted from the infra budget",
                    )
                },
                shorthand="write exit_codes: {retry: [75]}",
            ),
            "what exit codes mean",
        ),
        "log_policies": _key(
            Items(_LOG_POLICY, maximum=100), "what a line of the log says about restarting; the first match counts"
        ),
    },
    shorthand="write retry: {max_restarts: {user: 1}}",
)

_HEALTH = _record(
    model.HealthSpec,
    {
        "startup_timeout": _key(
            Duration(minimum=timedelta(seconds=1)), "from the start of an attempt to its first sign of progress"
        ),
        "heartbeat_timeout": _key(
            OneOf(Word("auto", "auto"), scalar=Duration(minimum=timedelta(seconds=1))),
            "longest time without progress; auto learns it from the job's own step times",
        ),
        "progress": _key(
            Maybe(
                _record(
                    model.ProgressSpec,
                    {
                        "pattern": _key(
                            Text("a regular expression", check=progress_expression, max_length=1000),
                            "a regular expression; group 1 is the step, group 2, when there, the total",
                        )
                    },
                    shorthand=r"write progress: {pattern: 'step (\d+)'}",
                )
            ),
            "how to read steps from the log, for scripts that report nothing",
        ),
        "on_hang": _key(
            Maybe(Choice[model.OnHang](*get_args(model.OnHang))),
            "restart or notify; null: restart if the script reports its steps, else notify",
        ),
    },
)

_CHECKPOINT = _record(
    model.CheckpointSpec,
    {
        "storage_path": _key(
            Maybe(Text("a path", check=storage)),
            "where checkpoints go: an absolute path or a URL; null: the job's own directory under ORCH_HOME",
        ),
        "keep": _key(Integer(1, 1_000_000), "how many of the newest are kept"),
        "keep_best": _key(
            Maybe(Integer(1, 1_000_000)), "how many of the best by score_attribute are kept; null: as many as keep"
        ),
        "score_attribute": _key(
            Maybe(Text("a metric's name", max_length=255)), "the reported metric that tells good checkpoints from bad"
        ),
        "score_order": _key(
            Maybe(
                Choice[model.ScoreOrder](
                    *get_args(model.ScoreOrder),
                    instead={
                        "minimize": "min",
                        "maximize": "max",
                        "asc": "min",
                        "desc": "max",
                        "lower": "min",
                        "higher": "max",
                    },
                )
            ),
            "min: a lower score is better; max: a higher one",
        ),
        "interval": _key(
            OneOf(Word("auto", "auto"), scalar=StepsOrTime()),
            "between two saves: a number of steps, or time (10m); auto weighs saving against what a failure would lose",
        ),
        "watch": _key(
            Maybe(Text("a glob", check=watched)),
            "files that the script saves by itself, as a glob, one match a checkpoint",
        ),
    },
)

_TELEMETRY = _record(
    model.TelemetrySpec,
    {
        "rate": _key(Number(0.01, 1000, digits=6), "samples a second from each GPU"),
        "record": _key(Boolean(), "keep the samples on disk for the job's report"),
    },
)

_MATRIX = _record(
    model.MatrixSpec,
    {
        "parameters": _key(
            Table(_PARAMETER, Items(Json(scalar=True)), maximum=50),
            "each parameter's values; a job for each combination",
        ),
        "include": _key(Items(Table(_PARAMETER, Json(scalar=True))), "further combinations"),
        "exclude": _key(Items(Table(_PARAMETER, Json(scalar=True))), "combinations to leave out"),
        "max_concurrent": _key(Maybe(Integer(1, MAX_WORKERS)), "most jobs of the matrix at a time; null: no limit"),
        "fail_fast": _key(Boolean(), "cancel the others when one fails"),
        "strategy": _key(Choice[model.MatrixStrategy](*get_args(model.MatrixStrategy)), "grid: every combination"),
    },
)

_DEPENDENCY = _record(
    model.Dependency,
    {
        "job": _key(
            Text("a job", pattern=r"[a-z][-a-z0-9]{0,63}", remedy="write its name or its id"),
            "name or id of the other job",
        ),
        "on": _key(
            Choice[model.DependencyCondition](
                *get_args(model.DependencyCondition),
                instead={"succeeded": "success", "afterok": "success", "afternotok": "failure", "failed": "failure"}
                | {"afterany": "any", "always": "any"},
            ),
            "how it must end: success, failure or any",
        ),
    },
    shorthand="write {job: NAME}",
)

_NOTIFY = _record(
    model.NotifySpec,
    {
        "url": _key(Text("a web address", check=web_address), "where to send an HTTP POST"),
        "on": _key(
            Items(Choice[model.NotifyState](*get_args(model.NotifyState)), unique=True), "states whose entry is told"
        ),
    },
    shorthand="write {url: https://host/path}",
)

_RUNTIME_ENV = _record(
    model.RuntimeEnvSpec,
    {
        "pip": _key(Items(Text("a requirement")), "packages to install, as pip takes them"),
        "py_modules": _key(Items(Text("a path")), "local directories or wheels that ranks can import"),
    },
)

JOB: Record[model.JobSpec] = _record(
    model.JobSpec,
    {
        "version": _key(Integer(1, 1), "of this format"),
        "name": _key(
            _NAME, f"what the job is called; its id is the name and six characters: {NAME_REMEDY}", stand_in="job"
        ),
        "entrypoint": _key(
            Text("a command", max_length=32_768),
            "the command of one rank, such as python train.py; no launcher and no shell syntax",
            stand_in="true",
        ),
        "working_dir": _key(
            Maybe(Text("a directory", check=local_directory)),
            "directory whose files are copied at submission, relative to the job file; null: an empty one",
        ),
        "outputs": _key(
            Items(Text("a glob", check=inside)), "files to bring back from the ranks' nodes, as globs in working_dir"
        ),
        "env": _key(
            Table(_VARIABLE, Text("a value", empty=True, max_length=131_072)),
            "variables of every rank; values are text",
        ),
        "secrets": _key(
            Items(_VARIABLE, unique=True),
            "names of variables taken from who submits; kept in a file of mode 0600, deleted at the job's end, masked in logs",
        ),
        "runtime_env": _key(_RUNTIME_ENV, "what Ray installs first; such a job starts cold"),
        "resources": _key(_RESOURCES, "how many ranks, and what each needs"),
        "queue": _key(
            Text("a queue's name", pattern=NAME_PATTERN, remedy=NAME_REMEDY, max_length=50), "the queue it waits in"
        ),
        "priority": _key(Integer(0, 100), "0 to 100, higher first"),
        "preemptible": _key(
            Boolean(), "may be stopped at a checkpoint for a job of higher priority, and continued later"
        ),
        "min_runtime": _key(Maybe(Duration()), "not preempted before it has run so long; null: at once"),
        "max_duration": _key(
            Maybe(Duration(minimum=timedelta(seconds=1))), "running time after which it is stopped; null: no limit"
        ),
        "stop_duration": _key(Duration(), "from SIGTERM to SIGKILL, the time to save"),
        "depends_on": _key(Items(_DEPENDENCY, maximum=100), "jobs that must end first"),
        "matrix": _key(Maybe(_MATRIX), "many jobs from one file"),
        "retry": _key(_RETRY, "when a failed job is started again"),
        "health": _key(_HEALTH, "when a job counts as hung, and what then"),
        "checkpoint": _key(_CHECKPOINT, "where checkpoints go, how often, and which are kept"),
        "telemetry": _key(_TELEMETRY, "GPU samples kept with the job"),
        "trackers": _key(
            Items(Choice[model.Tracker](*get_args(model.Tracker)), unique=True),
            "experiment trackers that get the metrics",
        ),
        "report": _key(Boolean(), "write a report when the job ends"),
        "trainer": _key(
            Table(_PARAMETER, Json()),
            "settings of orchestrator.train.MultiGPUConfig, for scripts that use its trainers",
        ),
        "notify": _key(Items(_NOTIFY, maximum=20), "web hooks told of the job's states"),
        "labels": _key(
            Table(_LABEL_KEY, Text("a value", empty=True, max_length=255), maximum=64),
            "words of your own, to find jobs by",
        ),
    },
)
"""All of job.yaml."""


@cache
def all_keys() -> tuple[str, ...]:
    """List the full path of every key, such as `retry.log_policies[].pattern`."""
    return tuple(path for path, _, _ in walk(JOB))
