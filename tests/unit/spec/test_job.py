"""Conversion of job.yaml to values: defaults, every key, and the text and place of each error."""

import json
import pickle
from datetime import timedelta
from typing import Any

import pytest

from orchestrator.spec.job import from_dict, parse_job
from orchestrator.spec.model import (
    Backoff,
    CheckpointSpec,
    Dependency,
    ElasticWorkers,
    ExitCodes,
    HealthSpec,
    JobSpec,
    LogPolicy,
    MatrixSpec,
    MaxRestarts,
    NotifySpec,
    ProgressSpec,
    ResourcesSpec,
    RetrySpec,
    RuntimeEnvSpec,
    TelemetrySpec,
    WorkerResources,
)
from orchestrator.spec.problems import Problem, SpecError
from orchestrator.spec.reader.reading import to_dict

HEAD = "name: digits\nentrypoint: python train.py\n"
FULL = r"""
version: 1
name: digits
entrypoint: python train.py --epochs 5
working_dir: src
outputs: ["out/**", log.txt]
env: {TOKENIZERS_PARALLELISM: "false", SEED: 0012, WHEN: 12:30}
secrets: [HF_TOKEN]
runtime_env: {pip: [einops==0.8], py_modules: [lib]}
resources:
  num_workers: {min: 2, max: 8}
  resources_per_worker: {gpu: 0.5, cpu: 2, memory: 8GB, gpu_model: H100}
  placement_strategy: STRICT_SPREAD
queue: research
priority: 70
preemptible: no
min_runtime: 10m
max_duration: 24h
stop_duration: 90s
depends_on: [{job: prepare, on: failure}, {job: other}]
matrix: {parameters: {lr: [0.1, 1e-2], opt: [adam, 3, true]}, include: [{lr: 1, opt: sgd}], exclude: [{opt: adam}],
  max_concurrent: 4, fail_fast: true, strategy: grid}
retry:
  max_restarts: {user: 1, infra: 2, hang: 3, preemption: 4}
  max_no_progress: 5
  backoff: {initial: 500ms, max: 1m}
  exit_codes: {retry: [75, 3]}
  log_policies: [{pattern: "CUDA out of memory", action: fail}, {pattern: reset, action: restart}]
health:
  startup_timeout: 1h
  heartbeat_timeout: 90s
  progress: {pattern: 'step (\d+)(?:/(\d+))?'}
  on_hang: notify
checkpoint: {storage_path: "s3://b/x", keep: 1, score_attribute: loss, score_order: min, interval: 100, watch: "out/*"}
telemetry: {rate: 10, record: off}
trackers: [wandb, mlflow]
report: off
trainer: {precision: bf16, timeout: 90s, device_ids: [0, 1], compile: yes, max_grad_norm: 1e-1, backend: null}
notify: [{url: "https://example.org/hook", on: [FAILED, SUCCEEDED]}]
labels: {team: vision, a.b/c: "", year: 2026}
"""


