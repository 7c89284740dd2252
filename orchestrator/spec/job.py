"""job.yaml: converts text to a `JobSpec`, or reports everything that is wrong with it.

The package's interface: the model's classes, the errors, and the functions that read, store and describe a spec.
Pure; reading the file itself is `spec.source`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.spec.fields import JsonValue, MapNode, Mark, Node, ScalarNode, is_null, kind_of, plain_node
from orchestrator.spec.matrix import (
    Combination,
    combinations,
    filled,
    matrix_faults,
    objectives_of,
    parameter_names,
    template_faults,
    trials_to_check,
    unit_name,
    used_parameters,
)
from orchestrator.spec.model import (
    AutoWorkers,
    Backoff,
    CheckpointSpec,
    Dependency,
    ElasticWorkers,
    ExitCodes,
    HealthSpec,
    JobSpec,
    LogPolicy,
    MatrixSpec,
    MaxRestarts,
    NotifySpec,
    ProgressSpec,
    ResourcesSpec,
    RetrySpec,
    RuntimeEnvSpec,
    TelemetrySpec,
    WorkerAdvice,
    WorkerResources,
)
from orchestrator.spec.problems import BadValueError, Finding, Path, Problem, SpecError, dotted
from orchestrator.spec.reader.checks import cross_checks
from orchestrator.spec.reader.document import (
    Passed,
    PassRequest,
    apply_overrides,
    compose,
    select,
    split_request,
    with_variables,
)
from orchestrator.spec.reader.reading import adapter, job_schema, nearest_mark, problem_at, read_spec, to_dict
from orchestrator.spec.reader.template import init_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from orchestrator.spec.model import MatrixValue

    Rules = Sequence[Callable[[JobSpec], Iterable[Finding]]]

__all__ = [
    "AutoWorkers",
    "Backoff",
    "CheckpointSpec",
    "Dependency",
    "ElasticWorkers",
    "ExitCodes",
    "HealthSpec",
    "JobFile",
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
    "WorkerAdvice",
    "WorkerResources",
    "change_spec",
    "from_dict",
    "init_text",
    "job_schema",
    "parse_job",
    "parse_jobs",
    "parse_trial",
    "passed_variables",
    "prepare",
    "spec_yaml",
    "to_dict",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """The jobs of a job file: one, or with `matrix` one for each combination, in order.

    `name` is the name of the whole matrix. The specs are those of the single jobs, without a matrix or placeholders.
    `unset` are the entries of `env: {pass: [...]}` that match no variable.
    """

    name: str
    matrix: MatrixSpec | None
    jobs: tuple[tuple[Combination | None, JobSpec], ...]
    unset: tuple[str, ...] = ()


def prepare() -> None:
    """Create pydantic's reader, which takes some 0.1 s, before there is a file to read."""
    adapter()


def parse_job(
    text: str,
    *,
    source: str = "job.yaml",
    overrides: Sequence[str] = (),
    rules: Rules = (),
    environ: Mapping[str, str] | None = None,
) -> JobSpec:
    """Read a job file. `source` names it in messages; `overrides` are the arguments of `--set`, such as `a.b=c`.

    `rules` find the errors that other packages define.
    `environ` has the variables that `env: {pass: [...]}` may take.

    Raises:
        SpecError: with every problem, each with its line and column, in the order of the file.

    """
    problems: list[Problem] = []
    root, request = _tree(text, source, overrides, problems)
    root = with_variables(root, request, _passed(request, environ or {}, problems).values)
    spec = _checked(root, problems, rules)
    if problems:
        raise SpecError(_in_order(problems, source))
    return spec


def passed_variables(text: str, *, source: str, overrides: Sequence[str], environ: Mapping[str, str]) -> Passed:
    """Return the variables of an environment that `env: {pass: [...]}` takes; none for a file with other errors.

    Raises:
        SpecError: there are too many variables, or they are too long.

    """
    problems: list[Problem] = []
    try:
        _, request = _tree(text, source, overrides, problems)
    except SpecError:
        return Passed()
    if problems:
        return Passed()
    passed = _passed(request, environ, problems)
    if problems:
        raise SpecError(problems)
    return passed


def _passed(request: PassRequest, environ: Mapping[str, str], problems: list[Problem]) -> Passed:
    try:
        return select(request, environ)
    except BadValueError as error:
        problems.append(problem_at(error, request.mark, ("env", "pass")))
        return Passed()


