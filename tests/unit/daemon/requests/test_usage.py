"""The usage of resources, from the events of jobs in a store in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.api.errors import BadRequestError
from orchestrator.api.service import UsageQuery
from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import ByUser
from orchestrator.core.ids import JobId
from orchestrator.daemon.estimates import EstimateRecord
from orchestrator.daemon.requests.usage import Usage, recorded_energy
from orchestrator.runtime.pools import Pools
from orchestrator.spec.settings import Settings, SettingsError
from tests.unit.analysis.runs import START, write_job
from tests.unit.core.builders import T0
from tests.unit.daemon.requests.test_requests import Desk, on_a_desk

if TYPE_CHECKING:
    from pathlib import Path

HOUR = 3600.0


def usage(desk: Desk, price: float | None = None) -> Usage:
    store, paths = desk.rounds.store, desk.settings.paths
    return Usage(desk.rounds.loop, store, paths, Pools().files, price, EstimateRecord.of(paths.home))


async def waited(desk: Desk, name: str, seconds: float, **fields: Any) -> JobId:
    """Add a job of two GPUs that was paused after ``seconds`` in the queue; return its id."""
    job_id = JobId(f"{name}-{name[0] * 6}")
    job = await desk.rounds.accept(job_id=job_id, spec={"workers": 2}, **fields)
    desk.nodes.set({})
    await desk.rounds.loop.command(list)
    event = ev.JobSuspended(job_id=job.id, at=job.submission.submitted_at + seconds, by=ByUser(name="ada"))
    await desk.rounds.loop.command(lambda: [event])
    return job.id


def test_use_is_counted_by_user_queue_and_label(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.nodes.set({})
        await waited(desk, "b", HOUR, user="ada")
        await waited(desk, "c", 2 * HOUR, user="bob")
        report = await usage(desk, price=2.0).report(UsageQuery(by=("user",), since=T0 - 1))
        assert [(row.keys, row.waiting_gpu_hours, row.gpu_hours) for row in report.rows] == [
            ({"user": "bob"}, 4.0, 0.0), ({"user": "ada"}, 2.0, 0.0),
        ]  # fmt: skip
        assert (report.total.waiting_gpu_hours, report.total.cost, report.total.jobs) == (6.0, 0.0, 2)
        narrow = await usage(desk).report(UsageQuery(by=("queue",), since=T0 + HOUR, until=T0 + 1.5 * HOUR))
        assert [(row.waiting_gpu_hours, row.jobs, row.cost) for row in narrow.rows] == [(1.0, 1, None)]
        unlabelled = await usage(desk).report(UsageQuery(by=("label:team", "queue"), since=T0 - 1))
        assert [row.keys for row in unlabelled.rows] == [{"label:team": "", "queue": "default"}]

    on_a_desk(tmp_path, story)


@pytest.mark.parametrize(
    "by", [("team",), ("label:",), ("user", "user"), ("user", "queue", "label:a", "label:b", "label:c")]
)
def test_what_use_is_not_counted_by_is_refused(tmp_path: Path, by: tuple[str, ...]) -> None:
    async def story(desk: Desk) -> None:
        with pytest.raises(BadRequestError):
            await usage(desk).report(UsageQuery(by=by))
        with pytest.raises(BadRequestError, match="the span of time is empty"):
            await usage(desk).report(UsageQuery(since=5.0, until=5.0))

    on_a_desk(tmp_path, story)


def test_energy_is_of_the_span(tmp_path: Path) -> None:
    write_job(tmp_path / "job", gpus=2, seconds=40)  # 100 and 101 watts, by the counter
    whole = recorded_energy(str(tmp_path / "job"), START - 5, START + 500)
    half = recorded_energy(str(tmp_path / "job"), START + 10, START + 20)
    assert whole == pytest.approx(39 * 201.0)
    assert half == pytest.approx(10 * 201.0)
    assert recorded_energy(str(tmp_path / "nothing"), 0.0, 1.0) is None


def test_the_price_is_a_number() -> None:
    assert Settings.from_environ({"HOME": "/h", "ORCH_GPU_HOUR_PRICE": "2.49"}).gpu_hour_price == 2.49
    for text in ("free", "-1", "1e3", "nan", "2.49 EUR"):
        with pytest.raises(SettingsError, match="not a price"):
            Settings.from_environ({"HOME": "/h", "ORCH_GPU_HOUR_PRICE": text})
