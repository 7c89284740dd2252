"""Properties of the reader over many inputs: it never breaks, loses nothing, and agrees with its schema."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from orchestrator.spec.entrypoint import Entrypoint, EntrypointError, parse_entrypoint
from orchestrator.spec.fields import Positive
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
from orchestrator.spec.problems import SpecError
from orchestrator.spec.reader.reading import job_schema, to_dict
from orchestrator.spec.reader.template import init_text
from orchestrator.spec.units import format_duration

VALIDATOR = jsonschema.Draft202012Validator(job_schema())

# A file cannot contain NUL and lone surrogates.
text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
words = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=12)
names = st.from_regex(r"[a-z](?:[-a-z0-9]{0,10}[a-z0-9])?", fullmatch=True)
variables = st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}X", fullmatch=True).filter(lambda name: not name.startswith("ORCH_"))
labels = st.from_regex(r"[A-Za-z0-9](?:[-A-Za-z0-9_./]{0,8}[A-Za-z0-9])?", fullmatch=True)
durations = st.timedeltas(min_value=timedelta(seconds=1), max_value=timedelta(days=3650))
integers = st.integers(-(10**17), 10**17)
floats = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | integers | floats | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
scalars = st.booleans() | integers | floats | text
globs = st.from_regex(r"[a-z]{1,5}(?:/[a-z*]{1,5}){0,3}", fullmatch=True)
quantities = st.integers(0, 640_000).map(lambda n: n / 10_000)


def tuples(values: st.SearchStrategy[Any], *, unique: bool = False) -> st.SearchStrategy[Any]:
    return st.lists(values, max_size=4, unique=unique).map(tuple)


workers = st.one_of(
    st.integers(1, 10_000),
    st.just("auto"),
    st.tuples(st.integers(1, 99), st.integers(100, 10_000)).map(lambda pair: ElasticWorkers(min=pair[0], max=pair[1])),
)
worker_resources = st.builds(
    WorkerResources,
    gpu=st.integers(1, 64).map(float) | st.integers(1, 9999).map(lambda n: n / 10_000),
    cpu=quantities,
    memory_bytes=st.none() | st.integers(1_000_000, 10**15),
    gpu_model=st.none() | words,
)
matrices = st.builds(
    MatrixSpec,
    parameters=st.dictionaries(
        variables, st.lists(scalars, min_size=1, max_size=3, unique_by=str).map(tuple), min_size=1, max_size=3
    ),
    include=st.just(()),  # each has to have a value for every parameter: tests/unit/spec/test_matrix.py
    exclude=st.just(()),
    max_concurrent=st.none() | st.integers(1, 100),
    fail_fast=st.booleans(),
)
retries = st.builds(
    RetrySpec,
    max_restarts=st.builds(
        MaxRestarts,
        user=st.integers(0, 99),
        infra=st.integers(0, 99),
        hang=st.integers(0, 99),
        preemption=st.none() | st.integers(0, 99),
    ),
    max_no_progress=st.integers(1, 99),
    backoff=st.tuples(durations, durations).map(lambda pair: Backoff(initial=min(pair), max=max(pair))),
    exit_codes=st.builds(ExitCodes, retry=tuples(st.integers(1, 255), unique=True)),
    log_policies=tuples(
        st.builds(
            LogPolicy,
            pattern=st.from_regex(r"[a-z ]{1,9}\.\*", fullmatch=True),
            action=st.sampled_from(["fail", "restart"]),
        )
    ),
)
healths = st.builds(
    HealthSpec,
    startup_timeout=durations,
    heartbeat_timeout=durations | st.just("auto"),
    progress=st.none() | st.builds(ProgressSpec, pattern=st.just(r"step (\d+)")),
    on_hang=st.sampled_from([None, "restart", "notify"]),
)
scores = st.just((None, None)) | st.tuples(words, st.sampled_from(["min", "max"]))
checkpoints = st.tuples(
    scores,
    st.builds(
        dict,
        storage_path=st.sampled_from([None, "/data/x", "s3://bucket/x"]),
        keep=st.integers(1, 99),
        interval=st.integers(1, 10**6) | durations | st.just("auto"),
        watch=st.none() | globs,
    ),
).map(lambda pair: CheckpointSpec(score_attribute=pair[0][0], score_order=pair[0][1], **pair[1]))
trainers = st.fixed_dictionaries(
    {},
    optional={
        "batch_size": st.integers(1, 10**6),
        "precision": st.sampled_from([None, "auto", "bf16"]),
        "timeout": durations.map(format_duration),
        "max_grad_norm": st.none() | st.floats(1e-9, 1e18, exclude_min=True).map(Positive().write),
        "device_ids": st.none() | st.lists(st.integers(0, 63), min_size=1, max_size=4, unique=True),
        "shuffle": st.booleans(),
    },
)
dependencies = st.builds(Dependency, job=names, on=st.sampled_from(["success", "failure", "any"]))
jobs = st.builds(
    JobSpec,
    name=names.map(lambda name: f"job-{name}"),
    entrypoint=st.sampled_from(["python train.py", "python -m pkg.mod --x 'a b'", "bash run.sh", "./x ${checkpoint}"]),
    working_dir=st.none() | words.filter(lambda word: "://" not in word),
    outputs=tuples(globs),
    env=st.dictionaries(variables.map(lambda name: f"E{name}"), text, max_size=3),
    secrets=tuples(variables.map(lambda name: f"S{name}"), unique=True),
    runtime_env=st.builds(RuntimeEnvSpec, pip=tuples(words), py_modules=tuples(words)),
    resources=st.builds(
        ResourcesSpec,
        num_workers=workers,
        resources_per_worker=worker_resources,
        placement_strategy=st.sampled_from(["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]),
    ),
    queue=names,
    priority=st.integers(0, 100),
    preemptible=st.booleans(),
    min_runtime=st.none() | durations,
    max_duration=st.none(),
    stop_duration=durations,
    depends_on=st.lists(dependencies, unique_by=lambda dependency: dependency.job, max_size=3).map(tuple),
    matrix=st.none() | matrices,
    retry=retries,
    health=healths,
    checkpoint=checkpoints,
    telemetry=st.builds(TelemetrySpec, rate=st.integers(1, 100_000).map(lambda n: n / 100), record=st.booleans()),
    trackers=tuples(st.sampled_from(["wandb", "trackio", "tensorboard", "mlflow"]), unique=True),
    report=st.booleans(),
    trainer=trainers,
    notify=tuples(st.builds(NotifySpec, url=st.just("https://example.org/x"), on=st.just(("FAILED", "SUCCEEDED")))),
    labels=st.dictionaries(labels, text, max_size=3),
)

thorough = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("number", ["1e18", "9.9e300", "123456789012345678", "100000000000000000", "1e-30"])
def test_a_number_above_0_of_any_size_survives_the_store_and_its_own_yaml(number: str) -> None:
    spec = parse_job(f"version: 1\nname: a\nentrypoint: python t.py\ntrainer: {{max_grad_norm: {number}}}\n")
    data = json.loads(json.dumps(to_dict(spec)))
    assert from_dict(data) == spec
    assert parse_job(yaml.dump(data, Dumper=Quoting)) == spec


@thorough
@given(jobs)
def test_a_spec_survives_the_store_and_its_own_yaml(spec: JobSpec) -> None:
    data = json.loads(json.dumps(to_dict(spec)))
    assert from_dict(data) == spec
    assert parse_job(yaml.dump(data, Dumper=Quoting)) == spec
    assert to_dict(from_dict(data)) == data


@thorough
@given(jobs)
def test_what_the_parser_takes_the_schema_takes(spec: JobSpec) -> None:
    written = yaml.dump(to_dict(spec), Dumper=Quoting)
    parse_job(written)
    VALIDATOR.validate(yaml.safe_load(written))


class Quoting(yaml.SafeDumper):
    """Dumper that quotes every text: PyYAML does not quote `1e3`, which YAML 1.2 and orch read as a number."""


Quoting.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def value_or_error(kind: type[Exception], call: Callable[[], Any]) -> Any:
    """Return the call's value, or its error if it is of this kind; any other error propagates."""
    try:
        return call()
    except kind as error:
        return error


