"""The JSON Schema of job.yaml as a file of the wheel: `orch schema` prints it without loading pydantic or the model.

`python -m orchestrator.spec.reader.schema_file` writes it anew in a checkout, after a change of the model; a test keeps it current.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orchestrator.data

FILE = Path(orchestrator.data.__file__).with_name("job.schema.json")


def schema_text() -> str:
    """Return the schema as the installed file has it, one JSON document."""
    return FILE.read_text(encoding="utf-8")


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of job.yaml, for editors. It accepts all that `parse_job` accepts, and some more."""
    from orchestrator.spec.reader.reading import schema

    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema(),
        "title": "job.yaml",
        "description": "A training job for orch.",
    }


def current_text() -> str:
    """Return the schema that the model makes."""
    return json.dumps(job_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(current_text(), encoding="utf-8")
