"""docs/job-yaml.md: every key has its true default, and every example is a job."""

import re
from pathlib import Path

import pytest
import yaml

from orchestrator.spec.entrypoint import _COLD_PREFIXES
from orchestrator.spec.fields import STATED, Key, Record, default_form
from orchestrator.spec.job import parse_job
from orchestrator.spec.problems import SpecError
from orchestrator.spec.reader.reading import all_keys

DOCUMENT = (Path(__file__).parents[3] / "docs" / "job-yaml.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([a-z_.\[\]]+)` \| (.+?) \| (.+) \|$", re.MULTILINE)
BLOCKS = re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)


# The settings of `trainer` have a table of their own in docs/training.md.
KEYS = {path: key for path, (_, key) in all_keys().items() if not path.startswith("trainer.")}


def test_every_key_stands_in_the_document_once_and_no_other_does() -> None:
    assert sorted(key for key, _, _ in ROW.findall(DOCUMENT)) == sorted(KEYS)


def test_every_default_is_the_true_one() -> None:
    written = {key: default for key, default, _ in ROW.findall(DOCUMENT)}
    for path, key in KEYS.items():
        assert written[path] == expected(key) or yaml.safe_load(written[path].strip("`")) == default_form(key), path


def expected(key: Key) -> str:
    if key.default is STATED:
        return "required"
    return "–" if isinstance(key.default, Record) else "`...`"


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_example_is_a_job(block: str) -> None:
    assert parse_job(block).name in ("digits", "sft")


def test_the_messages_in_the_document_are_the_real_ones() -> None:
    shown = re.search(r"```text\n(.*?)```", DOCUMENT, re.DOTALL)
    assert shown is not None
    text = "name: a\nentrypoint: python t.py\nworkdir: .\n" + "\n" * 4 + "resources:\n  num_workers: two\n"
    with pytest.raises(SpecError) as caught:
        parse_job(text)
    assert str(caught.value) == shown[1].strip()


def test_the_variables_that_mean_a_cold_start_are_listed() -> None:
    assert all(f"`{prefix}`" in DOCUMENT for prefix in _COLD_PREFIXES)
