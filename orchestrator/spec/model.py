# ruff: noqa: D102 - the base class documents the methods of a kind
"""The keys of job.yaml: one definition of each, with its type, its bounds, its default and what it means.

Pydantic reads and writes these classes (`reader.reading`), and makes the JSON Schema; the documentation is checked against them. Rules that
bind several keys are in `reader.checks`. Mappings are plain dictionaries underneath, typed read-only: nothing writes to a spec.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

# Pydantic reads the annotations when the program runs.
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeVar

from orchestrator.spec.fields import (
    ENV_PATTERN,
    ENV_REMEDY,
    INTEGER,
    LABEL_PATTERN,
    NAME_PATTERN,
    NAME_REMEDY,
    SCIENTIFIC,
    USER_PATTERN,
    Boolean,
    Choice,
    Doc,
    Duration,
    Given,
    Json,
    JsonValue,
    Keyed,
    Kind,
    Listed,
    Memory,
    Moment,
    Node,
    Null,
    Number,
    OneOf,
    Record,
    Schema,
    StepsOrTime,
    Text,
    Whole,
    inside,
    local_directory,
    looks_secret,
    progress_expression,
    regular_expression,
    storage,
    user_variable,
    watched,
    web_address,
    written,
)
from orchestrator.spec.problems import BadValueError, quoted
from orchestrator.spec.trainer import TrainingSettings

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic_core import CoreSchema

    from orchestrator.spec.fields import Schema

_SECOND = timedelta(seconds=1)

T = TypeVar("T")
Maybe = Annotated[T | None, Null()]
Items = Annotated[tuple[T, ...], Listed()]
Distinct = Annotated[tuple[T, ...], Listed(unique=True)]
YesNo = Annotated[bool, Boolean()]
Time = Annotated[timedelta, Duration(minimum=_SECOND)]


LIST_KEY: Final = "pass"
MAX_PATTERNS: Final = 100


def _pass_pattern(text: str) -> None:
    """Refuse a pattern that matches everything, a secret, or a variable that orch sets."""
    if not any(character.isalnum() for character in text):
        raise BadValueError(f"{quoted(text)} matches every variable", "name what the job needs, such as HF_*")
    if looks_secret(text):
        hint = "secrets: takes names, without *" if "*" in text else f"write secrets: [{text}]"
        raise BadValueError(f"{quoted(text)} looks like a secret, which env would store readably", hint)
    user_variable(text)


PASS_PATTERN: Final = Text(
    "a name or pattern of variables",
    pattern=r"[A-Za-z_*][A-Za-z0-9_*]{0,254}",
    remedy="letters, digits, underscores and *, not beginning with a digit",
    max_length=255,
    check=_pass_pattern,
)


def described_pass() -> Schema:
    """Return the JSON Schema of the key: the list, or the text of a variable of this name."""
    names = {"type": "array", "items": PASS_PATTERN.describe(), "uniqueItems": True, "maxItems": MAX_PATTERNS}
    text = {"type": ["string", "number"]}
    meaning = "names and patterns (HF_HOME, WANDB_*) of variables to take from the submitter's environment"
    return {"description": meaning, "default": [], "anyOf": [names, text]}


class Variables(Keyed):
    """Variables by name. The list of `pass` is taken out before they are read; it is only described_pass here."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        return {**super().__get_pydantic_json_schema__(schema, handler), "properties": {LIST_KEY: described_pass()}}


