"""Weights & Biases: one run for each job, by its id; offline where no key is known.

wandb's own process keeps points in memory, and writes them to the run's file every 15 seconds. Points therefore count as
delivered a minute after they were handed over. A process that is killed before that is followed by one that hands them over again:
a server that has them says so, and in the files of an offline run they are repeated under the same step, which is the same row.
"""

from __future__ import annotations

import netrc
import os
import time
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import wandb

from orchestrator.analysis.trackers.names import PROJECT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.analysis.trackers.journal import Point
    from orchestrator.analysis.trackers.process import RunFacts

DEFAULT_HOST: Final = "https://api.wandb.ai"
DELIVERED_SECONDS: Final = 60.0
"""Time after which points that were handed over count as delivered."""


def mode_of(environ: dict[str, str] | os._Environ[str]) -> str:
    """Return the mode that the job names; else online where there is a key, and offline without one."""
    named = environ.get("WANDB_MODE", "")
    if named:
        return named
    if environ.get("WANDB_API_KEY"):
        return "online"
    host = urlsplit(environ.get("WANDB_BASE_URL") or DEFAULT_HOST).hostname or ""
    try:
        known = netrc.netrc().authenticators(host)
    except (OSError, netrc.NetrcParseError):
        known = None
    return "online" if known is not None else "offline"


class WandbRun:
    """A run whose steps are the numbers of points, and whose charts are drawn over ``step``."""

    def __init__(self, facts: RunFacts) -> None:
        folder = facts.folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self._id = facts.job_id
        mode = mode_of(os.environ)
        quiet = {"console": "off", "x_disable_stats": True, "x_disable_meta": True, "disable_git": True, "silent": True}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=self._id,
            name=self._id,
            group=facts.group or None,
            tags=[tag[:64] for tag in facts.tags] or None,
            config=dict(facts.config),
            resume="allow",
            mode=mode,  # type: ignore[arg-type]  # as the user wrote it; wandb says what it takes
            dir=str(folder),
            settings=wandb.Settings(**quiet, save_code=False),
        )
        self._run.define_metric("*", step_metric="step")
        online = mode == "online"
        # For a run that the server resumes, it gives the next step.
        self._before = self._run.step - 1 if online else -1
        self._sent: list[tuple[float, int]] = []
        self._safe = self._before
        self.facts = {"project": str(self._run.project), "run": self._id, "mode": mode}
        self.where = self._run.url if online and self._run.url else f"wandb sync {folder}/wandb/*run-*-{self._id}"

    def missing(self, points: Sequence[Point]) -> Sequence[Point]:
        """Return the points after the newest one that the server has; all of them for an offline run."""
        return [point for point in points if point.number > self._before]

    def write(self, points: Sequence[Point]) -> None:
        """Hand the points to wandb's own process."""
        for point in points:
            self._run.log({**point.values, "step": point.step, "_timestamp": point.at}, step=point.number, commit=True)
        if points:
            self._sent.append((time.monotonic(), points[-1].number))

    def kept(self) -> int | None:
        """Return the newest point that was handed over a minute ago."""
        now = time.monotonic()
        while self._sent and now - self._sent[0][0] >= DELIVERED_SECONDS:
            self._safe = self._sent.pop(0)[1]
        return self._safe

    def close(self, outcome: str) -> None:
        """Finish the run; one that did not succeed is shown as failed."""
        self._run.summary["orch_state"] = outcome
        self._run.finish(exit_code=0 if outcome == "SUCCEEDED" else 1)