def problems_of(text: str, *overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(SpecError) as caught:
        parse_job(text, overrides=overrides)
    return caught.value.problems


def test_two_keys_are_a_job_and_the_rest_has_its_documented_default() -> None:
    spec = parse_job(HEAD)
    assert spec == JobSpec(name="digits", entrypoint="python train.py")
    assert spec == JobSpec(
        version=1,
        name="digits",
        entrypoint="python train.py",
        working_dir=".",
        resources=ResourcesSpec(
            num_workers=1, resources_per_worker=WorkerResources(gpu=1, cpu=1), placement_strategy="PACK"
        ),
        queue="default",
        priority=50,
        preemptible=True,
        stop_duration=timedelta(minutes=5),
        retry=RetrySpec(
            max_restarts=MaxRestarts(user=0, infra=10, hang=2, preemption=None),
            max_no_progress=3,
            backoff=Backoff(initial=timedelta(seconds=1), max=timedelta(minutes=10)),
            exit_codes=ExitCodes(retry=(75,)),
        ),
        health=HealthSpec(startup_timeout=timedelta(minutes=10), heartbeat_timeout="auto"),
        checkpoint=CheckpointSpec(keep=3, interval="auto"),
        telemetry=TelemetrySpec(rate=1, record=True),
        report=True,
    )
    assert spec.min_runtime is None
    assert spec.max_duration is None


def test_every_key_arrives_as_its_typed_value() -> None:
    assert parse_job(FULL) == JobSpec(
        name="digits",
        entrypoint="python train.py --epochs 5",
        working_dir="src",
        outputs=("out/**", "log.txt"),
        env={"TOKENIZERS_PARALLELISM": "false", "SEED": "0012", "WHEN": "12:30"},
        secrets=("HF_TOKEN",),
        runtime_env=RuntimeEnvSpec(pip=("einops==0.8",), py_modules=("lib",)),
        resources=ResourcesSpec(
            num_workers=ElasticWorkers(min=2, max=8),
            resources_per_worker=WorkerResources(gpu=0.5, cpu=2, memory_bytes=8_000_000_000, gpu_model="H100"),
            placement_strategy="STRICT_SPREAD",
        ),
        queue="research",
        priority=70,
        preemptible=False,
        min_runtime=timedelta(minutes=10),
        max_duration=timedelta(hours=24),
        stop_duration=timedelta(seconds=90),
        depends_on=(Dependency(job="prepare", on="failure"), Dependency(job="other", on="success")),
        matrix=MatrixSpec(
            parameters={"lr": (0.1, 0.01), "opt": ("adam", 3, True)},
            include=({"lr": 1, "opt": "sgd"},),
            exclude=({"opt": "adam"},),
            max_concurrent=4,
            fail_fast=True,
            strategy="grid",
        ),
        retry=RetrySpec(
            max_restarts=MaxRestarts(user=1, infra=2, hang=3, preemption=4),
            max_no_progress=5,
            backoff=Backoff(initial=timedelta(milliseconds=500), max=timedelta(minutes=1)),
            exit_codes=ExitCodes(retry=(75, 3)),
            log_policies=(
                LogPolicy(pattern="CUDA out of memory", action="fail"),
                LogPolicy(pattern="reset", action="restart"),
            ),
        ),
        health=HealthSpec(
            startup_timeout=timedelta(hours=1),
            heartbeat_timeout=timedelta(seconds=90),
            progress=ProgressSpec(pattern=r"step (\d+)(?:/(\d+))?"),
            on_hang="notify",
        ),
        checkpoint=CheckpointSpec(
            storage_path="s3://b/x", keep=1, score_attribute="loss", score_order="min", interval=100, watch="out/*"
        ),
        telemetry=TelemetrySpec(rate=10, record=False),
        trackers=("wandb", "mlflow"),
        report=False,
        trainer={
            "precision": "bf16",
            "timeout": "1m30s",
            "device_ids": [0, 1],
            "compile": True,
            "max_grad_norm": 0.1,
            "backend": None,
        },
        notify=(NotifySpec(url="https://example.org/hook", on=("FAILED", "SUCCEEDED")),),
        labels={"team": "vision", "a.b/c": "", "year": "2026"},
    )


def test_every_key_survives_the_store() -> None:
    spec = parse_job(FULL)
    assert from_dict(json.loads(json.dumps(to_dict(spec)))) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize(
    ("line", "path", "value"),
    [
        ("resources: {num_workers: auto}", "resources.num_workers", "auto"),
        ("resources: {num_workers: auto, auto: {max: 8}}", "resources.auto.max", 8),
        ("resources: {num_workers: auto, auto: {advice: {ranks: 3}}}", "resources.auto.advice.ranks", 3),
        ("retry: {max_restarts: {preemption: unlimited}}", "retry.max_restarts.preemption", None),
        ("checkpoint: {interval: 10m}", "checkpoint.interval", timedelta(minutes=10)),
        ("checkpoint: {interval: 10}", "checkpoint.interval", 10),
        ("checkpoint: {storage_path: /data}", "checkpoint.storage_path", "/data"),
        ("checkpoint: {watch: /data/ckpt-*}", "checkpoint.watch", "/data/ckpt-*"),
        ("checkpoint: {storage_path: ~}", "checkpoint.storage_path", None),
        ("working_dir: null", "working_dir", None),
        ("working_dir: ..", "working_dir", ".."),
        ("env:", "env", {}),
        ("outputs:", "outputs", ()),
        ("resources:", "resources", ResourcesSpec()),
        ("report: on", "report", True),
        ("preemptible: FALSE", "preemptible", False),
        ("stop_duration: 0s", "stop_duration", timedelta(0)),
        ("resources: {resources_per_worker: {gpu: 0}}", "resources.resources_per_worker.gpu", 0.0),
        ("resources: {resources_per_worker: {gpu: 4.0}}", "resources.resources_per_worker.gpu", 4.0),
        ("resources: {resources_per_worker: {gpu_model: 4090}}", "resources.resources_per_worker.gpu_model", "4090"),
        ("matrix: {include: [{lr: 1e-3, on: 2026-11-21}]}", "matrix.include", ({"lr": 0.001, "on": "2026-11-21"},)),
        ("trainer: {peak_flops: 1e15}", "trainer", {"peak_flops": 10**15}),
        ("trainer: {device_ids: '0,1'}", "trainer", {"device_ids": [0, 1]}),
        ("trainer:", "trainer", {}),
    ],
)
def test_other_spellings_are_taken(line: str, path: str, value: Any) -> None:
    spec: Any = parse_job(HEAD + line)
    for step in path.split("."):
        spec = getattr(spec, step)
    assert spec == value


BAD: list[tuple[str, str, int, int, str, str]] = [
    # line 3 of the file, path, line, column, message, hint
    ("workdir: .", "workdir", 3, 1, "no such key", "did you mean working_dir?"),
    ("enviroment: {}", "enviroment", 3, 1, "no such key", "did you mean env?"),
    ("prioritty: 3", "prioritty", 3, 1, "no such key", "did you mean priority?"),
    ("Queue: x", "Queue", 3, 1, "no such key", "did you mean queue?"),
    ("memory: 8GB", "memory", 3, 1, "no such key", "elsewhere: resources.resources_per_worker.memory"),
    ("qqqq: 1", "qqqq", 3, 1, "no such key", "docs/job-yaml.md"),
    ("telemetry: {zzzz: 1}", "telemetry.zzzz", 3, 13, "no such key", "telemetry has rate, record"),
    ("version: 2", "version", 3, 10, "expected a whole number from 1 to 1", ""),
    ("priority: 101", "priority", 3, 11, "from 0 to 100, got 101", ""),
    ("priority: high", "priority", 3, 11, 'got "high"', ""),
    ('priority: "50"', "priority", 3, 11, 'got "50"', "remove the quotation marks"),
    ("priority: 0x10", "priority", 3, 11, 'got "0x10"', "decimal digits"),
    ("priority: 010", "priority", 3, 11, 'got "010"', "decimal digits"),
    ("priority: 1_0", "priority", 3, 11, 'got "1_0"', "decimal digits"),
    ("priority: [1]", "priority", 3, 11, "got a list", "single value"),
    ("priority:", "priority", 3, 10, "got nothing", "remove the key for its default"),
    ("queue: on", "queue", 3, 8, "got the YAML boolean on", 'write "on", in quotation marks'),
    ("queue: ''", "queue", 3, 8, "got an empty text", "begin with a letter"),
    ("queue: A-b", "queue", 3, 8, '"A-b" is not a queue\'s name', "begin with a letter"),
    ("queue: {a: b}", "queue", 3, 8, "got a mapping", "single value"),
    ("queue: " + "q" * 51, "queue", 3, 8, "of 51 characters", "at most 50"),
    ("preemptible: 'yes'", "preemptible", 3, 14, "expected true or false", "without quotation marks"),
    ("preemptible: 1", "preemptible", 3, 14, "expected true or false", "without quotation marks"),
    ("env: {A: no}", "env.A", 3, 10, "the YAML boolean no", 'write "no"'),
    ("env: {A: ~}", "env.A", 3, 10, "got nothing", "give a value"),
    ("env: {A: [1]}", "env.A", 3, 10, "got a list", "single value"),
    ("env: {1A: x}", "env.1A", 3, 7, "not the name of a variable", "letters, digits"),
    ("env: {RANK: '0'}", "env.RANK", 3, 7, "orch sets this variable itself", "remove it"),
    ("env: {ORCH_HOME: /x}", "env.ORCH_HOME", 3, 7, "orch sets this variable itself", "remove it"),
    ("env: [A=1]", "env", 3, 6, "expected a mapping, got a list", "{NAME: value}"),
    ("secrets: [A, A]", "secrets[1]", 3, 14, "occurs twice in the list", "remove one"),
    ("secrets: A", "secrets", 3, 10, "expected a list", "write [A]"),
    ("secrets: [WORLD_SIZE]", "secrets[0]", 3, 11, "orch sets this variable itself", ""),
    ("env: {A: x}\nsecrets: [A]", "secrets[0]", 4, 11, "A is in env too", "remove it from one"),
    ("outputs: [../x]", "outputs[0]", 3, 11, "leads out of working_dir", "remove the `..`"),
    ("outputs: [a/../../x]", "outputs[0]", 3, 11, "leads out of working_dir", "remove the `..`"),
    ("outputs: [/etc/x]", "outputs[0]", 3, 11, "is not relative", "relative to working_dir"),
    ("outputs: [~/x]", "outputs[0]", 3, 11, "is not relative", "relative to working_dir"),
    ("working_dir: s3://b/x", "working_dir", 3, 14, "not a local directory", "fetch it first"),
    ("resources: 4", "resources", 3, 12, "expected a mapping with num_workers", "resources: {num_workers: 1}"),
    ("resources: {num_workers: 0}", "resources.num_workers", 3, 26, "from 1 to 10000, got 0", "`auto`"),
    ("resources: {num_workers: two}", "resources.num_workers", 3, 26, 'got "two"', "{min: ..., max: ...}"),
    ("resources: {num_workers: {min: 2}}", "resources.num_workers.max", 3, 26, "is required", "most ranks"),
    (
        "resources: {num_workers: {min: 4, max: 2}}",
        "resources.num_workers",
        3,
        26,
        "min is 4, more than max, 2",
        "exchange",
    ),
    (
        "resources: {placement_strategy: pack}",
        "resources.placement_strategy",
        3,
        33,
        "one of PACK",
        "did you mean PACK?",
    ),
    *[
        (
            f"resources: {{resources_per_worker: {{{text}}}}}",
            f"resources.resources_per_worker.{key}",
            3,
            38 + len(key),
            *rest,
        )
        for text, key, *rest in [
            ("gpu: 1.5", "gpu", "1.5 GPUs: above 1 the number must be whole", "a fraction below 1"),
            ("gpu: -1", "gpu", "a number from 0 to 64", ""),
            ("gpu: 65", "gpu", "a number from 0 to 64", ""),
            ("gpu: 0.00001", "gpu", "at most 4 decimals", "round it"),
            ("gpu: 1e-1", "gpu", "a number from 0 to 64", "decimal digits"),
            ("gpu: '1'", "gpu", 'got "1"', "remove the quotation marks"),
            ("gpu: H100:8", "gpu", 'got "H100:8"', "such as 8"),
            ("memory: 8", "memory", "less than 1000000 bytes", "write 8GB"),
            ("memory: 8kB", "memory", "less than 1000000 bytes", "write 8GB or 8GiB"),
            ("memory: lots", "memory", "not an amount of memory", "8GiB"),
        ]
    ],
    (
        "resources: {resources_per_worker: {gpu: 0, gpu_model: H100}}",
        "resources.resources_per_worker.gpu_model",
        *(3, 55, "a GPU model, but no GPU", "gpu: 1"),
    ),
    (
        "resources: {num_workers: auto, resources_per_worker: {gpu: 0}}",
        *("resources.num_workers", 3, 26, "auto counts free GPUs, but gpu is 0", "a number of ranks"),
    ),
    (
        "resources: {num_workers: 2, auto: {max: 8}}",
        *("resources.auto", 3, 35, "which is not written", "write num_workers: auto"),
    ),
    (
        "resources: {num_workers: auto, auto: {min: 8, max: 2}}",
        *("resources.auto", 3, 38, "min is 8, more than max, 2", "exchange them"),
    ),
    ("resources: {num_workers: auto, auto: {advice: {}}}", "resources.auto.advice.ranks", 3, 47, "required", ""),
    (
        "resources: {num_workers: auto, auto: {advice: {ranks: 2, efficiency: .nan}}}",
        *("resources.auto.advice.efficiency", 3, 70, "a number from 0 to 100", ""),
    ),
    ("max_duration: 24:00:00", "max_duration", 3, 15, "not a duration", "write 24h"),
    ("max_duration: 0s", "max_duration", 3, 15, "expected at least 1s", ""),
    ("max_duration: 20", "max_duration", 3, 15, '"20" has no unit', "write 20s, 20m or 20h"),
    ("max_duration: unlimited", "max_duration", 3, 15, "not a duration", "write 10m"),
    ("max_duration: 1h\nmin_runtime: 2h", "min_runtime", 4, 14, "longer than max_duration, 1h", "preemptible: false"),
    ("retry: 3", "retry", 3, 8, "expected a mapping with max_restarts", "write retry: {max_restarts: {user: 1}}"),
    ("retry: {max_restarts: 3}", "retry.max_restarts", 3, 23, "expected a mapping", "each class of failure"),
    (
        "retry: {max_restarts: {user: -1}}",
        "retry.max_restarts.user",
        3,
        30,
        "got -1",
        "only preemption can be unlimited",
    ),
    ("retry: {max_restarts: {preemption: -1}}", "retry.max_restarts.preemption", 3, 36, "got -1", "write unlimited"),
    ("retry: {backoff: {initial: 1h}}", "retry.backoff", 3, 18, "initial is 1h, longer than max, 10m", "raise max"),
    ("retry: {exit_codes: {retry: [0]}}", "retry.exit_codes.retry[0]", 3, 30, "from 1 to 255, got 0", ""),
    ("retry: {exit_codes: {retry: [256]}}", "retry.exit_codes.retry[0]", 3, 30, "got 256", ""),
    ("retry: {exit_codes: {retry: 75}}", "retry.exit_codes.retry", 3, 29, "expected a list", "write [75]"),
    (
        "retry: {log_policies: [{pattern: '(', action: fail}]}",
        *("retry.log_policies[0].pattern", 3, 34, "not a regular expression", "Python's re module"),
    ),
    (
        f"retry: {{log_policies: [{{pattern: '{'[ā-ſ]' * 9}', action: fail}}]}}",
        *("retry.log_policies[0].pattern", 3, 34, "9 sets of characters", "at most 8 sets"),
    ),
    (
        "health: {progress: {pattern: '(?i)(\\d)" + r"[\u0100-\uffff]" * 50 + "'}}",
        *("health.progress.pattern", 3, 30, "50 sets of characters", "at most 8 sets"),
    ),
    (
        "retry: {log_policies: [{pattern: x, action: cancel_retries}]}",
        *("retry.log_policies[0].action", 3, 45, "one of fail, restart", "did you mean fail?"),
    ),
    (
        "retry: {log_policies: [{pattern: x}]}",
        "retry.log_policies[0].action",
        3,
        24,
        "is required",
        "no further restart",
    ),
    ("health: {progress: {pattern: step}}", "health.progress.pattern", 3, 30, "no group for the step", r"step (\d+)"),
    ("health: {progress: 'step 1'}", "health.progress", 3, 20, "expected a mapping with pattern", "progress: {pattern"),
    ("health: {on_hang: kill}", "health.on_hang", 3, 19, "one of restart, notify", ""),
    (
        "health: {heartbeat_timeout: never}",
        "health.heartbeat_timeout",
        3,
        29,
        "not a duration",
        "`auto` are also accepted",
    ),
    ("checkpoint: {keep: 0}", "checkpoint.keep", 3, 20, "from 1", ""),
    (
        "checkpoint: {score_order: min}",
        "checkpoint.score_order",
        3,
        27,
        "without score_attribute",
        "score_attribute: loss",
    ),
    (
        "checkpoint: {score_attribute: loss}",
        "checkpoint.score_attribute",
        3,
        31,
        "is not specified",
        "score_order: min",
    ),
    (
        "checkpoint: {score_attribute: l, score_order: minimize}",
        *("checkpoint.score_order", 3, 47, "one of min, max", "did you mean min?"),
    ),
    ("checkpoint: {interval: 0}", "checkpoint.interval", 3, 24, "expected a whole number from 1", "`auto`"),
    ("checkpoint: {interval: 10ms}", "checkpoint.interval", 3, 24, "expected at least 1s", "`auto`"),
    ("checkpoint: {storage_path: ckpt}", "checkpoint.storage_path", 3, 28, "is relative", "beginning with /"),
    (
        "checkpoint: {storage_path: gs://b/x}",
        "checkpoint.storage_path",
        3,
        28,
        "not a storage that orch can use",
        "s3://",
    ),
    ("checkpoint: {storage_path: s3://}", "checkpoint.storage_path", 3, 28, "names no bucket", "s3://bucket"),
    ("checkpoint: {storage_path: file:///data}", "checkpoint.storage_path", 3, 28, "not a storage", "write /data"),
    ("checkpoint: {storage_path: s3://b/../x}", "checkpoint.storage_path", 3, 28, "names no bucket", "s3://bucket"),
    ("checkpoint: {keep_best: 2}", "checkpoint.keep_best", 3, 25, "the best is not specified", "score_attribute"),
    ("checkpoint: {storage_path: ~/ckpt}", "checkpoint.storage_path", 3, 28, "is not expanded", "the whole path"),
    ("checkpoint: {watch: ../x}", "checkpoint.watch", 3, 21, "leads out of working_dir", "remove the `..`"),
    ("telemetry: {rate: 0}", "telemetry.rate", 3, 19, "from 0.01 to 1000", ""),
    ("trackers: [wandb, wandb]", "trackers[1]", 3, 19, "occurs twice", "remove one"),
    ("trackers: [wanbd]", "trackers[0]", 3, 12, "one of wandb", "did you mean wandb?"),
    ("matrix: {include: [{a: yes}]}", "matrix.include[0].a", 3, 24, "different things to different readers", "true"),
    ("matrix: {include: [{a: 010}]}", "matrix.include[0].a", 3, 24, "different things to different readers", "digits"),
    ("matrix: {include: [{a: .nan}]}", "matrix.include[0].a", 3, 24, "different things to different readers", ""),
    ("matrix: {include: [{a: 1e999}]}", "matrix.include[0].a", 3, 24, "different things to different readers", ""),
    ("trainer: [1]", "trainer", 3, 10, "expected a mapping", ""),
    ("trainer: {batchsize: 8}", "trainer.batchsize", 3, 11, "no such key", "did you mean batch_size?"),
    ("trainer: {gradient_clip_val: 1}", "trainer.gradient_clip_val", 3, 11, "no such key", "mean max_grad_norm?"),
    ("trainer: {qqqq: 8}", "trainer.qqqq", 3, 11, "no such key", "docs/training.md"),
    ("batch_size: 8", "batch_size", 3, 1, "no such key", "it belongs elsewhere: trainer.batch_size"),
    ("trainer: {batch_size: many}", "trainer.batch_size", 3, 23, "expected a whole number of at least 1", ""),
    ('trainer: {batch_size: "8"}', "trainer.batch_size", 3, 23, 'got "8"', "remove the quotation marks"),
    ("trainer: {peak_flops: -1}", "trainer.peak_flops", 3, 23, "expected a number above 0", ""),
    (
        "trainer: {max_grad_norm: 1000000000000000000}",
        "trainer.max_grad_norm",
        3,
        26,
        "expected a number above 0",
        "1e18",
    ),
    ("trainer: {peak_flops: .inf}", "trainer.peak_flops", 3, 23, "expected a number above 0", ""),
    ("trainer: {timeout: 0s}", "trainer.timeout", 3, 20, "expected at least 1ms", ""),
    ("trainer: {precision: bf61}", "trainer.precision", 3, 22, "one of auto, fp32", "did you mean bf16?"),
    ("trainer: {device_ids: [0, 0]}", "trainer.device_ids", 3, 23, "indices of different GPUs", "[0, 1]"),
    ("matrix: {}", "matrix", 3, 9, "without parameters", "parameters: {lr"),
    ("matrix: {parameters: {lr: []}}", "matrix.parameters.lr", 3, 27, "no values", "at least one"),
    ("matrix: {parameters: {lr: [[1]]}}", "matrix.parameters.lr[0]", 3, 28, "got a list", ""),
    ("matrix: {parameters: {lr: [~]}}", "matrix.parameters.lr[0]", 3, 28, "got nothing", "give a value"),
    ("matrix: {parameters: {a-b: [1]}}", "matrix.parameters.a-b", 3, 23, "not a parameter's name", ""),
    (
        "matrix: {parameters: {a: [1, 2]}, exclude: [{b: 1}]}",
        *("matrix.exclude[0]", 3, 45, 'excludes by "b", which is not a parameter', "parameters: a"),
    ),
    (
        f"matrix: {{parameters: {{a: {list(range(200))}, b: {list(range(200))}}}}}",
        *("matrix.parameters", 3, 22, "40000 combinations, more than 1000", "fewer values"),
    ),
    ("depends_on: [prepare]", "depends_on[0]", 3, 14, "expected a mapping with job, on", "write {job: NAME}"),
    ("depends_on: [{job: digits}]", "depends_on[0].job", 3, 20, "would wait for itself", "another job"),
    ("depends_on: [{job: a, on: afterok}]", "depends_on[0].on", 3, 27, "one of success", "did you mean success?"),
    ("depends_on: [{job: a}, {job: a, on: any}]", "depends_on[1].job", 3, 30, '"a" is named twice', "each job once"),
    ("depends_on: [{on: any}]", "depends_on[0].job", 3, 14, "is required", "name of your job"),
    ("notify: [{url: ftp://x}]", "notify[0].url", 3, 16, "not a web address", "https://host/path"),
    ("notify: [{url: https://x, on: []}]", "notify[0].on", 3, 31, "no state is named", "on: [FAILED]"),
    ("notify: [{url: https://x, on: [DONE]}]", "notify[0].on[0]", 3, 32, "one of PENDING", ""),
    ("labels: {-x: y}", "labels.-x", 3, 10, "not a label's key", "letters, digits"),
    ("labels: {a: yes}", "labels.a", 3, 13, "the YAML boolean yes", 'write "yes"'),
    ("runtime_env: {conda: x}", "runtime_env.conda", 3, 15, "no such key", "did you mean pip?"),
    ("runtime_env: {working_dir: .}", "runtime_env.working_dir", 3, 15, "no such key", "elsewhere: working_dir"),
]


@pytest.mark.parametrize(("line", "path", "row", "column", "message", "hint"), BAD, ids=[case[0][:60] for case in BAD])
def test_a_bad_value_is_one_problem_with_its_place_and_a_way_out(
    line: str, path: str, row: int, column: int, message: str, hint: str
) -> None:
    (problem,) = problems_of(HEAD + line + "\n")
    assert message in problem.message
    assert hint in problem.hint
    assert (problem.path, problem.line, problem.column) == (path, row, column)


@pytest.mark.parametrize(
    ("name", "fine"),
    [
        ("a", True),
        ("digits-2", True),
        ("a" * 50, True),
        ("a" * 51, False),
        ("2digits", False),
        ("digits-", False),
        ("di_gits", False),
        ("di.gits", False),
        ("Digits", False),
        ("../x", False),
        ("x y", False),
    ],
)
def test_names_are_good_file_names(name: str, fine: bool) -> None:
    text = f"name: {name}\nentrypoint: python t.py\n"
    if fine:
        assert parse_job(text).name == name
    else:
        (problem,) = problems_of(text)
        assert (problem.path, problem.line, problem.column) == ("name", 1, 7)


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        (
            "torchrun --nproc-per-node 4 train.py --lr 1",
            "torchrun would start more",
            "write entrypoint: python train.py --lr 1 with resources.num_workers: 4",
        ),
        ("python train.py | tee log", 'no shell reads this line, so "|"', "bash -c 'python train.py | tee log'"),
        ("python ../train.py", "is outside working_dir", "set working_dir"),
        ("python a/../../train.py", "is outside working_dir", "set working_dir"),
        ("[python, train.py]", "got a list", "single value"),
        ("true", "the YAML boolean true", 'write "true"'),
    ],
)
def test_entry_points_are_checked_with_the_file(line: str, message: str, hint: str) -> None:
    (problem,) = problems_of(f"name: x\nentrypoint: {line}\n")
    assert (problem.path, problem.line, problem.column) == ("entrypoint", 2, 13)
    assert message in problem.message
    assert hint in problem.hint