MAX_WORKERS = 10_000
MAX_GPUS_PER_WORKER = 64
Workers = Annotated[int, Whole(1, MAX_WORKERS)]
Factor = Annotated[float, Number(0, 100, digits=4)]
Milliseconds = Annotated[float, Number(0, 10**9, digits=4)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticWorkers(Record):
    """Any number of ranks from `min` to `max`. An attempt runs at least `grow_after` before it is stopped to grow."""

    min: Annotated[Workers, Doc("fewest ranks it runs with")]
    max: Annotated[Workers, Doc("most ranks it grows to")]
    grow_after: Annotated[Time, Doc("how long it runs before it is stopped to start on more ranks")] = timedelta(
        minutes=5
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAdvice(Record):
    """Result of `orch advise` for the job's script: a number of ranks, and the figures that support it."""

    shorthand: ClassVar[str] = "write advice: {ranks: 4}"

    ranks: Annotated[Workers, Doc("advised number of ranks")]
    certain: Annotated[YesNo, Doc("whether the intervals of the predictions confirm the advice")] = False
    compared_ranks: Annotated[
        Maybe[Workers],
        Doc("ranks that the figures below are of: the advised number, or a larger one that does not pay"),
    ] = None
    efficiency: Annotated[
        Maybe[Factor],
        Doc("throughput of each rank, as a share of one rank's alone"),
    ] = None
    compute_ms: Annotated[Maybe[Milliseconds], Doc("computation of a step with this number of ranks")] = None
    exposed_ms: Annotated[Maybe[Milliseconds], Doc("what a step waits for communication")] = None
    gradient_bytes: Annotated[
        Maybe[Annotated[int, Whole(0, 10**15)]], Doc("bytes of gradients that ranks exchange in each step")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoWorkers(Record):
    """Limits of `num_workers: auto`, and the advice that it follows. The advice is part of the job: nothing is measured when the job is scheduled."""

    shorthand: ClassVar[str] = "write auto: {min: 1, max: 8}"

    min: Annotated[Workers, Doc("fewest ranks")] = 1
    max: Annotated[Workers, Doc("most ranks")] = MAX_WORKERS
    advice: Annotated[
        Maybe[WorkerAdvice], Doc("what `orch submit --advise` found; null: as many as are free at its first start")
    ] = None

    @property
    def advised(self) -> int | None:
        """The advised number of ranks, within the limits; None without advice."""
        return None if self.advice is None else max(self.min, min(self.max, self.advice.ranks))

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most ranks of the first start."""
        return (self.min, self.max) if self.advised is None else (self.advised, self.advised)


def _without_unit(attribute: str) -> str:
    """Return the key of an attribute: `memory` for `memory_bytes`, because in the file the value has a unit."""
    return attribute.removesuffix("_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResources(Record):
    """Resources of each rank. A fraction of a GPU shares it; a number above 1 is whole."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "alias_generator": _without_unit}

    shorthand: ClassVar[str] = "write resources_per_worker: {gpu: 1, cpu: 1}"

    gpu: Annotated[
        float,
        Number(0, MAX_GPUS_PER_WORKER, digits=4),
        Doc("GPUs for each rank; a fraction shares one, 0 runs on the CPU, a number above 1 is whole"),
    ] = 1.0
    cpu: Annotated[float, Number(0, 4096, digits=4), Doc("processor cores for each rank, reserved")] = 1.0
    memory_bytes: Annotated[
        Maybe[Annotated[int, Memory(minimum=1_000_000)]],
        Doc(
            "main memory for each rank, in bytes, reserved, and its limit where the node can set one; 8GB is 8*10^9, 8GiB is 8*2^30; null reserves none"
        ),
    ] = None
    gpu_model: Annotated[
        Maybe[Annotated[str, Text("a GPU model", max_length=100)]],
        Doc("only nodes with GPUs of this model, as `orch nodes` shows it"),
    ] = None


MAX_AT_ONCE = 10_000
MAX_MATRIX_JOBS = 1000
"""Maximum number of jobs of one matrix: each has a working copy of its own."""
MAX_OBJECTIVES = 4
MAX_METRIC_NAME = 255
MatrixValue = bool | int | float | str
MatrixStrategy = Literal["grid", "optuna"]
Pruner = Literal["median", "none"]
Order = Literal["min", "max"]
Parameter = Annotated[str, Text("a parameter's name", pattern=ENV_PATTERN, remedy=ENV_REMEDY, max_length=255)]
Scalar = Annotated[MatrixValue, Json(scalar=True)]
Values = Annotated[Mapping[Parameter, Scalar], Keyed()]


class Bound(Kind):
    """A number, also as `1e-4`. Its written form distinguishes whole numbers (`8`) from all others (`8.0`)."""

    def read(self, node: Node) -> int | float:
        text = written(node, "a number")
        if INTEGER.fullmatch(text):
            return int(text)
        value = float(text) if SCIENTIFIC.fullmatch(text) else math.nan
        if not math.isfinite(value):
            raise BadValueError(f"{quoted(text)} is not a number", "write 8, 0.5 or 1e-4")
        return value

    def describe(self) -> Schema:
        return {"anyOf": [{"type": "number"}, {"type": "string", "pattern": f"^(?:{SCIENTIFIC.pattern})$"}]}


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeSpec(Record):
    """Values between two bounds, which are included."""

    low: Annotated[int | float, Bound(), Doc("smallest value")]
    high: Annotated[int | float, Bound(), Doc("largest value; both bounds without a point: whole numbers only")]
    log: Annotated[bool, Boolean(), Doc("spread over the orders of magnitude")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSpec(Record):
    """One job file, many jobs: one for each combination of the parameters, or one for each trial of a search."""

    parameters: Annotated[
        Mapping[Parameter, Items[Scalar]],
        Keyed(50),
        Doc("each parameter's values; with grid, a job for each combination, at most 1,000"),
    ] = field(default_factory=dict)
    include: Annotated[
        Items[Values], Doc("further combinations, with a value for each parameter; with optuna, the first trials")
    ] = ()
    exclude: Annotated[Items[Values], Doc("combinations to leave out; only with grid")] = ()
    max_concurrent: Annotated[
        Annotated[int, Whole(1, MAX_AT_ONCE)] | None,
        Null(),
        Doc("most jobs of the matrix at a time; null: no limit, with optuna 1"),
    ] = None
    fail_fast: Annotated[bool, Boolean(), Doc("cancel the others when one fails")] = False
    strategy: Annotated[
        MatrixStrategy, Choice(), Doc("grid: every combination; optuna: values are chosen from earlier results")
    ] = "grid"
    ranges: Annotated[
        Mapping[Parameter, RangeSpec], Keyed(50), Doc("parameters with values between bounds; only with optuna")
    ] = field(default_factory=dict)
    trials: Annotated[
        Annotated[int, Whole(1, MAX_MATRIX_JOBS)] | None, Null(), Doc("number of jobs; required with optuna")
    ] = None
    objectives: Annotated[
        Mapping[
            Annotated[str, Text("a metric's name", max_length=MAX_METRIC_NAME)],
            Annotated[Order, Choice(instead={"minimize": "min", "maximize": "max"})],
        ],
        Keyed(MAX_OBJECTIVES),
        Doc(
            "the metrics to optimize: `{METRIC: min}` or `max`; `energy_joules` and `seconds` are measured."
            " Default: checkpoint.score_attribute; only with optuna"
        ),
    ] = field(default_factory=dict)
    pruner: Annotated[
        Annotated[Pruner, Choice()] | None,
        Null(),
        Doc(
            "median: stop trials that do worse than the median; null: median with one reported metric; only with optuna"
        ),
    ] = None
    warmup_steps: Annotated[
        int, Whole(0, 2**53), Doc("steps of each trial before it may be pruned; only with optuna")
    ] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InteractiveSpec(Record):
    """Terminal of each rank, which `orch attach` reaches; the job is ended when it is idle."""

    shorthand: ClassVar[str] = "write interactive: {idle_limit: 1h}"

    idle_limit: Annotated[
        timedelta,
        Duration(minimum=timedelta(seconds=1)),
        Doc("cancelled after this time without input, output, traffic of sessions and processor time, attached or not"),
    ] = timedelta(hours=1)


PlacementStrategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]
OnHang = Literal["restart", "notify"]
LogAction = Literal["fail", "restart"]
ScoreOrder = Literal["min", "max"]
DependencyCondition = Literal["success", "failure", "any"]
Tracker = Literal["wandb", "trackio", "tensorboard", "mlflow"]
StateName = Literal[
    "PENDING", "STARTING", "RUNNING", "RECOVERING", "DRAINING", "SUSPENDED", "SUCCEEDED", "FAILED", "CANCELLED"
]
NotifyState = Literal[StateName, "FINDING"]

Name = Annotated[str, Text("a name", pattern=NAME_PATTERN, remedy=NAME_REMEDY, max_length=50)]
Queue = Annotated[str, Text("a queue's name", pattern=NAME_PATTERN, remedy=NAME_REMEDY, max_length=50)]
Pattern = Annotated[str, Text("a regular expression", check=regular_expression, max_length=1000)]
ProgressPattern = Annotated[str, Text("a regular expression", check=progress_expression, max_length=1000)]
Variable = Annotated[
    str, Text("the name of a variable", pattern=ENV_PATTERN, remedy=ENV_REMEDY, max_length=255, check=user_variable)
]
NodeName = Annotated[str, Text("a node", max_length=255)]
LabelKey = Annotated[
    str,
    Text(
        "a label's key", pattern=LABEL_PATTERN, remedy="letters, digits and - _ . / inside, at most 63", max_length=63
    ),
]
Metric = Annotated[str, Text("a metric's name", max_length=255)]
Glob = Annotated[str, Text("a glob", check=inside)]
WatchGlob = Annotated[str, Text("a glob", check=watched)]
Directory = Annotated[str, Text("a directory", check=local_directory)]
Storage = Annotated[str, Text("a path", check=storage)]
JobReference = Annotated[
    str,
    Text(
        "a job",
        pattern=rf"(?:{USER_PATTERN}/)?[a-z][-a-z0-9]{{0,63}}",
        remedy="write its name, its id, or USER/NAME for another user's",
    ),
]
Count = Annotated[int, Whole(1, 1_000_000)]
Budget = Annotated[int, Whole(0, 1_000_000, instead={-1: "write a number; only preemption can be unlimited"})]
Wait = Annotated[timedelta, Duration()]

_ORDERS = {"minimize": "min", "maximize": "max", "asc": "min", "desc": "max", "lower": "min", "higher": "max"}
_ENDS = dict.fromkeys(("succeeded", "afterok"), "success") | dict.fromkeys(("failed", "afternotok"), "failure")
_ENDS |= dict.fromkeys(("afterany", "always"), "any")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesSpec(Record):
    """Number of ranks, the resources of each, and their placement on nodes."""

    shorthand: ClassVar[str] = "write resources: {num_workers: 1}"

    num_workers: Annotated[
        int | ElasticWorkers | Literal["auto"],
        OneOf({"auto": "auto"}, Whole(1, MAX_WORKERS), ElasticWorkers),
        Doc(
            "ranks (processes); {min: 2, max: 8} for an elastic job; auto for as many as there are GPUs free at its first start, or as advised"
        ),
    ] = 1
    auto: Annotated[Maybe[AutoWorkers], Doc("limits and advice of num_workers: auto")] = None
    resources_per_worker: Annotated[WorkerResources, Doc("what each rank holds")] = field(
        default_factory=WorkerResources
    )
    placement_strategy: Annotated[
        PlacementStrategy,
        Choice(),
        Doc("PACK: on few nodes; STRICT_PACK: on one; SPREAD: over many; STRICT_SPREAD: each on another"),
    ] = "PACK"
    nodes: Annotated[
        Items[NodeName], Doc("only these nodes, by name or id, as `orch nodes` shows them; none: any")
    ] = ()
    node_labels: Annotated[
        Mapping[LabelKey, Annotated[str, Text("a value", empty=True, max_length=255)]],
        Keyed(64),
        Doc("only nodes with all of these labels, as `orch nodes label` sets them; none: any"),
    ] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeEnvSpec(Record):
    """Packages and modules that Ray installs before a rank starts. Any of them means a cold start."""

    pip: Annotated[Items[Annotated[str, Text("a requirement")]], Doc("packages to install, as pip takes them")] = ()
    py_modules: Annotated[
        Items[Annotated[str, Text("a path")]], Doc("local directories or wheels that ranks can import")
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency(Record):
    """Another job that must have ended, and how, before this one starts."""

    shorthand: ClassVar[str] = "write {job: NAME}"

    job: Annotated[JobReference, Doc("name of your job, id of any job, or USER/NAME")]
    on: Annotated[DependencyCondition, Choice(instead=_ENDS), Doc("how it must end: success, failure or any")] = (
        "success"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxRestarts(Record):
    """The budget of restarts of each class of failure. None is no limit."""

    shorthand: ClassVar[str] = "each class of failure has its own: {user: 0, infra: 10, hang: 2, preemption: unlimited}"

    user: Annotated[Budget, Doc("restarts after the script's own exceptions and exit codes")] = 0
    infra: Annotated[Budget, Doc("restarts after signals, lost nodes and GPUs, host memory running out")] = 10
    hang: Annotated[Budget, Doc("restarts after hangs")] = 2
    preemption: Annotated[
        int | None,
        OneOf({"unlimited": None}, Whole(0, 1_000_000, instead={-1: "write unlimited"})),
        Doc("restarts after SIGTERM to a whole node"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff(Record):
    """The wait before a restart: `initial`, doubled each time without a newer checkpoint, at most `max`."""

    initial: Annotated[Wait, Doc("wait before the second restart without progress; the first has none")] = timedelta(
        seconds=1
    )
    max: Annotated[Wait, Doc("longest wait; it doubles each time without a newer checkpoint")] = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCodes(Record):
    """Exit codes with a meaning. `retry`: not the script's fault, charged to the `infra` budget."""

    shorthand: ClassVar[str] = "write exit_codes: {retry: [75]}"

    retry: Annotated[
        Distinct[Annotated[int, Whole(1, 255)]],
        Doc("exit codes that are not the script's fault: restarted from the infra budget"),
    ] = (75,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPolicy(Record):
    """Action for a failed job whose log has a line matching `pattern`, a regular expression."""

    pattern: Annotated[Pattern, Doc("a regular expression, searched for in the end of the failed attempt's log")]
    action: Annotated[
        LogAction,
        Choice(instead={"cancel_retries": "fail", "retry": "restart", "stop": "fail"}),
        Doc("fail: no further restart; restart: charged to the infra budget"),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySpec(Record):
    """Conditions under which a failed job is started again."""

    shorthand: ClassVar[str] = "write retry: {max_restarts: {user: 1}}"

    max_restarts: Annotated[MaxRestarts, Doc("restarts allowed for each class of failure")] = field(
        default_factory=MaxRestarts
    )
    max_no_progress: Annotated[Count, Doc("restarts in a row without a newer checkpoint before it fails")] = 3
    backoff: Annotated[Backoff, Doc("how long to wait before a restart")] = field(default_factory=Backoff)
    exit_codes: Annotated[ExitCodes, Doc("what exit codes mean")] = field(default_factory=ExitCodes)
    log_policies: Annotated[
        tuple[LogPolicy, ...], Listed(100), Doc("what a line of the log says about restarting; the first match counts")
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSpec(Record):
    """Pattern that reads progress from a log line: group 1 is the step, group 2, when there, the total."""

    shorthand: ClassVar[str] = r"write progress: {pattern: 'step (\d+)'}"

    pattern: Annotated[
        ProgressPattern, Doc("a regular expression; group 1 is the step, group 2, when there, the total")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSpec(Record):
    """Rules by which a job counts as hung. `on_hang` None: restart if the script reports its steps, else notify."""

    startup_timeout: Annotated[Time, Doc("from the start of an attempt to its first sign of progress")] = timedelta(
        minutes=10
    )
    heartbeat_timeout: Annotated[
        timedelta | Literal["auto"],
        OneOf({"auto": "auto"}, Duration(minimum=_SECOND)),
        Doc("longest time without progress; auto learns it from the job's own step times"),
    ] = "auto"
    progress: Annotated[Maybe[ProgressSpec], Doc("how to read steps from the log, for scripts that report nothing")] = (
        None
    )
    on_hang: Annotated[
        Maybe[Annotated[OnHang, Choice()]],
        Doc("restart or notify; null: restart if the script reports its steps, else notify"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec(Record):
    """Location and retention of checkpoints. `interval`: steps (int), time (timedelta), or chosen by orch.

    `keep_best` None: as many as `keep`.
    """

    storage_path: Annotated[
        Maybe[Storage],
        Doc("where checkpoints go: an absolute path or a URL; null: the job's own directory under ORCH_HOME"),
    ] = None
    keep: Annotated[Count, Doc("how many of the newest are kept")] = 3
    keep_best: Annotated[
        Maybe[Count], Doc("how many of the best by score_attribute are kept; null: as many as keep")
    ] = None
    score_attribute: Annotated[Maybe[Metric], Doc("the reported metric that tells good checkpoints from bad")] = None
    score_order: Annotated[
        Maybe[Annotated[ScoreOrder, Choice(instead=_ORDERS)]], Doc("min: a lower score is better; max: a higher one")
    ] = None
    interval: Annotated[
        int | timedelta | Literal["auto"],
        OneOf({"auto": "auto"}, StepsOrTime()),
        Doc(
            "between two saves: a number of steps, or time (10m); auto weighs saving against what a failure would lose"
        ),
    ] = "auto"
    watch: Annotated[
        Maybe[WatchGlob], Doc("files that the script saves by itself, as a glob, one match a checkpoint")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySpec(Record):
    """GPU samples kept for the job's report. `rate` in samples per second and GPU."""

    rate: Annotated[float, Number(0.01, 1000, digits=6), Doc("samples a second from each GPU")] = 1.0
    record: Annotated[YesNo, Doc("keep the samples on disk for the job's report")] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifySpec(Record):
    """A web hook, and the states that it reports; FINDING reports the findings of the diagnosis of the job."""

    shorthand: ClassVar[str] = "write {url: https://host/path}"

    url: Annotated[str, Text("a web address", check=web_address), Doc("where to send an HTTP POST")]
    on: Annotated[
        Distinct[Annotated[NotifyState, Choice()]], Doc("states that are reported when the job enters them")
    ] = ("FAILED",)


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class JobSpec(Record):
    """A whole job file. `entrypoint` stays as written; `spec.entrypoint.parse_entrypoint` reads it."""

    version: Annotated[int, Whole(1, 1), Doc("of this format")] = 1
    name: Annotated[Name, Doc(f"what the job is called; its id is the name and six characters: {NAME_REMEDY}")]
    entrypoint: Annotated[
        str,
        Text("a command", max_length=32_768),
        Doc("the command of one rank, such as python train.py; no launcher and no shell syntax"),
    ]
    working_dir: Annotated[
        Maybe[Directory],
        Doc("directory whose files are copied at submission, relative to the job file; null: an empty one"),
    ] = "."
    outputs: Annotated[Items[Glob], Doc("files to bring back from the ranks' nodes, as globs in working_dir")] = ()
    env: Annotated[
        Mapping[Variable, Annotated[str, Text("a value", empty=True, max_length=131_072)]],
        Variables(),
        Doc("variables of every rank; values are text; pass: [HF_HOME, WANDB_*] takes the submitter's"),
    ] = field(default_factory=dict)
    secrets: Annotated[
        Distinct[Variable],
        Doc(
            "names of variables taken from the submitter's environment; kept in a file of mode 0600, deleted at the job's end, masked in logs"
        ),
    ] = ()
    runtime_env: Annotated[RuntimeEnvSpec, Doc("what Ray installs first; such a job starts cold")] = field(
        default_factory=RuntimeEnvSpec
    )
    resources: Annotated[ResourcesSpec, Doc("how many ranks, and what each needs")] = field(
        default_factory=ResourcesSpec
    )
    queue: Annotated[Queue, Doc("the queue it waits in")] = "default"
    priority: Annotated[int, Whole(0, 100), Doc("0 to 100, higher first")] = 50
    preemptible: Annotated[
        YesNo, Doc("may be stopped at a checkpoint for a job of higher priority, and continued later")
    ] = True
    min_runtime: Annotated[Maybe[Wait], Doc("not preempted before it has run for this time; null: at once")] = None
    reclaim_idle: Annotated[
        Maybe[Time], Doc("stopped for others once all of its GPUs were idle for this time; null: the daemon's limit")
    ] = None
    max_duration: Annotated[Maybe[Time], Doc("running time after which it is stopped; null: no limit")] = None
    stop_duration: Annotated[Wait, Doc("from SIGTERM to SIGKILL, the time to save")] = timedelta(minutes=5)
    interactive: Annotated[Maybe[InteractiveSpec], Doc("run each rank on a terminal, as `orch run -i` does")] = None
    hold: Annotated[YesNo, Doc("wait, claiming nothing, until `orch release`")] = False
    start_at: Annotated[
        Maybe[Annotated[datetime, Moment()]],
        Doc("not started before, as 2026-11-25T08:00; null: as soon as there is room"),
    ] = None
    depends_on: Annotated[tuple[Dependency, ...], Listed(100), Doc("jobs that must end first")] = ()
    matrix: Annotated[Maybe[MatrixSpec], Doc("many jobs from one file")] = None
    retry: Annotated[RetrySpec, Doc("when a failed job is started again")] = field(default_factory=RetrySpec)
    health: Annotated[HealthSpec, Doc("when a job counts as hung, and what then")] = field(default_factory=HealthSpec)
    checkpoint: Annotated[CheckpointSpec, Doc("where checkpoints go, how often, and which are kept")] = field(
        default_factory=CheckpointSpec
    )
    telemetry: Annotated[TelemetrySpec, Doc("GPU samples kept with the job")] = field(default_factory=TelemetrySpec)
    trackers: Annotated[Distinct[Annotated[Tracker, Choice()]], Doc("experiment trackers that get the metrics")] = ()
    report: Annotated[YesNo, Doc("write a report when the job ends")] = True
    trainer: Annotated[
        Mapping[str, JsonValue],
        Given(TrainingSettings),
        Doc("settings of orchestrator.train.MultiGPUConfig, for scripts that use its trainers"),
    ] = field(default_factory=dict)
    notify: Annotated[tuple[NotifySpec, ...], Listed(20), Doc("web hooks that report the job's states")] = ()
    labels: Annotated[
        Mapping[LabelKey, Annotated[str, Text("a value", empty=True, max_length=255)]],
        Keyed(64),
        Doc("keys and values of your own, to select jobs by"),
    ] = field(default_factory=dict)
