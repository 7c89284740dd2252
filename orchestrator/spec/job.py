"""job.yaml: text becomes a `JobSpec`, or everything that is wrong with it at once.

The package's front door: the model's classes, the errors, and the functions that read, store and describe a spec.
Pure; reading the file itself is `spec.source`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, cast

from orchestrator.spec.checks import NOT_YET, Finding, cross_checks, not_yet
from orchestrator.spec.document import ListNode, MapNode, Mark, Node, compose, kind_of
from orchestrator.spec.grammar import JOB
from orchestrator.spec.model import (
    Backoff,
    CheckpointSpec,
    Dependency,
    ElasticWorkers,
    ExitCodes,
    HealthSpec,
    JobSpec,
    JsonValue,
    LogPolicy,
    MatrixSpec,
    MaxRestarts,
    NotifySpec,
    ProgressSpec,
    ResourcesSpec,
    RetrySpec,
    RuntimeEnvSpec,
    TelemetrySpec,
    WorkerResources,
)
from orchestrator.spec.overrides import apply_overrides
from orchestrator.spec.problems import BadValueError, Path, Problem, SpecError, dotted
from orchestrator.spec.records import report
from orchestrator.spec.shapes import is_null, plain_node
from orchestrator.spec.template import init_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = [
    "NOT_YET",
    "Backoff",
    "CheckpointSpec",
    "Dependency",
    "ElasticWorkers",
    "ExitCodes",
    "HealthSpec",
    "JobSpec",
    "JsonValue",
    "LogPolicy",
    "MatrixSpec",
    "MaxRestarts",
    "NotifySpec",
    "Problem",
    "ProgressSpec",
    "ResourcesSpec",
    "RetrySpec",
    "RuntimeEnvSpec",
    "SpecError",
    "TelemetrySpec",
    "WorkerResources",
    "from_dict",
    "init_text",
    "job_schema",
    "parse_job",
    "to_dict",
]


def parse_job(
    text: str,
    *,
    source: str = "job.yaml",
    overrides: Sequence[str] = (),
    rules: Sequence[Callable[[JobSpec], Iterable[Finding]]] = (),
    refused: Mapping[str, str] = NOT_YET,
) -> JobSpec:
    """Read a job file. `source` names it in messages; `overrides` are the arguments of `--set`, such as `a.b=c`.

    `rules` find what else is wrong: those of packages that this one knows nothing of. `refused` are the keys whose
    feature is not built yet.

    Raises:
        SpecError: with every problem, each with its line and column, in the order of the file.

    """
    problems: list[Problem] = []
    root = _root(compose(text, source=source, problems=problems), source, overrides, problems)
    root = apply_overrides(root, overrides, problems)
    spec = JOB.read(root, (), problems)
    findings = [*cross_checks(spec), *not_yet(to_dict(spec), _defaults(), refused)]
    findings += [finding for rule in rules for finding in rule(spec)]
    seen = {problem.path for problem in problems}
    problems += [
        _placed(finding, root)
        for finding in findings
        if not any(_spoiled(path, seen) for path in (finding.path, *finding.others))
    ]
    if problems:
        raise SpecError(_in_order(problems, source))
    return spec


def to_dict(spec: JobSpec) -> dict[str, JsonValue]:
    """Give the canonical JSON form, with every key. `from_dict` of it is the same spec, in this and later versions."""
    return cast("dict[str, JsonValue]", JOB.write(spec))


def from_dict(data: Mapping[str, JsonValue]) -> JobSpec:
    """Read back what `to_dict` gave. Keys that are missing take their defaults.

    Rules between keys and NOT_YET are not applied again: what was accepted once stays readable.

    Raises:
        SpecError: the dictionary is damaged, or from a newer version.

    """
    problems: list[Problem] = []
    try:
        spec = JOB.read(plain_node(dict(data), "stored job"), (), problems)
    except BadValueError as error:  # pragma: no cover - a dictionary is always a mapping
        report(error, plain_node(None, "stored job"), (), problems)
        raise SpecError(problems) from error
    if problems:
        raise SpecError(problems)
    return spec


def job_schema() -> dict[str, Any]:
    """Give the JSON Schema (2020-12) of job.yaml, for editors. It takes all that `parse_job` takes, and some more."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "job.yaml",
        "description": "A training job for orch.",
        **JOB.schema(),
    }


@cache
def _defaults() -> dict[str, JsonValue]:
    return to_dict(JobSpec(name="job", entrypoint="true"))


def _root(node: Node | None, source: str, overrides: Sequence[str], problems: list[Problem]) -> MapNode:
    """Make sure that the top of the file is a mapping."""
    if isinstance(node, MapNode):
        return node
    mark = Mark(source=source, line=1, column=1) if node is None else node.mark
    if node is None or is_null(node):
        if not overrides:
            error = BadValueError("the file is empty", "`orch init SCRIPT` writes one")
            problems.append(_problem(error, mark, ()))
            raise SpecError(problems)
        return MapNode(entries=(), mark=mark)
    error = BadValueError(
        f"expected keys such as name: and entrypoint:, got {kind_of(node)}", "write `key: value` lines"
    )
    problems.append(_problem(error, mark, ()))
    raise SpecError(problems)


def _problem(error: BadValueError, mark: Mark, path: Path) -> Problem:
    return Problem(
        line=mark.line,
        column=mark.column,
        path=dotted(path),
        message=error.message,
        hint=error.hint,
        source=mark.source,
    )


def _placed(finding: Finding, root: Node) -> Problem:
    """Point at the value that a finding is about, or at the nearest one above that is written out."""
    node = root
    for step in finding.path:
        below: Node | None = None
        if isinstance(node, MapNode) and isinstance(step, str):
            below = node.get(step)
        elif isinstance(node, ListNode) and isinstance(step, int) and step < len(node.items):
            below = node.items[step]
        if below is None:
            break
        node = below
    return _problem(BadValueError(finding.message, finding.hint), node.mark, finding.path)


def _spoiled(path: Path, seen: set[str]) -> bool:
    """Whether the value, a part of it, or the list that holds it is wrong already: then a rule about it says nothing."""
    whole = next((path[:i] for i, step in enumerate(path) if isinstance(step, int)), path)
    name = dotted(whole)
    below = (f"{name}.", f"{name}[")
    return any(other == name or other.startswith(below) or name.startswith(f"{other}.") for other in seen if other)


def _in_order(problems: Sequence[Problem], source: str) -> list[Problem]:
    return sorted(problems, key=lambda problem: (problem.source != source, problem.line, problem.column))
