"""Features that are not built yet: refused by name while they are in the table, and accepted otherwise."""

import pytest

from orchestrator.spec.job import JobSpec, SpecError, parse_job
from orchestrator.spec.reader.checks import NOT_YET
from orchestrator.spec.reader.reading import all_keys

HEAD = "name: digits\nentrypoint: python train.py\n"

EXAMPLES = {
    "resources.num_workers:range": "resources: {num_workers: {min: 1, max: 2}}",
    "resources.num_workers:auto": "resources: {num_workers: auto}",
    "depends_on": "depends_on: [{job: prepare}]",
    "matrix": "matrix: {parameters: {lr: [0.1]}}",
    "health.progress": "health: {progress: {pattern: 'step (\\d+)'}}",
    "checkpoint.storage_path:url": "checkpoint: {storage_path: s3://bucket/x}",
    "checkpoint.watch": "checkpoint: {watch: out/ckpt-*}",
    "trackers": "trackers: [wandb]",
    "report": "report: off",
    "trainer": "trainer: {precision: bf16}",
    "notify": "notify: [{url: https://example.org/x}]",
}
"""One value of each kind that was not built at first. Lines stay here after they are removed from the table."""


@pytest.mark.parametrize("entry", EXAMPLES)
def test_a_feature_is_refused_exactly_while_it_stands_in_the_table(entry: str) -> None:
    text = HEAD + EXAMPLES[entry]
    if entry not in NOT_YET:
        assert isinstance(parse_job(text), JobSpec)
        return
    with pytest.raises(SpecError) as caught:
        parse_job(text)
    (problem,) = caught.value.problems
    assert problem.path == entry.partition(":")[0]
    assert problem.message.startswith("not yet: ")
    assert problem.hint
    assert problem.line == 3


@pytest.mark.parametrize("entry", EXAMPLES)
def test_removing_its_line_is_all_it_takes(entry: str) -> None:
    with pytest.raises(SpecError, match=r"not yet: this \(wait\)"):
        parse_job(HEAD + EXAMPLES[entry], refused={entry: "this; wait"})
    assert isinstance(parse_job(HEAD + EXAMPLES[entry], refused={}), JobSpec)


def test_the_table_names_real_keys_known_forms_and_reasons() -> None:
    for entry, reason in NOT_YET.items():
        path, _, form = entry.partition(":")
        assert path in all_keys()
        assert form in ("", "range", "auto", "url")
        assert all(part.strip() for part in reason.split("; "))
        assert "; " in reason


def test_defaults_and_other_forms_of_the_same_key_are_fine() -> None:
    text = "resources: {num_workers: 4}\ndepends_on: []\nmatrix: null\nreport: on\ntrainer: {}\ntrackers: []\n"
    text += "checkpoint: {storage_path: /data, watch: null}\nhealth: {progress: null}\n"
    refused = dict.fromkeys(EXAMPLES, "this; wait")
    assert parse_job(HEAD + text, refused=refused).resources.num_workers == 4


def test_a_value_that_is_wrong_already_is_not_called_not_yet() -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(HEAD + "queue: [x]\n", refused={"queue": "queues; wait"})
    assert len(caught.value.problems) == 1


def test_an_unknown_form_in_the_table_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="unknown form 'green'"):
        parse_job(HEAD, refused={"queue:green": "queues; wait"})
