"""Faults of a history: on the nodes, and in the facts that ranks write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core import events as ev
from orchestrator.runtime.memory import faults as f
from tests.simulation.hostile import hostile

if TYPE_CHECKING:
    import random

    from tests.simulation.world import Do, World

EXITS = (
    f.Exit(code=0),
    f.Exit(code=0, last_step=60, total_steps=60),
    f.Exit(code=0, last_step=11, total_steps=60),
    f.Exit(code=1),
    f.Exit(code=75),
    f.Exit(code=143),
    f.Exit(signal=9),
    f.Exit(signal=15),
    f.Exit(),
    f.Exit(code=1, error_type="RuntimeError", error_message="boom"),
    f.Exit(code=1, error_type="RuntimeError", error_message="CUDA out of memory"),
    f.Exit(code=1, error_type="RuntimeError", error_message="Connection closed by peer"),
    f.Exit(signal=6, log_tail=("Watchdog caught collective operation timeout",)),
)


def rank_ends(world: World, dice: random.Random) -> str:
    process = world.process(dice.randrange(1000))
    if process is None:
        return ""
    how = dice.choice(EXITS)
    f.RankDies(job=process.job_id, rank=process.rank, exit=how).inject(world.cluster)
    return f"{process.job_id} rank {process.rank}: {how}"


def all_ranks_end(world: World, dice: random.Random) -> str:
    """End all ranks of a job at about the same time; some of them in another way."""
    process = world.process(dice.randrange(1000))
    if process is None:
        return ""
    how = dice.choice(EXITS)
    for other in world.cluster.processes.of(process.job_id):
        f.RankDies(job=other.job_id, rank=other.rank, exit=how).inject(world.cluster)
        if dice.random() < 0.3:
            world.cluster.run_until(world.now + 0.02)
        if dice.random() < 0.1:
            how = dice.choice(EXITS)
    return f"{process.job_id}: {how}"


def rank_hangs(world: World, dice: random.Random) -> str:
    process = world.process(dice.randrange(1000))
    if process is None:
        return ""
    f.RankHangs(job=process.job_id, rank=process.rank).inject(world.cluster)
    return f"{process.job_id} rank {process.rank}"


def stop_from_outside(world: World, dice: random.Random) -> str:
    process = world.process(dice.randrange(1000))
    if process is None:
        return ""
    code, machine = dice.choice([0, 0, 143]), dice.random() < 0.5
    f.StopSeen(job=process.job_id, rank=process.rank, exit_code=code, machine=machine).inject(world.cluster)
    return f"{process.job_id} rank {process.rank}, {code}, machine: {machine}"


def actor_dies(world: World, dice: random.Random) -> str:
    gangs = sorted(world.cluster.gangs.values(), key=lambda g: g.actors[0].pid)
    if not gangs:
        return ""
    gang = dice.choice(gangs)
    rank = dice.randrange(len(gang.actors))
    f.ActorDies(job=gang.job_id, rank=rank).inject(world.cluster)
    return f"{gang.job_id} rank {rank}"


def _node(world: World, dice: random.Random) -> str:
    return dice.choice(sorted(world.cluster.nodes))


def node_dies(world: World, dice: random.Random) -> str:
    node_id, cut_off = _node(world, dice), dice.random() < 0.5
    f.NodeLost(node=node_id, cut_off=cut_off).inject(world.cluster)
    if dice.random() < 0.5:
        world.daemon.look()
    return f"{node_id}, cut off: {cut_off}"


def node_returns(world: World, dice: random.Random) -> str:
    gone = [node_id for node_id, node in sorted(world.cluster.nodes.items()) if not node.alive]
    if not gone:
        return ""
    f.NodeReturns(node=gone[0]).inject(world.cluster)
    world.daemon.look()
    return gone[0]


def node_silent(world: World, dice: random.Random) -> str:
    node_id = _node(world, dice)
    f.NodeSilent(node=node_id).inject(world.cluster)
    if dice.random() < 0.7:
        world.daemon.look()
    return node_id


def node_answers(world: World, dice: random.Random) -> str:
    silent = sorted(world.cluster.silent)
    if not silent:
        return ""
    f.NodeAnswers(node=silent[0]).inject(world.cluster)
    world.daemon.look()
    return silent[0]


def head_lost(world: World, dice: random.Random) -> str:
    f.HeadLost().inject(world.cluster)
    if dice.random() < 0.5:
        world.daemon.gangs.forget_all()
    return "done"


def replies(fault: type[f.ReplyLost | f.ReplyRepeated]) -> Do:
    def do(world: World, dice: random.Random) -> str:
        job = world.one(dice.randrange(1000), list(world.jobs.values()))
        if job is None:
            return ""
        fault(job=job.id, count=dice.randint(1, 3)).inject(world.cluster)
        return job.id

    return do


def slow(world: World, dice: random.Random) -> str:
    node_id, seconds = _node(world, dice), dice.choice([0.0, 0.0, 2.0])
    f.Slow(node=node_id, seconds=seconds).inject(world.cluster)
    return f"{node_id} by {seconds:g} s"


def gpu_lost(world: World, dice: random.Random) -> str:
    node_id, index = _node(world, dice), dice.randrange(2)
    f.GpuLost(node=node_id, index=index).inject(world.cluster)
    return f"{node_id} GPU {index}"


def gpu_returns(world: World, dice: random.Random) -> str:
    found = [node for _, node in sorted(world.cluster.nodes.items()) if node.lost]
    if not found:
        return ""
    found[0].lost.clear()
    world.daemon.look()
    return found[0].node.id


def disk_full(world: World, dice: random.Random) -> str:
    f.DiskFull().inject(world.cluster)
    return "done"


def disk_freed(world: World, dice: random.Random) -> str:
    was, world.cluster.disk_full = world.cluster.disk_full, False
    return "done" if was else ""


def checkpoint(world: World, dice: random.Random) -> str:
    process = world.process(dice.randrange(1000))
    if process is None:
        return ""
    step, durable = dice.randint(1, 60), dice.random() < 0.5
    world.cluster.save(process, step, durable=durable)
    return f"{process.job_id} step {step}, durable: {durable}"


def checkpoint_broken(world: World, dice: random.Random) -> str:
    job = world.one(dice.randrange(1000), list(world.jobs.values()))
    if job is None or not world.cluster.checkpoints.stored.get(job.id):
        return ""
    f.CheckpointBroken(job=job.id).inject(world.cluster)
    return job.id


def hostile_fact(world: World, dice: random.Random) -> str:
    """Post a fact with a value that an honest rank never writes."""
    job = world.one(dice.randrange(1000), [j for j in world.jobs.values() if j.attempts])
    if job is None:
        return ""
    fact, name = hostile(job, world.daemon.clock.now(), dice)
    if isinstance(fact, ev.CheckpointSaved) and isinstance(fact.path, str):
        world.truth.saved.add(fact.path)
    world.daemon.loop.post([fact])
    if dice.random() < 0.5:
        world.attempt(world.daemon.step())
    return f"{fact.kind} of {job.id}: {name}"


STEPS = (-90_000.0, -7200.0, -3600.0, -30.0, -2.0, -0.6, 0.3, 1.5, 60.0, 3605.0, 7200.0, 90_000.0)


def _step(dice: random.Random) -> float:
    return dice.choice(STEPS) if dice.random() < 0.5 else dice.uniform(min(STEPS), max(STEPS))


def clock_steps(world: World, dice: random.Random) -> str:
    """Step the wall clock of the daemon's machine; the daemon may notice at once, later, or in its next life."""
    seconds = _step(dice)
    f.ClockSteps(seconds=seconds).inject(world.cluster)
    if dice.random() < 0.5:
        world.attempt(world.daemon.step())
    return f"{seconds:+.1f} s"


def clock_skew(world: World, dice: random.Random) -> str:
    node_id = dice.choice(sorted(world.cluster.nodes))
    seconds = dice.choice([0.0, -0.5, 0.5, -1.9, 1.9, _step(dice)])
    f.ClockSkew(node=node_id, seconds=seconds).inject(world.cluster)
    return f"{node_id}: {seconds:+.1f} s"


def machine_boots(world: World, dice: random.Random) -> str:
    """Kill the daemon, and boot its machine, perhaps with another wall clock. The nodes are other machines."""
    world.cluster.boots += 1
    seconds = dice.choice([0.0, _step(dice)])
    f.ClockSteps(seconds=seconds).inject(world.cluster)
    world.crash()
    return f"{seconds:+.1f} s"
