"""The JSON Schema of job.yaml as a file of the wheel: `orch schema` prints it without loading pydantic or the model.

`python -m orchestrator.spec.reader.schema_file` rewrites it in a checkout after a change of the model; a test checks that it is current.
"""

from __future__ import annotations

import json
from pathlib import Path

import orchestrator.data

FILE = Path(orchestrator.data.__file__).with_name("job.schema.json")


def schema_text() -> str:
    """Return the schema as the installed file has it, one JSON document."""
    return FILE.read_text(encoding="utf-8")


def current_text() -> str:
    """Return the schema generated from the model."""
    from orchestrator.spec.reader.reading import job_schema

    return json.dumps(job_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(current_text(), encoding="utf-8")
