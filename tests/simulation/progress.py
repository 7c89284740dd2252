"""Rounds of the daemon, passing time, and kills of the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core import events as ev
from orchestrator.core.facts.faults import NoExitStatus
from orchestrator.core.lifecycle.advance import declare_hung
from orchestrator.core.lifecycle.failure import SETTLE_SECONDS
from orchestrator.core.states import FailureClass, JobState
from orchestrator.runtime.ranks.rank_events import FENCE_SECONDS, LEASE_SECONDS

if TYPE_CHECKING:
    import random

    from tests.simulation.world import World


def round_(world: World, dice: random.Random) -> str:
    world.attempt(world.daemon.step())
    return "done"


def things_happen(world: World, dice: random.Random) -> str:
    happened = sum(world.cluster.step(world.now + 1.0) for _ in range(dice.randint(1, 12)))
    return f"{happened}"


def time_passes(world: World, dice: random.Random) -> str:
    seconds = dice.choice([0.1, 1.0, SETTLE_SECONDS, 8.0, LEASE_SECONDS, 20.0, 120.0])
    world.cluster.run_until(world.now + seconds)
    return f"{seconds:g} s"


def all_goes_on(world: World, dice: random.Random) -> str:
    for _ in range(dice.randint(1, 6)):
        world.round()
        world.cluster.run_until(world.now + 0.1)
    return "done"


def deliver(world: World, dice: random.Random) -> str:
    if not world.daemon.outbox:
        return ""
    world.daemon.deliver(dice.randint(1, 6))
    if dice.random() < 0.5:
        world.attempt(world.daemon.step())
    return "done"


def deliver_again(world: World, dice: random.Random) -> str:
    """Post a fact that was taken before, as after a restart of the daemon."""
    facts = [*world.told, *world.daemon.history]
    if not facts:
        return ""
    fact = dice.choice(facts)
    if isinstance(fact, ev.GangLost) and fact.not_before > world.daemon.clock.now() + FENCE_SECONDS:
        return ""  # a fact from before a step of the clock: a daemon would post it again by its own clock
    world.daemon.loop.post([fact])
    world.attempt(world.daemon.step())
    return fact.kind


def wake_up(world: World, dice: random.Random) -> str:
    wake_at = world.daemon.wake_at
    if wake_at is not None and wake_at < world.now + 600:
        world.cluster.run_until(max(wake_at, world.now))
    world.attempt(world.daemon.step())
    return "done"


def look(world: World, dice: random.Random) -> str:
    world.daemon.look()
    return "done"


def restart(world: World, dice: random.Random) -> str:
    held = dict(world.jobs)
    world.crash()
    assert world.jobs == held, "the daemon knew what the store did not"
    return "done"


def crash_before_a_write(world: World, dice: random.Random) -> str:
    world.store.crash_before, world.store.crash_after = True, False
    return _on_a_slow_disk(world, dice)


def crash_after_a_write(world: World, dice: random.Random) -> str:
    world.store.crash_before, world.store.crash_after = False, True
    return _on_a_slow_disk(world, dice)


def _on_a_slow_disk(world: World, dice: random.Random) -> str:
    """Slow down the write at which the daemon is killed: nodes carry out earlier orders meanwhile."""
    world.store.slow_seconds = dice.choice([0.0, 0.05, 1.0, 20.0])
    return f"armed, the write takes {world.store.slow_seconds:g} s"


def hang_is_found(world: World, dice: random.Random) -> str:
    job = world.one(dice.randrange(1000), [j for j in world.jobs.values() if j.state is JobState.RUNNING])
    if job is None:
        return ""
    daemon = world.daemon
    failure = ev.Failure(failure_class=FailureClass.HANG, cause=NoExitStatus(rank=0))

    def make() -> list[ev.Event]:
        live = daemon.loop.decided.get(job.id)
        if live is None:
            return []
        now = daemon.clock.now()
        began = live.attempts[-1].running_at or now
        return declare_hung(live, failure, max(began, now - 60.0), now)

    world.attempt(daemon.command(make))
    return job.id
