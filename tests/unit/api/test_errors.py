"""Every error says what happened and what to do, and reaches the client unchanged."""

from __future__ import annotations

import json

import pytest

from orchestrator.api.errors import (
    ERRORS,
    InvalidSpecError,
    OrchError,
    Problem,
    error_from_json,
    invalid_spec,
)
from orchestrator.spec import problems as spec_problems

EXIT_CODES = {2, 3, 4, 5, 7, 70}


def every_error() -> list[type[OrchError]]:
    found = [OrchError]
    for cls in found:
        found.extend(cls.__subclasses__())
    return found


@pytest.mark.parametrize("cls", every_error())
def test_each_error_is_documented_and_mapped(cls: type[OrchError]) -> None:
    assert cls.__doc__ is not None
    assert len(cls.__doc__.split(". ")) >= 2 or cls is OrchError or ";" in cls.__doc__, "what happened, what to do next"
    assert 400 <= cls.http_status < 600
    assert cls.exit_code in EXIT_CODES


@pytest.mark.parametrize("cls", list(ERRORS.values()))
def test_an_error_is_the_same_on_the_other_side(cls: type[OrchError]) -> None:
    problem = Problem(message="is wrong", path="resources.gpu", line=3, column=7, hint="write 1", source="job.yaml")
    sent = cls("it broke", hint="mend it", problems=[problem])
    got = error_from_json(json.loads(json.dumps(sent.to_json())))
    assert type(got) is cls
    assert (got.message, got.hint, got.problems) == ("it broke", "mend it", (problem,))


def test_a_code_of_a_newer_daemon_keeps_its_words() -> None:
    got = error_from_json({"code": "flux_capacitor", "message": "too slow", "hint": "drive faster", "problems": None})
    assert type(got) is OrchError
    assert (got.message, got.hint, got.problems) == ("too slow", "drive faster", ())


def test_a_document_without_words_still_becomes_an_error() -> None:
    assert error_from_json({}).message == "the daemon refused"


def test_problems_are_rendered_like_a_compiler_does() -> None:
    problem = Problem(message="must be a number", path="a.b", line=3, column=7, hint="write 1", source="job.yaml")
    assert problem.render() == "job.yaml:3:7: a.b: must be a number (write 1)"
    assert Problem(message="is empty").render() == "is empty"
    assert Problem(message="x", line=2).render() == "2: x"


def test_what_spec_found_becomes_the_api_error() -> None:
    found = spec_problems.SpecError(
        [
            spec_problems.Problem(line=2, column=1, path="gpus", message="unknown", hint="gpu", source="job.yaml"),
            spec_problems.Problem(line=0, column=0, path="name", message="is missing", source="job.yaml"),
        ]
    )
    error = invalid_spec(found)
    assert isinstance(error, InvalidSpecError)
    assert error.message == "job.yaml has 2 errors"
    assert error.problems[0] == Problem("unknown", "gpus", 2, 1, "gpu", "job.yaml")
    assert error.problems[1].line is None
