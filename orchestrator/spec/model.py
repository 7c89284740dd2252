"""What a job file means: frozen values with their defaults and units. No text, no checks, no I/O.

A default written here is the only place that has it; the parser, the JSON Schema and the documentation's test read
it from these classes. Mappings are plain dictionaries underneath, typed read-only: nobody writes to a spec.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

JsonValue = bool | int | float | str | None | list["JsonValue"] | dict[str, "JsonValue"]
"""What JSON can hold. Numbers are finite."""

MatrixValue = bool | int | float | str
PlacementStrategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]
OnHang = Literal["restart", "notify"]
LogAction = Literal["fail", "restart"]
ScoreOrder = Literal["min", "max"]
DependencyCondition = Literal["success", "failure", "any"]
MatrixStrategy = Literal["grid"]
Tracker = Literal["wandb", "trackio", "tensorboard", "mlflow"]
NotifyState = Literal[
    "PENDING", "STARTING", "RUNNING", "RECOVERING", "DRAINING", "SUSPENDED", "SUCCEEDED", "FAILED", "CANCELLED"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticWorkers:
    """Any number of ranks from `min` to `max`. An attempt runs at least `grow_after` before it is stopped to grow."""

    min: int
    max: int
    grow_after: timedelta = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResources:
    """What each rank holds. A fraction of a GPU shares it; a number above 1 is whole."""

    gpu: float = 1.0
    cpu: float = 1.0
    memory_bytes: int | None = None
    gpu_model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesSpec:
    """How many ranks, what each needs, and how they spread over nodes."""

    num_workers: int | ElasticWorkers | Literal["auto"] = 1
    resources_per_worker: WorkerResources = field(default_factory=WorkerResources)
    placement_strategy: PlacementStrategy = "PACK"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeEnvSpec:
    """What Ray installs before a rank starts. Anything here means a cold start."""

    pip: tuple[str, ...] = ()
    py_modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency:
    """Another job that must have ended, and how, before this one starts."""

    job: str
    on: DependencyCondition = "success"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSpec:
    """One job file, many jobs: one for each combination of the parameters."""

    parameters: Mapping[str, tuple[MatrixValue, ...]] = field(default_factory=dict)
    include: tuple[Mapping[str, MatrixValue], ...] = ()
    exclude: tuple[Mapping[str, MatrixValue], ...] = ()
    max_concurrent: int | None = None
    fail_fast: bool = False
    strategy: MatrixStrategy = "grid"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxRestarts:
    """The budget of restarts of each class of failure. None is no limit."""

    user: int = 0
    infra: int = 10
    hang: int = 2
    preemption: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """The wait before a restart: `initial`, doubled each time without a newer checkpoint, at most `max`."""

    initial: timedelta = timedelta(seconds=1)
    max: timedelta = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCodes:
    """Exit codes with a meaning. `retry`: not the script's fault, charged to the `infra` budget."""

    retry: tuple[int, ...] = (75,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPolicy:
    """What to do with a job that failed and whose log has a line matching `pattern`, a regular expression."""

    pattern: str
    action: LogAction


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySpec:
    """When a failed job is started again."""

    max_restarts: MaxRestarts = field(default_factory=MaxRestarts)
    max_no_progress: int = 3
    backoff: Backoff = field(default_factory=Backoff)
    exit_codes: ExitCodes = field(default_factory=ExitCodes)
    log_policies: tuple[LogPolicy, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSpec:
    """How to read progress from a log line: group 1 is the step, group 2, when there, the total."""

    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSpec:
    """When a job counts as hung. `on_hang` None: restart if the script reports its steps, else notify."""

    startup_timeout: timedelta = timedelta(minutes=10)
    heartbeat_timeout: timedelta | Literal["auto"] = "auto"
    progress: ProgressSpec | None = None
    on_hang: OnHang | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """Where checkpoints go and which are kept. `interval`: steps (int), time (timedelta), or chosen by orch.

    `keep_best` None: as many as `keep`.
    """

    storage_path: str | None = None
    keep: int = 3
    keep_best: int | None = None
    score_attribute: str | None = None
    score_order: ScoreOrder | None = None
    interval: int | timedelta | Literal["auto"] = "auto"
    watch: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySpec:
    """GPU samples kept for the job's report. `rate` in samples per second and GPU."""

    rate: float = 1.0
    record: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifySpec:
    """A web hook, and the states whose entry it is told of."""

    url: str
    on: tuple[NotifyState, ...] = ("FAILED",)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A whole job file. `entrypoint` stays as written; `spec.entrypoint.parse_entrypoint` reads it."""

    version: int = 1
    name: str
    entrypoint: str
    working_dir: str | None = "."
    outputs: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    runtime_env: RuntimeEnvSpec = field(default_factory=RuntimeEnvSpec)
    resources: ResourcesSpec = field(default_factory=ResourcesSpec)
    queue: str = "default"
    priority: int = 50
    preemptible: bool = True
    min_runtime: timedelta | None = None
    max_duration: timedelta | None = None
    stop_duration: timedelta = timedelta(minutes=5)
    depends_on: tuple[Dependency, ...] = ()
    matrix: MatrixSpec | None = None
    retry: RetrySpec = field(default_factory=RetrySpec)
    health: HealthSpec = field(default_factory=HealthSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    telemetry: TelemetrySpec = field(default_factory=TelemetrySpec)
    trackers: tuple[Tracker, ...] = ()
    report: bool = True
    trainer: Mapping[str, JsonValue] = field(default_factory=dict)
    notify: tuple[NotifySpec, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
