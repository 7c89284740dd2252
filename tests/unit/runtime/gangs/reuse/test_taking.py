"""A gang that a daemon took before it died: with the next daemon, it serves the job, or is removed and made again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from orchestrator.core import events as ev
from orchestrator.core.facts.gangs import ActorMissing, StoppedUnplaced
from orchestrator.core.job.record import Job
from orchestrator.runtime.gangs import actors as module
from orchestrator.runtime.gangs.actors import RayRankActors
from orchestrator.runtime.gangs.errors import GangLostError
from orchestrator.runtime.gangs.reuse.origin import origin_of
from orchestrator.runtime.gangs.reuse.parked_gangs import ParkedGangs
from orchestrator.runtime.gangs.reuse.served_actor import ServedActor
from tests.unit.core.builders import after, exited, gone, make_spec, pending, running, started

RANKS = 2


class FakeRay:
    """Named actors that answer or not, and the names of those that were killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actors: dict[str, Any] = {}
        self.killed: list[str] = []
        self.taken: list[tuple[str, Any]] = []
        self.broken: set[str] = set()
        monkeypatch.setattr(ray, "get_actor", self._find)
        monkeypatch.setattr(ray, "get", lambda calls, timeout: [call() for call in calls])
        monkeypatch.setattr(ray, "kill", lambda actor, no_restart: self._kill(actor.name))
        monkeypatch.setattr(module, "_find_group", lambda _origin, _namespace: None)

    def gang(self, job: Job) -> None:
        for rank in range(RANKS):
            name = f"rank-{job.id}-g{job.gang}-r{rank}"
            take = SimpleNamespace(remote=lambda *what, name=name: lambda: self._take(name, what))
            retire = SimpleNamespace(remote=lambda _user: tuple)
            self.actors[name] = SimpleNamespace(name=name, serve=None, take=take, retire=retire)

    def _find(self, name: str, namespace: str) -> Any:
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def _take(self, name: str, what: Any) -> None:
        if name in self.broken:
            raise RuntimeError("the actor has ended")
        self.taken.append((name, what))

    def _kill(self, name: str) -> None:
        self.killed.append(name)
        del self.actors[name]


def spec() -> Any:
    return make_spec(workers=RANKS, gpu=0)


def ended(job: Job) -> Job:
    ends = [exited(job, rank, exit_code=0) for rank in range(RANKS)]
    return after(job, *ends, gone(job), ev.AttemptSucceeded(job_id=job.id, at=20.0, attempt=1))


class World:
    """A gang that the first job left parked; ``next_daemon`` returns the actors in the view of a new daemon."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ray, self.folder = FakeRay(monkeypatch), tmp_path / "gangs"
        self.created: list[Job] = []
        monkeypatch.setattr(RayRankActors, "_create", lambda _self, job, found: self.created.append(job) or found)
        self.parked = ParkedGangs(self.folder)
        self.first = running(pending(spec(), job_id="first-abc234"))
        self.actors = self._view(self.parked)
        self.parked.created(self.first)
        self.ray.gang(self.first)
        assert self.actors.park(ended(self.first), list(self.ray.actors.values()))

    def _view(self, parked: ParkedGangs) -> RayRankActors:
        site: Any = SimpleNamespace(namespace="n", embedded=True)
        nodes: Any = SimpleNamespace(agents={"a": None})
        return RayRankActors(site, None, nodes, parked)  # type: ignore[arg-type]  # no call reaches the connection

    def next_daemon(self) -> RayRankActors:
        return self._view(ParkedGangs(self.folder))


def unplaced(name: str) -> Job:
    job = pending(spec(), job_id=f"{name}-abc234")
    return after(job, started(job))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_a_parked_gang_is_told_whom_it_serves(world: World) -> None:
    job = unplaced("second")
    actors = world.actors.find_or_create(job, create=True)
    assert all(isinstance(actor, ServedActor) for actor in actors)
    assert [what for _, what in world.ray.taken] == [(job.id, 1, 1)] * RANKS
    assert world.created == []


def test_a_gang_whose_actors_have_ended_is_removed_and_another_made(world: World) -> None:
    world.ray.broken = set(world.ray.actors)
    world.actors.find_or_create(unplaced("second"), create=True)
    assert len(world.ray.killed) == RANKS
    assert [job.id for job in world.created] == ["second-abc234"]
    assert list(world.folder.iterdir()) == []


def test_a_late_removal_of_the_job_before_does_not_reach_the_job_after(world: World) -> None:
    world.actors.find_or_create(unplaced("second"), create=True)
    world.actors.remove(ended(world.first))
    assert world.ray.killed == []
    assert not world.actors.park(ended(world.first), [])


def test_a_gang_that_was_taken_and_not_told_is_told_by_the_next_daemon(world: World) -> None:
    job = unplaced("second")
    assert world.parked.take(job) == origin_of(world.first)  # and the daemon is killed here
    for create in (True, False):
        assert len(world.next_daemon().find_or_create(job, create=create)) == RANKS
    assert [what for _, what in world.ray.taken] == [(job.id, 1, 1)] * 2 * RANKS
    assert world.created == []


def test_a_part_of_a_gang_that_was_taken_is_removed_by_the_next_daemon(world: World) -> None:
    job = unplaced("second")
    world.parked.take(job)
    world.ray._kill(f"rank-{world.first.id}-g1-r1")
    daemon = world.next_daemon()
    with pytest.raises(GangLostError) as caught:
        daemon.find_or_create(job, create=False)
    assert caught.value.cause == StoppedUnplaced()
    daemon.find_or_create(job, create=True)
    assert world.ray.actors == {}
    assert [each.id for each in world.created] == [job.id]
    assert list(world.folder.iterdir()) == []


def test_a_placed_gang_that_lost_an_actor_is_lost(world: World) -> None:
    job = running(pending(spec(), job_id="second-abc234"))
    world.parked.take(job)
    world.ray._kill(f"rank-{world.first.id}-g1-r1")
    with pytest.raises(GangLostError) as caught:
        world.next_daemon().find_or_create(job, create=True)
    assert caught.value.cause == ActorMissing(rank=1)
