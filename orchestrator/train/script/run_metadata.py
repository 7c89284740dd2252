"""Labels of a run for `orch record`: epoch, batch and phase, in a small JSON file that is replaced during the run.

`orch record -- COMMAND` names the file in ORCH_TRAINING_METADATA; rank 0 writes it. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings

VARIABLE = "ORCH_TRAINING_METADATA"
WRITE_EVERY_SECONDS = 0.1
"""A recording has a row a second by default; changes of epoch and phase are written at once."""


class RunMetadata:
    """The file at `path`. Omitted values keep their last value."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._draft = f"{path}.{os.getpid()}.new"
        self._known: dict[str, float | int | str] = {}
        self._write_at = 0.0
        self._works = True

    def note(self, *, epoch: float | None, step: int | None, phase: str | None) -> None:
        """Record values, and write when due. Never raises: a full disk costs the recording only its labels."""
        known = self._known
        changed = (epoch is not None and known.get("epoch") != epoch) or (
            phase is not None and known.get("phase") != phase
        )
        for name, value in (("epoch", epoch), ("batch", step), ("phase", phase)):
            if value is not None:
                known[name] = value
        now = time.monotonic()
        if self._works and (changed or now >= self._write_at):
            self._write_at = now + WRITE_EVERY_SECONDS
            self._write()

    def _write(self) -> None:
        try:
            with open(self._draft, "w", encoding="utf-8") as file:  # noqa: PTH123  (half the time of Path's)
                file.write(json.dumps(self._known))
            os.replace(self._draft, self._path)  # noqa: PTH105 - strings: done at every report
        except OSError as error:
            self._works = False
            message = f"{VARIABLE}: {self._path} cannot be written ({error}); the recording lacks epoch and phase"
            with contextlib.suppress(RuntimeWarning):  # where warnings are errors
                warnings.warn(message, RuntimeWarning, stacklevel=5)
