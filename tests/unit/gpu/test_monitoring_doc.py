"""docs/monitoring.md agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.catalogue import METRICS, with_table
from orchestrator.gpu.load import BANDS
from orchestrator.gpu.recording.rows import COLUMNS

DOCUMENT = Path(__file__).parents[3] / "docs" / "monitoring.md"


@pytest.fixture(scope="module")
def text() -> str:
    return DOCUMENT.read_text(encoding="utf-8")


def test_the_table_of_metrics_is_that_of_the_catalogue(text: str) -> None:
    assert with_table(text) == text, "run: python -m orchestrator.catalogue docs/monitoring.md"
    assert text.count("| `orch_") == len(METRICS)


def test_every_metric_that_is_named_exists(text: str) -> None:
    known = {metric.name for metric in METRICS}
    assert set(re.findall(r"\borch_[a-z0-9_]+", text)) <= known


def test_columns_modules_and_bands_are_the_codes_own(text: str) -> None:
    assert f"`{' '.join(COLUMNS)}`" in text
    for dotted in set(re.findall(r"orchestrator(?:\.\w+)+", text)):
        parts = dotted.split(".")
        root = DOCUMENT.parents[1]
        assert any((root / Path(*parts[:end])).with_suffix(".py").exists() for end in (len(parts), len(parts) - 1)), (
            dotted
        )
    for limit, name in BANDS:
        assert f"| below {100 * limit:.0f} % | {name} |" in text
