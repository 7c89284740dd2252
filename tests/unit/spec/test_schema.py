"""The JSON Schema for editors: valid, complete, and in agreement with the parser about good and bad files."""

from typing import Any

import jsonschema
import pytest
import yaml

from orchestrator.spec.job import parse_job
from orchestrator.spec.reader.reading import all_keys, job_schema

HEAD = "name: digits\nentrypoint: python train.py\n"
GOOD = [
    "",
    "report: on",
    "env:",
    "env: {A: 1, B: text, C: 1.5}",
    "resources: {num_workers: 8, resources_per_worker: {gpu: 0.5, memory: 64GiB, gpu_model: 4090}}",
    "resources: {num_workers: {min: 1, max: 4}}",
    "resources: {num_workers: auto}",
    "max_duration: 1h30m",
    "stop_duration: 90s",
    "checkpoint: {interval: 10m, storage_path: null}",
    "checkpoint: {interval: 100}",
    "retry: {max_restarts: {preemption: unlimited}, exit_codes: {retry: [75]}}",
    "health: {heartbeat_timeout: auto, progress: {pattern: '(x)'}, on_hang: null}",
    "matrix: {parameters: {lr: [0.1, x, true]}}",
    "trainer: {batch_size: 8, timeout: 90s, precision: null, device_ids: [0, 1], peak_flops: 1.0e+15, compile: on}",
]
BAD = [
    "workdir: .",
    "version: 2",
    "priority: 101",
    "priority: '5'",
    "name: Digits",
    "queue: [x]",
    "env: {A: true}",
    "env: {1A: x}",
    "env: {A: null}",
    "resources: {num_workers: 0}",
    "resources: {num_workers: two}",
    "resources: {num_workers: {min: 1}}",
    "resources: {placement_strategy: pack}",
    "resources: {resources_per_worker: {gpu: 100}}",
    "resources: {resources_per_worker: {memory: 8}}",
    "max_duration: soon",
    "stop_duration: -1",
    "stop_duration: 90",
    "retry: {exit_codes: {retry: [256]}}",
    "retry: {log_policies: [{pattern: x}]}",
    "checkpoint: {keep: 0}",
    "trackers: [wandb, wandb]",
    "notify: [{}]",
    "preemptible: maybe",
    "trainer: {batchsize: 8}",
    "trainer: {batch_size: 0}",
    "trainer: {precision: int4}",
    "trainer: {peak_flops: 0}",
    "trainer: {device_ids: []}",
]


def with_head(line: str) -> str:
    return line + "\nentrypoint: python train.py\n" if line.startswith("name:") else HEAD + line


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(job_schema())
    return jsonschema.Draft202012Validator(job_schema())


@pytest.mark.parametrize("line", GOOD)
def test_good_files_pass_both(line: str, validator: jsonschema.Draft202012Validator) -> None:
    parse_job(with_head(line))
    validator.validate(yaml.safe_load(with_head(line)))


@pytest.mark.parametrize("line", BAD)
def test_bad_files_fail_both(line: str, validator: jsonschema.Draft202012Validator) -> None:
    with pytest.raises(ValueError, match=r"job\.yaml:"):
        parse_job(with_head(line))
    assert not validator.is_valid(yaml.safe_load(with_head(line)))


def test_a_file_without_its_required_keys_fails(validator: jsonschema.Draft202012Validator) -> None:
    assert sorted(error.message for error in validator.iter_errors({})) == [
        "'entrypoint' is a required property",
        "'name' is a required property",
    ]


def test_every_key_has_a_description_and_its_default() -> None:
    def properties(schema: Any) -> Any:
        if isinstance(schema, list):
            for item in schema:
                yield from properties(item)
        elif isinstance(schema, dict):
            for key, value in schema.get("properties", {}).items():
                yield key, value, key in schema.get("required", [])
            for value in schema.values():
                yield from properties(value)

    found = list({id(value): (key, value, required) for key, value, required in properties(job_schema())}.values())
    assert len(found) == len(all_keys()) + 1  # env.pass, which is no key of a spec
    for key, value, required in found:
        assert value["description"], key
        assert ("default" in value) is not required, key