def keys_and_values() -> st.SearchStrategy[str]:
    """Return a strategy for lines that look like a job file and are valid in parts."""
    keys = st.sampled_from(
        [
            "name",
            "entrypoint",
            "env",
            "resources",
            "retry",
            "health",
            "checkpoint",
            "matrix",
            "on",
            "workdir",
            "<<",
            "?",
        ]
    )
    values = st.sampled_from(
        [
            "x",
            "1",
            "no",
            "[a, b]",
            "{min: 1}",
            "&a {b: *a}",
            "!!set {}",
            "'",
            '"',
            "|",
            "- a",
            "*a",
            "~",
            "{num_workers: auto}",
        ]
    )
    return st.lists(st.tuples(keys | words, values | text), max_size=8).map(
        lambda pairs: "\n".join(f"{key}: {value}" for key, value in pairs)
    )


@settings(max_examples=120, deadline=None)
@given(
    st.text(max_size=200) | keys_and_values(), st.lists(st.text(max_size=30) | words.map("env={}".format), max_size=2)
)
@example("entrypoint: )\xad", [])
def test_any_text_is_a_job_or_a_list_of_problems(text: str, overrides: list[str]) -> None:
    spec = value_or_error(SpecError, lambda: parse_job(text, overrides=overrides))
    if isinstance(spec, SpecError):
        assert spec.problems
        assert all(line.isprintable() for line in str(spec).splitlines())
        assert all(problem.message for problem in spec.problems)
    else:
        assert from_dict(to_dict(spec)) == spec


