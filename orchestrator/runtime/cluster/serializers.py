"""Keeps Ray from importing other libraries that it needs only to copy their objects.

Before a Ray process sends or receives its first value, Ray imports pydantic, starlette, numpy and pyarrow: 0.14 s of
every start and tens of MiB of every actor. orch sends only its own dataclasses. The name used here is internal to Ray:
without it, actors merely start slower. ``tests/integration/test_ray_internals.py`` fails when a new Ray breaks it.
"""

from __future__ import annotations

from typing import Any


def skip_foreign_serializers() -> bool:
    """Skip the foreign serializers. Call before the process sends its first value; False when this Ray has no such step."""
    try:
        from ray.util import serialization_addons
    except ImportError:
        return False
    if not hasattr(serialization_addons, "apply"):
        return False
    serialization_addons.apply = _register_nothing
    return True


def _register_nothing(_context: Any) -> None:
    """Replacement for ``ray.util.serialization_addons.apply`` that registers nothing."""
