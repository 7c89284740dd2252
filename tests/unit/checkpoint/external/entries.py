"""Entries of a registry, as a scan makes them."""

from __future__ import annotations

from typing import Any

from orchestrator.checkpoint.external import script_files
from orchestrator.checkpoint.external.script_files import digests, facts_of


def entry_of(path: str, step: int, copy: str = "") -> dict[str, Any]:
    """Return the entry of the file at ``path`` as it is now; ``step`` is also its time of creation."""
    facts = facts_of(path)
    return {
        "facts": script_files.text(facts),
        "files": digests(path, facts),
        "created_at": float(step),
        "attempt": 1,
        "step": step,
        "why": "",
        "copy": copy,
    }
