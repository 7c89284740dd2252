"""Keeps Ray from importing other libraries only to be able to copy their objects.

At the first value that a process of Ray's sends or receives, Ray imports pydantic, starlette, numpy and pyarrow: 0.14 s of
every start, and tens of MiB of every actor. What orch sends are its own dataclasses. The name used here is internal to
Ray: where it is gone, actors merely start slower. ``tests/integration/test_ray_internals.py`` tells when a new Ray breaks it.
"""

from __future__ import annotations

from typing import Any


def forgo_foreign_serializers() -> bool:
    """To be called before the process sends its first value; False when this Ray has no such step."""
    try:
        from ray.util import serialization_addons
    except ImportError:
        return False
    if not hasattr(serialization_addons, "apply"):
        return False
    serialization_addons.apply = _register_nothing
    return True


def _register_nothing(_context: Any) -> None:
    """In the place of ``ray.util.serialization_addons.apply``."""