def _tree(text: str, source: str, overrides: Sequence[str], problems: list[Problem]) -> tuple[MapNode, PassRequest]:
    """Return the file's tree with its overrides, and its request for variables, which is not part of the tree."""
    root = _root(compose(text, source=source, problems=problems), source, overrides, problems)
    return split_request(apply_overrides(root, overrides, problems), problems)


def parse_jobs(
    text: str,
    *,
    source: str = "job.yaml",
    overrides: Sequence[str] = (),
    rules: Rules = (),
    environ: Mapping[str, str] | None = None,
) -> JobFile:
    """Read a job file that may have a matrix; the arguments are those of `parse_job`.

    Raises:
        SpecError: with every problem; one that several combinations have is reported once.

    """
    problems: list[Problem] = []
    root, request = _tree(text, source, overrides, problems)
    values = _passed(request, environ or {}, problems).values

    def checked(tree: MapNode, found: list[Problem]) -> JobSpec:
        # Placeholders in a passed value stay plain text: values are added after the file's placeholders are filled.
        return _checked(with_variables(tree, request, values), found, rules)

    if is_null(root.get("matrix")) or root.get("matrix") is None:
        problems += [problem_at(error, scalar.mark, path) for path, scalar, error in template_faults(root, ())]
        spec = checked(root, problems)
        found = JobFile(name=spec.name, matrix=None, jobs=((None, spec),))
    else:
        found = _expanded(root, problems, checked)
    if problems:
        raise SpecError(_in_order(problems, source))
    return replace(found, unset=request.idle(values))


def _expanded(root: MapNode, problems: list[Problem], checked: Callable[[MapNode, list[Problem]], JobSpec]) -> JobFile:
    matrix = _matrix_of(root, problems)
    name = root.get("name")
    template = name.text if isinstance(name, ScalarNode) else ""
    wanted = combinations(matrix) if matrix is not None and not problems else ()

    def spec_of(values: Mapping[str, MatrixValue]) -> JobSpec:
        seen = {(problem.line, problem.column, problem.path, problem.message) for problem in problems}
        own: list[Problem] = []
        spec = checked(filled(root, values), own)
        problems.extend(p for p in own if (p.line, p.column, p.path, p.message) not in seen)
        return spec

    jobs = [(combination, spec_of(combination.values)) for combination in wanted]
    if matrix is not None and matrix.strategy == "optuna" and jobs:
        for values in trials_to_check(matrix):
            spec_of(values)
        if not objectives_of(matrix, jobs[0][1].checkpoint):
            missing = Finding(
                path=("matrix",), message="the search has no objective", hint="add objectives: {loss: min}"
            )
            problems.append(_placed(missing, root))
    return JobFile(name=unit_name(template), matrix=matrix, jobs=tuple(jobs))


def parse_trial(
    text: str,
    values: Mapping[str, MatrixValue],
    *,
    source: str = "job.yaml",
    overrides: Sequence[str] = (),
    rules: Rules = (),
    environ: Mapping[str, str] | None = None,
) -> JobSpec:
    """Read the job of a later trial of a search, with these values, from a file that `parse_jobs` accepted. Raises SpecError."""
    problems: list[Problem] = []
    root, request = _tree(text, source, overrides, problems)
    passed = _passed(request, environ or {}, problems).values
    spec = _checked(with_variables(filled(root, values), request, passed), problems, rules)
    if problems:
        raise SpecError(_in_order(problems, source))
    return spec


def _matrix_of(root: MapNode, problems: list[Problem]) -> MatrixSpec | None:
    """Return the file's matrix; errors in it, and in the use of its values, are added to ``problems``."""
    alone = MapNode(entries=tuple((key, value) for key, value in root.entries if key.text == "matrix"), mark=root.mark)
    before = len(problems)
    stub = plain_node({"name": "job", "entrypoint": "true"}, root.mark.source)
    assert isinstance(stub, MapNode)
    matrix = read_spec(MapNode(entries=(*stub.entries, *alone.entries), mark=root.mark), problems).matrix
    if matrix is None or len(problems) > before:
        return matrix
    problems += [_placed(finding, root) for finding in _matrix_findings(matrix)]
    rest = MapNode(entries=tuple((k, v) for k, v in root.entries if k.text != "matrix"), mark=root.mark)
    parameters = parameter_names(matrix)
    problems += [problem_at(error, scalar.mark, path) for path, scalar, error in template_faults(rest, parameters)]
    for parameter in sorted(set(parameters) - used_parameters(rest)):
        hint = f"write ${{matrix.{parameter}}} in entrypoint, env, name or another key"
        error = BadValueError(f"{parameter} is used nowhere, so it would change nothing", hint)
        problems.append(problem_at(error, nearest_mark(root, ("matrix", "parameters", parameter)), ("matrix",)))
    return matrix


