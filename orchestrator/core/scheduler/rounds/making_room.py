"""Has jobs stopped, shrunk or moved for the first job of a round that finds too little free. Pure.

What costs least comes first: elastic jobs shrink, idle GPUs are taken back, jobs move; only then are jobs preempted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.facts.moves import AwaitsMoves
from orchestrator.core.facts.reasons import AwaitsRoom
from orchestrator.core.facts.requesters import ByShrinking
from orchestrator.core.lifecycle.advance import request_stop
from orchestrator.core.states import StopPurpose

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.rounds.commands import Commands
    from orchestrator.core.scheduler.rounds.head import Head


def make_room_for(ahead: Head, now: float, commands: Commands) -> None:
    """Stop, shrink or move others for the first job that does not fit; called once nothing else changes."""
    job = ahead.job
    if job is None:
        return
    if _move_under_way(job, ahead, commands) or _shrink(job, ahead, now, commands):
        return
    if not (_reclaim_idle(job, ahead, commands) or _move(job, ahead, now, commands)):
        _stop(ahead, now, commands)


def _move_under_way(job: Job, ahead: Head, commands: Commands) -> bool:
    moving = ahead.moving()
    if moving:
        commands.waiting[job.id] = AwaitsMoves(jobs=tuple(one.id for one in moving))
    return bool(moving)


def _shrink(job: Job, ahead: Head, now: float, commands: Commands) -> bool:
    under_way, smaller = ahead.shrinks()
    for other, ranks in smaller:
        shrinks = ByShrinking(job=job.id, ranks=ranks, instead_of=other.num_workers)
        commands.events.extend(request_stop(other, StopPurpose.RESIZE, shrinks, now))
    shrinking = under_way or [other for other, _ in smaller]
    if shrinking:
        commands.waiting[job.id] = AwaitsRoom(jobs=tuple(other.id for other in shrinking))
    return bool(shrinking)


def _reclaim_idle(job: Job, ahead: Head, commands: Commands) -> bool:
    idle = ahead.idle()
    if idle is None:
        return False
    commands.ask_again(idle.ask_again_at)
    if idle.events:
        commands.events += idle.events
        commands.waiting[job.id] = AwaitsRoom(jobs=idle.jobs)
    return bool(idle.events)


def _move(job: Job, ahead: Head, now: float, commands: Commands) -> bool:
    plan = ahead.moves()
    if plan is None:
        return False
    commands.ask_again(plan.ask_again_at)
    if events := plan.events(job, ahead.nodes, now):
        commands.events += events
        commands.waiting[job.id] = AwaitsMoves(jobs=tuple(move.job.id for move in plan.moves))
    return plan.under_way


def _stop(ahead: Head, now: float, commands: Commands) -> None:
    job, room, by = ahead.stops()
    commands.ask_again(room.ask_again_at)
    if job is None or by is None:
        return
    for other in room.stop:
        commands.events.extend(request_stop(other, StopPurpose.PREEMPT, by, now))
    if stopping := room.stop or room.stopping:
        commands.waiting[job.id] = AwaitsRoom(jobs=tuple(other.id for other in stopping))
