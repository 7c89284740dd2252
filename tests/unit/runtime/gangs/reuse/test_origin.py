"""Gangs that may serve another job: those of the same shape with actors that keep nothing of a job."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.job.record import Job
from orchestrator.runtime.gangs.reuse.origin import Origin, Shape, is_spotless, shape_of
from orchestrator.spec.model import CheckpointSpec, InteractiveSpec, RuntimeEnvSpec
from tests.support.records import replace
from tests.unit.core.builders import after, changed, exited, gone, make_spec, pending, running


def job(**keys: Any) -> Job:
    return running(pending(make_spec(**{"workers": 1, "gpu": 0, **keys})))


def ended(found: Job, exit_code: int = 0) -> Job:
    """Return the job after every rank has ended with this code, and the attempt with them."""
    from orchestrator.core import events as ev

    found = after(found, exited(found, exit_code=exit_code), gone(found))
    return after(found, ev.AttemptSucceeded(job_id=found.id, at=20.0, attempt=1)) if exit_code == 0 else found


def test_a_shape_is_what_is_reserved_and_where() -> None:
    assert shape_of(job()) == Shape(1000, job().nodes, 1.0, 0)
    assert shape_of(job()) == shape_of(job(entrypoint="sh other.sh", env={"A": "1"}))
    assert shape_of(job(cpu=2)) != shape_of(job()) != shape_of(job(memory_bytes=1024))
    assert shape_of(job(workers=2)) != shape_of(job())
    other = job()
    assert shape_of(replace(other, submission=replace(other.submission, uid=1001))) != shape_of(job())


@pytest.mark.parametrize(
    "keys",
    [
        {"gpu": 1},
        {"secrets": ("TOKEN",)},
        {"interactive": InteractiveSpec()},
        {"runtime_env": RuntimeEnvSpec(pip=("einops",))},
        {"checkpoint": CheckpointSpec(storage_path="s3://bucket/runs")},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_actors_that_may_keep_something_of_a_job_serve_it_alone(keys: dict[str, Any]) -> None:
    assert shape_of(job(**keys)) is None


def test_only_a_gang_to_which_nothing_unusual_happened_is_kept() -> None:
    assert is_spotless(ended(job()))
    assert not is_spotless(job())
    assert not is_spotless(ended(job(), 3))
    assert not is_spotless(changed(ended(job()), degraded=True))
    second = replace(ended(job()).attempts[-1], number=2)
    assert not is_spotless(replace(ended(job()), attempts=(second,)))


def test_an_origin_is_read_back_from_its_name() -> None:
    assert Origin.parse(Origin("a-g2-abc234", 13).text) == Origin("a-g2-abc234", 13)
    with pytest.raises(ValueError, match="invalid literal"):
        Origin.parse("digits-gx")
