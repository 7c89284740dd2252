"""Faults as data: each has its effect on the posted events, and a schedule gives the same events every time."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from orchestrator.core import events as ev
from orchestrator.core.lifecycle.advance import Ensure, ReleaseGang, StopRanks
from orchestrator.core.lifecycle.fold import fold
from orchestrator.core.states import StopScope
from orchestrator.runtime.memory import faults as f
from orchestrator.runtime.memory.cluster import MemoryCluster
from orchestrator.runtime.memory.gangs import MemoryGangs
from orchestrator.runtime.memory.nodes import UnsafeOrderError
from orchestrator.runtime.memory.ranks import Script
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


def test_a_rank_dies_as_it_is_told_to() -> None:
    world = World().up()
    world.inject(f.RankDies(job=ID, rank=1, exit=f.Exit(code=1, error_type="ValueError", error_message="no")))
    world.run(1.0)
    (ended,) = world.job.exits
    assert (ended.rank, ended.exit_code, ended.error_type, ended.error_message) == (1, 1, "ValueError", "no")


def test_a_rank_that_hangs_ends_only_by_a_kill() -> None:
    world = World(script=Script(seconds=5.0)).up()
    world.inject(f.RankHangs(job=ID, rank=0))
    world.run(100.0)
    assert [e.rank for e in world.job.exits] == [1]
    world.gangs.apply(world.job, StopRanks(ID, 1, 1, world.cluster.now() + 30.0))
    world.run(29.0)
    assert [e.rank for e in world.job.exits] == [1]
    world.run(2.0)
    assert world.job.exits[1].signal == 9


@pytest.mark.parametrize("machine", [False, True])
def test_a_stop_from_outside_is_seen(machine: bool) -> None:
    world = World().up()
    world.inject(f.StopSeen(job=ID, rank=0, machine=machine))
    world.run(1.0)
    assert [e.rank for e in world.job.exits] == ([0, 1] if machine else [0])
    assert all(e.stop_scope is (StopScope.MACHINE if machine else StopScope.RANK) for e in world.job.exits)
    assert world.job.left_early


def test_an_actor_that_dies_takes_its_rank_along_and_loses_the_gang() -> None:
    world = World().up()
    world.inject(f.RankDies(job=ID, rank=1, exit=f.Exit(code=7)))
    world.inject(f.ActorDies(job=ID, rank=0))
    world.run(1.0)
    assert world.job.gang_lost
    assert [(e.rank, e.exit_code) for e in world.job.exits] == [(1, 7)], "the exit record of rank 1 was read"
    assert [p.rank for p in world.cluster.processes.of(ID)] == []


@pytest.mark.parametrize("cut_off", [False, True])
def test_a_gang_of_a_lost_node_is_released_when_its_leases_are_over(cut_off: bool) -> None:
    world = World().up()
    world.inject(f.NodeLost(node="a", cut_off=cut_off))
    world.run(0.5)
    assert world.job.gang_lost
    assert world.job.fenced_until > world.cluster.now()
    assert bool(world.cluster.processes.of(ID)) is cut_off
    world.inject(f.NodeReturns(node="a"))
    assert world.cluster.views()["a"].alive is not cut_off
    world.gangs.apply(world.job, ReleaseGang(ID, 1))
    world.run(60.0)
    assert world.told(ev.GangReleased)
    assert world.cluster.views()["a"].alive
    assert not world.cluster.nodes["a"].held


def test_a_silent_node_holds_answers_back_until_it_answers_again() -> None:
    world = World()
    world.inject(f.NodeSilent(node="a"))
    world.ensure()
    world.run(100.0)
    assert not world.told(ev.GangPlaced)
    assert not world.cluster.views()["a"].reachable
    world.inject(f.NodeAnswers(node="a"))
    world.run(1.0)
    assert world.job.pids
    world.inject(f.NodeSilent(node="a"))
    world.gangs.report_reachability([world.job])
    assert world.job.degraded
    world.inject(f.NodeAnswers(node="a"))
    world.gangs.report_reachability([world.job])
    assert not world.job.degraded


def test_a_lost_head_loses_every_gang() -> None:
    world = World().up()
    world.inject(f.HeadLost())
    world.gangs.forget_all()
    world.run(1.0)
    assert world.job.gang_lost
    assert not world.cluster.gangs
    assert not list(world.cluster.processes)


def test_a_gpu_that_drops_out_ends_its_rank_and_is_not_given_out_again() -> None:
    world = World().up()
    world.inject(f.GpuLost(node="a", index=int(world.job.seats[1].gpu_ids[0])))
    world.run(1.0)
    assert [e.rank for e in world.job.exits] == [1]
    assert world.cluster.views()["a"].other_gpus == 1
    hold = world.cluster.nodes["a"].take((ID, 9, 9), gpus=2, cpus=1)
    assert hold is not None
    assert not set(hold.gpus) & {int(seat.gpu_ids[0]) for seat in world.job.seats}
    world.cluster.nodes["a"].held.pop((ID, 9, 9))
    world.inject(f.GpuLost(node="a", index=hold.gpus[0]))
    assert world.cluster.nodes["a"].take((ID, 9, 9), gpus=2, cpus=1) is None


@pytest.mark.parametrize("count", range(1, 12))
def test_an_order_whose_answer_is_lost_is_given_again_and_done_once(count: int) -> None:
    world = World()
    world.inject(f.ReplyLost(job=ID, count=count))
    world.ensure()
    world.run(1000.0)
    assert world.job.pids
    assert world.cluster.processes.started[ID] == 2
    world.inject(f.ReplyLost(job=ID, count=count))
    world.inject(f.RankDies(job=ID, rank=0))
    world.run(1000.0)
    assert [e.rank for e in world.job.exits] == [0]


def test_answers_that_come_twice_change_nothing() -> None:
    world = World(script=Script(seconds=5.0))
    world.inject(f.ReplyRepeated(job=ID, count=100))
    world.up().run(2.0)
    assert [len(actor._polls) for actor in world.cluster.gangs[ID].actors] == [1, 1], (
        "each rank is asked once at a time"
    )
    world.run(8.0)
    assert world.cluster.processes.started[ID] == 2
    assert len(world.job.exits) == 2
    assert len(world.told(ev.RankExited)) > 2, "the facts did come twice"


def test_a_slow_node_answers_late() -> None:
    world = World()
    world.inject(f.Slow(node="a", seconds=10.0))
    world.ensure()
    world.run(30.0)
    assert not world.job.pids
    world.run(100.0)
    assert world.job.pids


def test_what_is_saved_is_told_and_resumed_from() -> None:
    world = World(script=Script(seconds=10.0, save_every=3.0)).up()
    world.run(7.0)
    assert world.job.checkpoints.durable_step == 6
    world.inject(f.DiskFull())
    world.run(1.5)
    assert world.job.checkpoints.durable_step == 6, "nothing is saved on a full disk"
    world.inject(f.DiskFreed())
    world.inject(f.CheckpointBroken(job=ID))
    assert world.cluster.checkpoints.resume(ID, gang=2) == 3


def test_the_next_daemon_knows_nothing_and_finds_everything() -> None:
    world = World().up()
    world.gangs.crash()
    world.inject(f.RankDies(job=ID, rank=0))
    world.run(1.0)
    assert not world.job.exits, "the daemon is dead"
    world.gangs = MemoryGangs(world.cluster, post=world.post)
    world.ensure()
    world.run(1.0)
    assert [e.rank for e in world.job.exits] == [0]
    assert not world.job.gang_lost, "a gang that was launched is adopted, also where a rank has ended"
    assert world.cluster.processes.started[ID] == 2


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


def test_a_gang_that_is_known_is_not_taken_for_the_next_one() -> None:
    world = World().up()
    world.cluster.remove(ID, 1)
    world.job = fold(world.first, started(world.first, at=T0, gang=2))
    world.ensure()
    world.run(1.0)
    assert world.cluster.gangs[ID].number == 2
    assert world.job.pids


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


def test_ranks_share_a_gpu_as_on_ray() -> None:
    world = World(gpu=0.5).up()
    assert {seat.gpu_uuids for seat in world.job.seats} == {("GPU-a-0",)}


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
