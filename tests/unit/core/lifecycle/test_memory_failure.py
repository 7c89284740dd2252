"""A memory kill becomes a failure that names the rank, its use, its request, and a remedy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core.events import MemoryUse
from orchestrator.core.lifecycle.failure import ClassifiedFailure, classify
from orchestrator.core.states import FailureClass, OutOf
from orchestrator.core.stored import event_body, event_from, job_from_dict, job_to_dict
from tests.unit.core.builders import T0, after, exited, make_spec, pending, running

if TYPE_CHECKING:
    from orchestrator.core.events import Failure

GIB = 1 << 30


def told(memory: MemoryUse | None, asked: int | None = None, **fields: Any) -> Failure:
    """Return the failure of a job of one rank that ended in this way."""
    job = running(pending(make_spec(workers=1, memory_bytes=asked)))
    found = classify(after(job, exited(job, memory=memory, **({"signal": 9, "exit_code": None} | fields))), T0 + 20)
    assert isinstance(found, ClassifiedFailure)
    return found.failure


def test_a_rank_at_its_limit_is_told_to_ask_for_more() -> None:
    failure = told(MemoryUse(used_bytes=4 * GIB, limit_bytes=4 * GIB, killed=OutOf.LIMIT), 4 * GIB)
    assert (failure.code, failure.failure_class, failure.rank, failure.signal) == (
        "memory_limit",
        FailureClass.INFRA,
        0,
        9,
    )
    assert failure.sentence() == (
        "rank 0: the kernel killed it because it reached its memory limit of 4GiB (it used 4.0 GiB, it asked for 4GiB)"
    )
    assert "raise resources_per_worker.memory" in failure.advice("job")
    assert "smaller batch" in failure.advice("job")


def test_amounts_are_told_as_the_job_asked_for_them() -> None:
    """A limit that the kernel rounds to pages is shown as requested; a limit of the machine is shown as measured."""
    rounded = 600_000_000 // 4096 * 4096
    memory = MemoryUse(used_bytes=rounded, limit_bytes=rounded, killed=OutOf.LIMIT)
    assert "its memory limit of 600MB (it used 572.2 MiB, it asked for 600MB)" in told(memory, 600_000_000).sentence()
    assert "its memory limit of 572.2 MiB (it used 572.2 MiB, it asked for 1GB)" in told(memory, 10**9).sentence()


@pytest.mark.parametrize(("asked", "said"), [(None, "asked for none"), (300 << 20, "asked for 300MiB")])
def test_a_machine_without_memory_is_told_apart(asked: int | None, said: str) -> None:
    failure = told(MemoryUse(used_bytes=20 * GIB, killed=OutOf.MACHINE), asked)
    assert failure.code == "host_oom_kill"
    assert (
        failure.sentence()
        == f"rank 0: the kernel killed it because the machine's memory ran out (it used 20.0 GiB, it {said})"
    )
    assert "set resources_per_worker.memory" in failure.advice("job")


def test_a_kill_without_a_memory_kill_is_a_signal() -> None:
    assert told(MemoryUse(used_bytes=GIB)).code == "signal"
    assert told(None).code == "signal"


def test_a_data_loaders_process_that_was_killed_explains_what_the_rank_raised() -> None:
    memory = MemoryUse(used_bytes=GIB, limit_bytes=GIB, killed=OutOf.LIMIT)
    raised: dict[str, Any] = {"signal": None, "exit_code": 1, "error_type": "RuntimeError"}
    message = "DataLoader worker (pid 4) is killed by signal: Killed. "
    assert told(memory, **raised, error_message=message).code == "memory_limit"
    vague = "DataLoader worker (pid(s) 4) exited unexpectedly"
    assert told(memory, **raised, error_message=vague).code == "memory_limit"
    assert told(memory, signal=None, exit_code=137).code == "memory_limit", "a shell's child"
    assert told(memory, **raised, error_message="another matter").code == "exception"


def test_what_was_used_survives_the_store() -> None:
    job = running(pending(make_spec(workers=1)))
    memory = MemoryUse(used_bytes=GIB, limit_bytes=None, killed=OutOf.MACHINE)
    event = exited(job, signal=9, exit_code=None, memory=memory)
    body = json.loads(json.dumps(event_body(event)))
    assert event_from(event.kind, body, job_id=job.id, at=event.at, cause="") == event
    job = after(job, event)
    assert job_from_dict(json.loads(json.dumps(job_to_dict(job)))) == job
    assert job.exits[0].memory == memory