def _matrix_findings(matrix: MatrixSpec) -> Iterator[Finding]:
    for path, message, hint in matrix_faults(matrix):
        yield Finding(path=path, message=message, hint=hint)


def _checked(root: MapNode, problems: list[Problem], rules: Rules) -> JobSpec:
    """Return the spec of a tree; every error in it is added to ``problems``."""
    before = len(problems)
    spec = read_spec(root, problems)
    findings = [*cross_checks(spec), *(finding for rule in rules for finding in rule(spec))]
    seen = {problem.path for problem in problems[before:]}
    problems += [
        _placed(finding, root)
        for finding in findings
        if not any(_spoiled(path, seen) for path in (finding.path, *finding.others))
    ]
    return spec


def from_dict(data: Mapping[str, JsonValue]) -> JobSpec:
    """Convert what `to_dict` returned. Missing keys take their defaults.

    Rules between keys are not applied again: what was accepted once stays readable.

    Raises:
        SpecError: the dictionary is damaged, or from a newer version.

    """
    problems: list[Problem] = []
    root = plain_node(dict(data), "stored job")
    assert isinstance(root, MapNode)
    spec = read_spec(root, problems, stored=True)
    if problems:
        raise SpecError(problems)
    return spec


def change_spec(spec: JobSpec, overrides: Sequence[str], *, rules: Rules = ()) -> JobSpec:
    """Return the spec changed by `--set` arguments. Raises SpecError with every error in them."""
    problems: list[Problem] = []
    root = plain_node(to_dict(spec), "the job's spec")
    assert isinstance(root, MapNode)
    root, request = split_request(apply_overrides(root, overrides, problems), problems)
    changed = _checked(root, problems, rules)
    if request.patterns:
        hint = "set the variable: --set env.NAME=value"
        where = "env.pass"
        problems.append(
            Problem(line=0, column=0, path=where, message="is resolved when a file is submitted", hint=hint)
        )
    if changed.matrix is not None:
        problems.append(
            Problem(line=0, column=0, path="matrix", message="one job has no matrix", hint="submit the file")
        )
    if problems:
        raise SpecError(problems)
    return changed


def spec_yaml(spec: Mapping[str, JsonValue]) -> str:
    """Return a job.yaml that is equivalent to the canonical form ``spec``, with every key written out."""
    import yaml

    text: str = yaml.safe_dump(dict(spec), sort_keys=False, allow_unicode=True, width=110)
    return text


def _root(node: Node | None, source: str, overrides: Sequence[str], problems: list[Problem]) -> MapNode:
    """Require a mapping at the top of the file."""
    if isinstance(node, MapNode):
        return node
    mark = Mark(source=source, line=1, column=1) if node is None else node.mark
    if node is None or is_null(node):
        if not overrides:
            error = BadValueError("the file is empty", "`orch init SCRIPT` writes one")
            problems.append(problem_at(error, mark, ()))
            raise SpecError(problems)
        return MapNode(entries=(), mark=mark)
    error = BadValueError(
        f"expected keys such as name: and entrypoint:, got {kind_of(node)}", "write `key: value` lines"
    )
    problems.append(problem_at(error, mark, ()))
    raise SpecError(problems)


def _placed(finding: Finding, root: Node) -> Problem:
    """Return a finding as a problem at its value, or at the nearest value above it that is written out."""
    return problem_at(BadValueError(finding.message, finding.hint), nearest_mark(root, finding.path), finding.path)


def _spoiled(path: Path, seen: set[str]) -> bool:
    """Whether the value, a part of it, or the list that holds it is already invalid: rules about it are skipped."""
    whole = next((path[:i] for i, step in enumerate(path) if isinstance(step, int)), path)
    name = dotted(whole)
    below = (f"{name}.", f"{name}[")
    return any(other == name or other.startswith(below) or name.startswith(f"{other}.") for other in seen if other)


def _in_order(problems: Sequence[Problem], source: str) -> list[Problem]:
    return sorted(problems, key=lambda problem: (problem.source != source, problem.line, problem.column))
