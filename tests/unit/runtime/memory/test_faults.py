"""Faults as data: each has its effect on the posted events, and a schedule gives the same events every time."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from orchestrator.core import events as ev
from orchestrator.core.lifecycle.advance import Ensure
from orchestrator.core.lifecycle.fold import fold
from orchestrator.runtime.memory import faults as f
from orchestrator.runtime.memory.cluster import MemoryCluster, Script, UnsafeOrderError
from orchestrator.runtime.memory.gangs import MemoryGangs
from tests.unit.core.builders import ID, T0, make_spec, node, pending, started

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.job.record import Job


class World:
    """One job of two ranks on node ``a`` of two, and the events that were posted about it."""

    def __init__(self, *schedule: tuple[float, f.Fault], script: Script | None = None, gpu: float = 1) -> None:
        made = Script() if script is None else script
        nodes = [node("a", gpus=4), node("b", gpus=4)]
        self.cluster = MemoryCluster(nodes, now=T0, script_of=lambda _: made, latency=0.01)
        f.schedule(self.cluster, schedule)
        self.facts: list[ev.Event] = []
        self.gangs = MemoryGangs(self.cluster, post=self.post)
        self.first = pending(make_spec(workers=2, gpu=gpu))
        self.job: Job = fold(self.first, started(self.first, at=T0))

    def post(self, events: Sequence[ev.Event]) -> None:
        self.facts += events
        for event in events:
            self.job = fold(self.job, event)

    def ensure(self) -> None:
        self.gangs.apply(self.job, Ensure(self.job.id, self.job.attempt_number, self.job.gang))

    def up(self) -> World:
        self.ensure()
        self.run(1.0)
        assert self.job.pids
        return self

    def inject(self, fault: f.Fault) -> None:
        fault.inject(self.cluster)

    def run(self, seconds: float) -> None:
        self.cluster.run_until(self.cluster.now() + seconds)

    def told(self, kind: type[ev.Event]) -> list[ev.Event]:
        return [fact for fact in self.facts if isinstance(fact, kind)]


def test_a_rank_whose_end_is_recorded_is_not_run_again_in_a_gang_that_is_made_anew() -> None:
    world = World()
    unplaced = world.job
    world.up()
    world.inject(f.RankDies(job=ID, rank=0, exit=f.Exit(code=0)))
    world.gangs.crash()
    world.inject(f.HeadLost())
    world.job = unplaced  # the daemon died before it had recorded that the gang was placed
    world.gangs = MemoryGangs(world.cluster, post=world.post)
    world.ensure()
    world.run(60.0)
    assert world.job.gang_lost
    assert [(e.rank, e.exit_code) for e in world.job.exits][:1] == [(0, 0)]
    assert world.cluster.processes.started[ID] == 2


def test_a_gpu_that_is_held_is_never_given_away_again() -> None:
    world = World().up()
    with pytest.raises(UnsafeOrderError, match="given away twice"):
        world.cluster.nodes["a"].take((ID, 9, 0), gpus=3, cpus=1)


def test_an_attempt_beside_another_is_refused() -> None:
    world = World().up()
    actor = world.cluster.gangs[ID].actors[0]
    actor.attempt = 2
    with pytest.raises(UnsafeOrderError, match="starts beside"):
        actor.launch(2)


def test_a_schedule_gives_the_same_story_every_time() -> None:
    schedule = (
        (T0 + 2.0, f.Slow(node="a", seconds=0.3)),
        (T0 + 3.0, f.RankDies(job=ID, rank=1)),
        (T0 + 3.0, f.ReplyRepeated(job=ID)),
        (T0 + 4.0, f.NodeLost(node="a", cut_off=True)),
        (T0 + 4.0, f.ReplyLost(job="no such job")),
    )
    stories = []
    for _ in range(2):
        world = World(*schedule)
        world.ensure()
        world.run(100.0)
        stories.append(world.facts)
    assert stories[0] == stories[1]
    assert [fact.kind for fact in stories[0]].count("gang_lost") >= 1


def test_it_imports_neither_ray_nor_torch() -> None:
    program = (
        "import sys, orchestrator.runtime.memory.gangs, orchestrator.runtime.memory.cluster;"
        "sys.exit(bool({'ray', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