def test_everything_wrong_is_told_at_once_in_the_order_of_the_file() -> None:
    text = """\
name: Bad Name
workdir: .
entrypoint: torchrun t.py
env: {A: no, RANK: 1}
name: again
priority: 101
resources: {num_workers: "2", resources_per_worker: {gpu: 1.5}}
retry: {backoff: {initial: 2h}}
secrets: [A]
unheard-of: 1
"""
    with pytest.raises(SpecError) as caught:
        parse_job(text, source="jobs/x.yaml", overrides=["nonsense", "queue=Q"])
    assert [(p.line, p.path) for p in caught.value.problems] == [
        (1, "name"),
        (2, "workdir"),
        (3, "entrypoint"),
        (4, "env.A"),
        (4, "env.RANK"),
        (5, ""),
        (6, "priority"),
        (7, "resources.num_workers"),
        (7, "resources.resources_per_worker.gpu"),
        (8, "retry.backoff"),
        (10, "unheard-of"),
        (0, ""),
        (0, "queue"),
    ]
    lines = str(caught.value).splitlines()
    assert len(lines) == 13
    assert lines[1] == "jobs/x.yaml:2:1: workdir: there is no such key (did you mean working_dir?)"
    assert lines[11] == "--set nonsense: there is no `=` (write --set resources.num_workers=4)"


