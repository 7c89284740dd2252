"""MLflow: a run for each job, found again by its tag; in a SQLite file, or at MLFLOW_TRACKING_URI."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from orchestrator.analysis.trackers.names import PROJECT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.analysis.trackers.journal import Point
    from orchestrator.analysis.trackers.process import RunFacts

TAG: Final = "orch.job_id"
MAX_AT_ONCE: Final = 500
MAX_PARAMS: Final = 90
MAX_PARAM_CHARS: Final = 500
_ENDS: Final = {"SUCCEEDED": "FINISHED", "CANCELLED": "KILLED"}


class MlflowRun:
    """Writes through the client alone, so that nothing depends on an active run of this process."""

    def __init__(self, facts: RunFacts) -> None:
        folder = facts.folder / "mlflow"
        folder.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db"
        # Without a URI of its own the registry is searched at the tracking URI, which may have none.
        registry = None if os.environ.get("MLFLOW_REGISTRY_URI") or not uri.startswith("sqlite:") else folder.as_uri()
        self._client = MlflowClient(tracking_uri=uri, registry_uri=registry)
        artifacts = (folder / "artifacts").as_uri() if uri.startswith("sqlite:") else None
        self._experiment = self._experiment_id(os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT, artifacts)
        self._run = self._run_id(facts)
        self.facts = {"run": self._run}
        self.where = f"{uri.partition('?')[0]}, run {self._run}" if "@" not in uri else f"run {self._run}"

    def _experiment_id(self, name: str, artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name, artifact_location=artifacts))
        except Exception:  # another job's process has made it just now
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)

    def _run_id(self, facts: RunFacts) -> str:
        runs = self._client.search_runs([self._experiment], filter_string=f"tags.`{TAG}` = '{facts.job_id}'")
        if runs:
            self._client.update_run(runs[0].info.run_id, status="RUNNING")
            return str(runs[0].info.run_id)
        tags = {TAG: facts.job_id} | ({"orch.group": facts.group} if facts.group else {})
        tags |= dict(tag.partition("=")[::2] for tag in facts.tags)
        run = str(self._client.create_run(self._experiment, tags=tags, run_name=facts.job_id).info.run_id)
        params = [Param(k[:250], str(v)[:MAX_PARAM_CHARS]) for k, v in list(facts.config.items())[:MAX_PARAMS]]
        self._client.log_batch(run, params=params)
        return run

    def missing(self, points: Sequence[Point]) -> Sequence[Point]:
        """Return the points whose time and step are not in the run's history."""
        known: dict[str, set[tuple[int, int]]] = {}
        found = []
        for point in points:
            name = next(iter(point.values), None)
            # A point is written in one request; a file store writes its names in order, so the last is checked.
            name = list(point.values)[-1] if name is not None else None
            if name is None:
                continue
            if name not in known:
                history = self._client.get_metric_history(self._run, name)
                known[name] = {(one.timestamp, one.step) for one in history}
            if (round(point.at * 1000), point.step) not in known[name]:
                found.append(point)
        return found

    def write(self, points: Sequence[Point]) -> None:
        """Send the points, several in one request."""
        metrics: list[Metric] = []
        for point in points:
            at = round(point.at * 1000)
            metrics += [Metric(name[:250], value, at, point.step) for name, value in point.values.items()]
        for start in range(0, len(metrics), MAX_AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[start : start + MAX_AT_ONCE])

    def kept(self) -> int | None:
        """Return None: every written point is kept."""
        return None

    def close(self, outcome: str) -> None:
        """Set the run's status to how the job ended."""
        self._client.log_batch(self._run, tags=[RunTag("orch.state", outcome)])
        self._client.set_terminated(self._run, status=_ENDS.get(outcome, "FAILED"))
