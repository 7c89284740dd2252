"""The JSON Schema in the wheel is the one that the model makes."""

from __future__ import annotations

from orchestrator.spec.reader.schema_file import current_text, schema_text


def test_the_file_is_current() -> None:
    assert schema_text() == current_text(), "write it anew: python -m orchestrator.spec.reader.schema_file"