def test_missing_keys_are_told_with_what_they_mean() -> None:
    first, second = problems_of("queue: x\n")
    assert (first.path, first.message) == ("name", "is required")
    assert (second.path, second.message) == ("entrypoint", "is required")
    assert "the command of one rank" in second.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("~\n", "the file is empty"),
        ("just text\n", 'expected keys such as name: and entrypoint:, got "just text"'),
        ("[a, b]\n", "got a list"),
    ],
)
def test_a_file_that_is_no_mapping_is_one_problem(text: str, message: str) -> None:
    (problem,) = problems_of(text)
    assert message in problem.message
    assert problem.hint
    assert (problem.line, problem.column) == (1, 1)


def test_problems_of_aliased_values_are_told_for_each_use() -> None:
    paths = [p.path for p in problems_of(HEAD + "min_runtime: &x soon\nmax_duration: *x\n")]
    assert paths == ["min_runtime", "max_duration"]


def test_a_flood_of_problems_is_kept_whole_and_printed_in_part() -> None:
    items = ", ".join(f"V{i}: no" for i in range(150))
    with pytest.raises(SpecError) as caught:
        parse_job(HEAD + f"env: {{{items}}}\n")
    assert len(caught.value.problems) == 150
    assert len(str(caught.value).splitlines()) == 101
    assert str(caught.value).endswith("... and 50 more")


def test_foreign_text_cannot_write_to_the_terminal_through_a_message() -> None:
    text = str(SpecError(problems_of(HEAD + '"\\e[31mred\\a": "\\e]0;title"\nqueue: "\\e[2J"\n')))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert r"\x1b[31mred" in text


def test_lists_and_tables_are_bounded() -> None:
    assert "at most 100" in problems_of(HEAD + f"depends_on: [{'{job: a}, ' * 101}]\n")[0].hint
    labels = ", ".join(f"l{i}: x" for i in range(65))
    assert "at most 64" in problems_of(HEAD + f"labels: {{{labels}}}\n")[0].hint


def test_a_damaged_stored_job_is_refused_and_a_shorter_one_takes_defaults() -> None:
    assert from_dict({"name": "a", "entrypoint": "x"}) == JobSpec(name="a", entrypoint="x")
    with pytest.raises(SpecError, match=r"stored job: future: there is no such key"):
        from_dict({"name": "a", "entrypoint": "x", "future": 1})
    with pytest.raises(SpecError, match=r"stored job: priority: expected a whole number"):
        from_dict({"name": "a", "entrypoint": "x", "priority": "high"})
