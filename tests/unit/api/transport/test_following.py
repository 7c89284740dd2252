"""Waiting and following across restarts of the daemon: nothing missed, nothing twice, and not for ever."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.client import Client
from orchestrator.api.errors import DaemonUnreachableError, InternalError, NoSuchJobError, NotEndedError
from orchestrator.api.transport.endpoint import Endpoint
from orchestrator.api.transport.following import Patience, follow_logs, wait, watch
from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from orchestrator.api.server.testing import ServedFake


class Later:
    """Runs steps in another thread, one after the other."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = steps
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        for step in self._steps:
            step()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join(timeout=PATIENCE_SECONDS)
        assert not self._thread.is_alive()


class Clock:
    """A clock that advances only by its own pauses."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def now(self) -> float:
        return sum(self.pauses)

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


def held(served: ServedFake, count: int = 1) -> Callable[[], None]:
    """Return a step that waits until the service holds ``count`` requests."""

    def step() -> None:
        deadline = time.monotonic() + 300
        while served.do(lambda service: len(service._waiters)) < count:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    return step


def test_wait_returns_at_once_for_a_job_that_ended(served: ServedFake, client: Client) -> None:
    job = served.do(lambda service: service.add(state="FAILED"))
    assert wait(client, job.id).state == "FAILED"


def test_wait_returns_when_the_job_ends(served: ServedFake, client: Client) -> None:
    job = served.do(lambda service: service.add())

    def step(**fields: object) -> Callable[[], object]:
        return lambda: served.do(lambda service: service.set(job.id, **fields))

    with Later(held(served), step(state="RUNNING"), held(served), step(state="SUCCEEDED")):
        assert client.wait("digits").state == "SUCCEEDED"


def test_wait_has_a_limit_when_asked(served: ServedFake, client: Client) -> None:
    job = served.do(lambda service: service.add())
    with pytest.raises(NotEndedError, match="not ended yet") as caught:
        wait(client, job.id, timeout_seconds=0.1)
    assert "orch wait" in caught.value.hint


def test_a_daemon_that_is_away_at_the_limit_is_not_waited_for(served: ServedFake, client: Client) -> None:
    job = served.do(lambda service: service.add())
    with Later(held(served), served.stop), pytest.raises(DaemonUnreachableError):
        wait(client, job.id, timeout_seconds=2.0, patience=Patience(reconnect_seconds=1e9))
    with pytest.raises(DaemonUnreachableError):  # the daemon is down from the beginning
        wait(client, job.id, timeout_seconds=0.1, patience=Patience(reconnect_seconds=1e9))


def test_wait_for_nothing_is_an_error(client: Client) -> None:
    with pytest.raises(NoSuchJobError):
        wait(client, "nothing")


def test_wait_survives_a_restart_and_says_so_once(served: ServedFake, client: Client) -> None:
    job = served.do(lambda service: service.add())
    told: list[Exception] = []
    patience = Patience(reconnect_seconds=300, notice=told.append)
    with Later(
        held(served),
        served.stop,
        lambda: served.do(lambda service: service.set(job.id, state="SUCCEEDED")),  # while no client could see it
        served.start,
    ):
        assert wait(client, job.id, patience=patience).state == "SUCCEEDED"
    assert len(told) == 1


def test_a_name_keeps_meaning_the_same_job(served: ServedFake, client: Client) -> None:
    job = served.do(lambda service: service.add("digits"))
    with Later(
        held(served),
        lambda: served.do(lambda service: service.add("digits", state="FAILED")),
        lambda: served.do(lambda service: service.set(job.id, state="SUCCEEDED")),
    ):
        assert wait(client, "digits").id == job.id


def test_patience_ends(tmp_path: Path) -> None:
    client = Client(Endpoint(socket_path=str(tmp_path / "none")), environ={})
    told: list[Exception] = []
    clock = Clock()
    with pytest.raises(DaemonUnreachableError):
        wait(client, "x", patience=Patience(reconnect_seconds=3, notice=told.append, clock=clock))
    assert len(told) == 1
    assert clock.pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0], "growing, and none over the end"


def test_watch_tells_every_change_and_those_of_an_absence(served: ServedFake, client: Client) -> None:
    job = served.do(lambda service: service.add())
    seen: list[str] = []
    with Later(
        held(served),
        lambda: served.do(lambda service: service.set(job.id, state="STARTING")),
        held(served),
        served.stop,
        lambda: served.do(lambda service: service.set(job.id, state="RUNNING")),
        served.start,
        held(served),
        lambda: served.do(lambda service: service.set(job.id, state="SUCCEEDED")),
    ):
        for jobs in watch(client, client.jobs, patience=Patience(reconnect_seconds=300)):
            if not seen or seen[-1] != jobs.jobs[0].state:
                seen.append(jobs.jobs[0].state)
            if seen[-1] == "SUCCEEDED":
                break
    assert seen == ["PENDING", "STARTING", "RUNNING", "SUCCEEDED"]


def write(served: ServedFake, job_id: str, *texts: str, rank: int = 0, attempt: int = 1) -> Callable[[], object]:
    return lambda: served.do(lambda service: service.write(job_id, *texts, rank=rank, attempt=attempt))


def end(served: ServedFake, job_id: str) -> Callable[[], object]:
    return lambda: served.do(lambda service: service.set(job_id, state="SUCCEEDED"))


def test_a_followed_log_ends_with_the_job(served: ServedFake, client: Client) -> None:
    job = served.do(lambda service: service.add(state="RUNNING"))
    write(served, job.id, "one")()
    steps = (held(served), write(served, job.id, "two", rank=1), held(served), end(served, job.id))
    with Later(*steps):
        assert [line.text for line in follow_logs(client, "digits")] == ["one", "two"]


def test_a_followed_log_survives_restarts_without_a_line_lost_or_twice(served: ServedFake, client: Client) -> None:
    job = served.do(lambda service: service.add(state="RUNNING", num_workers=2))
    write(served, job.id, "a0", "a1")()
    write(served, job.id, "b0", rank=1)()
    with Later(
        held(served),
        served.stop,
        write(served, job.id, "a2"),
        write(served, job.id, "b1", "b2", rank=1),
        served.start,
        held(served),
        write(served, job.id, "a3", attempt=2),
        held(served),
        served.stop,
        served.start,
        held(served),
        end(served, job.id),
    ):
        lines = list(follow_logs(client, job.id, patience=Patience(reconnect_seconds=300)))
    texts = [line.text for line in lines]
    assert sorted(texts) == ["a0", "a1", "a2", "a3", "b0", "b1", "b2"]
    assert [text for text in texts if text[0] == "a"] == ["a0", "a1", "a2", "a3"], "in order within a rank"


def test_lines_of_one_moment_are_told_apart(served: ServedFake, client: Client) -> None:
    job = served.do(lambda service: service.add(state="RUNNING"))

    def same_moment(*texts: str) -> None:
        def work(service: object) -> None:
            for text in texts:
                now = service.now  # type: ignore[attr-defined]
                service.write(job.id, text)  # type: ignore[attr-defined]
                service.now = now  # type: ignore[attr-defined]

        served.do(work)

    same_moment("x", "x", "y")
    with Later(held(served), served.stop, lambda: same_moment("x"), served.start, held(served), end(served, job.id)):
        texts = [line.text for line in follow_logs(client, job.id, patience=Patience(reconnect_seconds=300))]
    assert texts == ["x", "x", "y", "x"]


def test_a_tail_counts_once(served: ServedFake, client: Client) -> None:
    job = served.do(lambda service: service.add(state="RUNNING"))
    write(served, job.id, "one", "two", "three")()
    steps = (held(served), served.stop, write(served, job.id, "four"), served.start, held(served), end(served, job.id))
    with Later(*steps):
        lines = follow_logs(client, job.id, tail=1, patience=Patience(reconnect_seconds=300))
        assert [line.text for line in lines] == ["three", "four"]


def test_an_error_in_the_middle_of_a_log_is_raised(served: ServedFake, client: Client) -> None:
    job = served.do(lambda service: service.add(state="RUNNING"))

    async def failing(*_: object) -> Iterator[object]:  # type: ignore[misc]
        yield []
        raise InternalError("the log file is gone")

    served.do(lambda service: setattr(service, "logs", failing))
    with pytest.raises(InternalError, match="log file is gone"):
        list(client.logs(job.id))