@settings(max_examples=80, deadline=None)
@given(json_values)
def test_any_stored_value_is_a_job_or_a_list_of_problems(data: Any) -> None:
    stored = data if isinstance(data, dict) else {"trainer": data, "env": data, "retry": data}
    spec = value_or_error(SpecError, lambda: from_dict(stored))
    assert isinstance(spec, JobSpec) or spec.problems


@settings(max_examples=120, deadline=None)
@given(
    st.text(max_size=80)
    | st.lists(
        st.sampled_from(
            [
                "torchrun",
                "python",
                "-m",
                "torch.distributed.run",
                "accelerate",
                "launch",
                "srun",
                "mpirun",
                "-n",
                "4",
                "--",
                "train.py",
                "A=1",
                "|",
                "&&",
                "$X",
                "'a b'",
                "${checkpoint}",
                "ray",
                "job",
                "submit",
                "deepspeed",
                "--nnodes=1:4",
            ]
        ),
        max_size=8,
    ).map(" ".join)
)
def test_any_entry_point_is_read_or_refused_with_a_line_that_is_read(line: str) -> None:
    entrypoint = value_or_error(EntrypointError, lambda: parse_entrypoint(line))
    if isinstance(entrypoint, Entrypoint):
        assert entrypoint.argv
        return
    assert entrypoint.message
    assert entrypoint.hint
    if entrypoint.suggestion:
        assert isinstance(parse_entrypoint(entrypoint.suggestion), Entrypoint)


@settings(max_examples=80, deadline=None)
@given(st.text(min_size=1, max_size=40) | words.map("{}.py".format))
def test_a_template_for_any_script_is_a_job_or_refused(script: str) -> None:
    try:
        text = init_text(script)
    except EntrypointError:
        return
    assert parse_entrypoint(parse_job(text).entrypoint).argv[-1].endswith(script)
