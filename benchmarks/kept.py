"""Results of the parts of a long benchmark, kept in a file from one call to the next."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


def results(parts: Mapping[str, Callable[[], Any]], keep: Path | None, seconds: float) -> dict[str, Any]:
    """Return the parts' results (JSON-ready), in their order: those in ``keep``, and further ones, added to it until ``seconds`` are over."""
    done = _kept(keep)
    due = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(keep.open("a", encoding="utf-8")) if keep is not None else None
        for key, make in parts.items():
            if key in done:
                continue
            if time.monotonic() >= due:
                break
            done[key] = make()
            if file is not None:
                file.write(json.dumps({"key": key, "result": done[key]}) + "\n")
                file.flush()
    return {key: done[key] for key in parts if key in done}


def _kept(path: Path | None) -> dict[str, Any]:
    """Return the results of earlier calls; the last line may be cut off."""
    if path is None or not path.exists():
        return {}
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            found[row["key"]] = row["result"]
    return found
